"""A Qwen2.5-shaped checkpoint with random weights, for tests, benchmarks and trying the program without a download.

    python tools/make_checkpoint.py 0.5B OUT [--format bf16|nvfp4] [--layers N] [--tokenizer DIR] [--seed 0]

Shapes are those of the published models and values are random: the model talks nonsense at the true speed. Tensors
are written one at a time, so that a 32B checkpoint needs little memory. With `--layers` it has fewer layers than the
published one, for what works layer by layer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from qerl_jax.atomic import atomic_directory, write_json
from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.layout_nvfp4 import NVFP4
from qerl_jax.checkpoint.safetensors import DTYPES, INDEX_FILE, save
from qerl_jax.models.config import ModelConfig, tensors_of

# size: hidden, ffn, layers, heads, kv heads, head dim, vocab, tied (arXiv 2412.15115, table 1, and the published
# config.json files)
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 64, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 128, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 128, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 128, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 128, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 128, 152064, False),
}
_STD = 0.02  # initializer_range of the published models
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "special_tokens_map.json",
)


def hf_config(size: str) -> dict:
    """The config.json of a published size."""
    hidden, ffn, layers, heads, kv_heads, head_dim, vocab, tied = SIZES[size]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "bos_token_id": min(151643, vocab - 1),
        "eos_token_id": min(151645, vocab - 1),
        "pad_token_id": min(151643, vocab - 1),
        "torch_dtype": "bfloat16",
    }


Spec = tuple[np.dtype, tuple[int, ...]]


def specs_of(config: ModelConfig, layer: int | None, quantized: bool) -> dict[str, Spec]:
    """Dtype and shape of each tensor of a decoder layer, or of those outside the layers."""
    bf16, specs = DTYPES["BF16"], {}
    for spec in (spec for spec in tensors_of(config) if spec.in_layer == (layer is not None)):
        if spec.kind != "projection" or not quantized:
            specs |= {name: (bf16, shape) for name, shape in spec.stored(layer).items()}
            continue
        for module, shape in zip(spec.modules(layer), spec.stored(layer).values(), strict=True):
            expected = NVFP4.expected({}, module, shape)
            specs |= {name: (np.dtype(dtypes[0]), shape) for name, (shape, dtypes) in expected.items()}
    return specs


def random_tensor(name: str, spec: Spec, rng: np.random.Generator) -> np.ndarray:
    """Random values of a tensor; norms are 1. Codes are uniform; scales and divisor give weights about the published
    standard deviation."""
    dtype, shape = spec
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype)
    if name.endswith("weight_packed"):
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith("weight_scale"):  # bytes 0x60 to 0x67 are 32 to 60; codes have rms 3.0
        return rng.integers(0x60, 0x68, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    if name.endswith("weight_global_scale"):
        return np.full(shape, 46 * 3.0 / _STD, np.float32)
    return (rng.standard_normal(shape, np.float32) * np.float32(_STD)).astype(dtype)


def make_checkpoint(
    size: str, out: Path, weight_format: str, tokenizer: Path | None, seed: int, layers: int | None = None
) -> None:
    """Write the directory: one shard for each layer, and one for embedding, head and final norm."""
    raw = hf_config(size) | ({} if layers is None else {"num_hidden_layers": layers})
    config = parse_config(raw, {}, size)
    shards = [specs_of(config, layer, weight_format == "nvfp4") for layer in (None, *range(config.num_layers))]
    with atomic_directory(out) as directory:
        weight_map, size_bytes = {}, 0
        for i, specs in enumerate(shards):
            rng = np.random.default_rng([seed, i])
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save(directory / file, {name: random_tensor(name, specs[name], rng) for name in sorted(specs)})
            weight_map |= dict.fromkeys(specs, file)
            size_bytes += sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in specs.values())
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})
        if weight_format == "nvfp4":
            raw["quantization_config"] = NVFP4.quantization_config(np.dtype(ml_dtypes.bfloat16), ())
        write_json(directory / "config.json", raw)
        write_json(directory / "generation_config.json", {"eos_token_id": [151645, 151643], "pad_token_id": 151643})
        for name in _TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, directory / name)
    print(
        json.dumps({"size": size, "format": weight_format, "parameters": config.parameter_count(), "bytes": size_bytes})
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=("bf16", "nvfp4"), default="bf16")
    parser.add_argument("--layers", type=int, help="number of layers; default: the published one")
    parser.add_argument("--tokenizer", type=Path, help="directory whose tokenizer files are copied")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_checkpoint(
        arguments.size, arguments.out, arguments.format, arguments.tokenizer, arguments.seed, arguments.layers
    )


if __name__ == "__main__":
    main()
