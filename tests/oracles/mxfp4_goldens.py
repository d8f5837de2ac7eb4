"""MXFP4 weights that compressed-tensors 0.20.0 quantized, and its config of them: packed codes and scales of
`weights()`. The program that made them is this file up to e6a12502.
"""

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
