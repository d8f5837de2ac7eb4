"""NF4 by bitsandbytes and transformers, and the program that made it.

`python tests/oracles/nf4_goldens.py` rewrites `tests/data/nf4/`. It needs `pip install bitsandbytes==0.50.2
transformers==5.23.0 accelerate torch`, CPU builds; the tests need neither bitsandbytes nor accelerate.

- `golden.json`: SHA-256 of the tensors that transformers saves of the bundled policy, loaded with `load_in_4bit` and
  type nf4, and its `quantization_config`.
- `stress.safetensors`: `weights()` quantized by the library, with and without double quantization, and the absmax that
  it dequantizes.
- `double-quantized/`: a random fp32 model as transformers saves it with double quantization, and its logits there.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/nf4"
BUNDLED = ROOT / "qerl_jax/assets/tiny-qwen2"
NF4 = (  # bitsandbytes/functional.py, get_4bit_type
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """By name of the dtype: [18, 960], that is 270 blocks. Normal rows over many magnitudes; rows of values on the
    boundaries between codes, and one ulp beside them, for absmax 1 and for others; blocks of zeros, of -0, and of
    values below 1e-38.
    """
    rng = np.random.default_rng(7)
    weight = (rng.normal(size=(18, 960)) * 10.0 ** rng.uniform(-4, 2, size=(18, 1))).astype(np.float32)
    table = np.asarray(NF4, np.float32)
    boundaries = np.resize((table[1:] + table[:-1]) / 2, 960)
    for row, amax in enumerate((1.0, 0.7, 3.1e-3, 1.9)):
        near = rng.choice(np.asarray([-np.inf, np.inf], np.float32), 960)
        exact = boundaries * np.float32(amax)
        weight[row] = np.where(rng.random(960) < 0.4, exact, np.nextafter(exact, near))
        weight[row, ::64] = amax * (-1) ** row
    weight[4, :64], weight[4, 64:128] = 0, np.where(np.arange(64) % 2, -0.0, 0.0)
    weight[4, 128:192] = rng.normal(size=64) * 1e-39
    return {name: weight.astype(getattr(ml_dtypes, name, name)) for name in ("bfloat16", "float16", "float32")}


def stress() -> dict:
    """Tensors of `weights()` as a checkpoint has them: modules `DTYPE.plain` and `DTYPE.double`."""
    import torch
    from bitsandbytes import functional

    tensors = {}
    for name, weight in weights().items():
        values = torch.tensor(weight.astype(np.float32)).to(getattr(torch, name))
        for kind in ("plain", "double"):
            codes, state = functional.quantize_4bit(
                values, blocksize=64, compress_statistics=kind == "double", quant_type="nf4"
            )
            tensors[f"{name}.{kind}.weight"] = codes
            tensors |= {f"{name}.{kind}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
            if kind == "double":
                absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
                tensors[f"{name}.dequantized_absmax"] = absmax
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def random_model(directory: Path) -> None:
    """An fp32 Qwen2 of 100,000 parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)


def in_4bit(source: Path, directory: Path, double: bool, dtype: str):
    """Load a model in NF4 and save it. Returns it."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind = getattr(torch, dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=kind,
        bnb_4bit_use_double_quant=double,
    )
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=kind, device_map="cpu")
    model.save_pretrained(directory)
    return model


def main() -> None:
    """Write the goldens."""
    import bitsandbytes
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    GOLDEN.mkdir(exist_ok=True)
    save_file(stress(), GOLDEN / "stress.safetensors")
    with tempfile.TemporaryDirectory() as temporary:
        bundled, source = Path(temporary) / "bundled", Path(temporary) / "source"
        in_4bit(BUNDLED, bundled, False, "bfloat16")
        tensors = load_file(bundled / "model.safetensors")
        golden = {
            "bitsandbytes": bitsandbytes.__version__,
            "transformers": transformers.__version__,
            "quantization_config": json.loads((bundled / "config.json").read_text())["quantization_config"],
            "sha256": {
                name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, tensor in sorted(tensors.items())
            },
        }
        (GOLDEN / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
        random_model(source)
        out = GOLDEN / "double-quantized"
        shutil.rmtree(out, ignore_errors=True)
        model = in_4bit(source, out, True, "float32")
        tokens = np.random.default_rng(0).integers(0, 96, (2, 12))
        with torch.no_grad():
            logits = model.train()(torch.tensor(tokens)).logits  # in eval mode a CPU's kernel multiplies in bf16
        np.savez(out / "logits.npz", tokens=tokens.astype(np.int32), logits=logits.numpy())


if __name__ == "__main__":
    main()
