"""MXFP4 weights quantized by compressed-tensors, its config of them, and the program that made both.

`python tests/oracles/mxfp4_goldens.py` rewrites `tests/data/mxfp4/compressed-tensors.safetensors`, with packed
codes and scales of `weights()`, and `quantization_config.json` beside it. It needs `pip install
compressed-tensors==0.20.0 torch`; the tests need neither.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "data/mxfp4/compressed-tensors.safetensors"
CONFIG = GOLDEN.with_name("quantization_config.json")


def weights() -> dict[str, np.ndarray]:
    """By name of the dtype: [18, 96], normal rows over many magnitudes; rows whose blocks have their maximum just
    below, at and just above 1.75 · 2^e; ties of the codes; a zero block, and one of zeros and -0.
    """
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(18, 96)) * 10.0 ** rng.uniform(-4, 2, size=(18, 1))
    for row, amax in enumerate((1.7421875, 1.75, 1.7578125, 3.5, 6, 7, 0.875, 1.9921875)):
        weight[row] = rng.uniform(-1, 1, 96) * amax
        weight[row, ::32] = amax * (-1) ** row
    weight[8] = rng.integers(-24, 25, 96) / 4
    weight[9, :32], weight[9, 32:64] = 0, np.where(np.arange(32) % 2, -0.0, 0.0)
    weight[10] *= 2.0**-100
    return {name: weight.astype(getattr(ml_dtypes, name, name)) for name in ("bfloat16", "float32")}


def main() -> None:
    """Write the goldens."""
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file

    scheme: QuantizationScheme = preset_name_to_scheme("MXFP4A16", targets=["Linear"])
    tensors = {}
    for name, weight in weights().items():
        values = torch.tensor(weight.astype(np.float64)).to(getattr(torch, name))
        blocks = values.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        made = MXFP4PackedCompressor.compress({"weight": values, "weight_scale": scale}, scheme)
        for suffix in ("weight_packed", "weight_scale"):
            tensors[f"{name}.{suffix}"] = made[suffix].contiguous()
    GOLDEN.parent.mkdir(exist_ok=True)
    save_file(tensors, GOLDEN)
    scheme.format = "mxfp4-pack-quantized"
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=scheme.format, quantization_status="compressed"
    ).model_dump(mode="json")
    del config["moe_sparsity_config"]  # None, and new in that release
    CONFIG.write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
