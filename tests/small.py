"""Model directories of 20,000 parameters with the bundled tokenizer: loaded in milliseconds, for tests of many."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.models.config import tensors_of

CONFIG = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 512,
    "tie_word_embeddings": False, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "use_sliding_window": False, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def bf16(directory: Path, shards: int = 2, seed: int = 0, **changes: int) -> Path:
    """A random bf16 model in `shards` files with an index, or in a single one; `changes` of `CONFIG`."""
    directory.mkdir(parents=True)
    raw = {**CONFIG, **changes}
    config, rng = parse_config(raw, {}, "config.json"), np.random.default_rng(seed)
    shapes = {
        name: shape
        for spec in tensors_of(config)
        for layer in spec.places(config.num_layers)
        for name, shape in spec.stored(layer).items()
    }
    tensors = {
        name: (rng.normal(scale=0.1, size=shape) + ("norm" in name)).astype(ml_dtypes.bfloat16)
        for name, shape in sorted(shapes.items())
    }
    if shards == 1:
        st.save(directory / st.SINGLE_FILE, tensors)
    else:
        files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
        for file in set(files.values()):
            st.save(directory / file, {name: tensors[name] for name in tensors if files[name] == file})
        write_json(directory / st.INDEX_FILE, {"metadata": {"total_size": 1}, "weight_map": files})
    write_json(directory / "config.json", raw)
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})
    for name in TOKENIZER:
        shutil.copyfile(assets.model_path("tiny") / name, directory / name)
    return directory


def nvfp4(directory: Path, seed: int = 0) -> Path:
    """The same quantized, in the layout of compressed-tensors."""
    source = bf16(directory.with_name(directory.name + "-bf16"), 1, seed)
    quantize_checkpoint(source, directory)
    return directory


def unloadable(directory: Path, **changes: object) -> Path:
    """An NVFP4 model, `changes` in its config.json, that is refused as soon as somebody reads its weights."""

    def without_scale(tensors: dict) -> None:
        tensors[next(name for name in tensors if name.endswith("weight_global_scale"))][...] = 0

    change_tensors(nvfp4(directory), without_scale)
    change_json(directory / "config.json", **changes)
    return directory


def modelopt(directory: Path, seed: int = 0) -> Path:
    """The same with ModelOpt's names, and its multiplier where compressed-tensors has a divisor."""
    source = nvfp4(directory.with_name(directory.name + "-ct"), seed)
    shutil.copytree(source, directory)
    tensors = {}
    for name, array in st.open_checkpoint(source).items():
        if name.endswith(".weight_global_scale"):
            tensors[name.replace("weight_global_scale", "weight_scale_2")] = (1 / array).reshape(())
        else:
            tensors[name.replace(".weight_packed", ".weight")] = array
    st.save(directory / st.SINGLE_FILE, tensors)
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
    write_json(directory / "config.json", {**CONFIG, "quantization_config": section})
    return directory


def nf4(directory: Path, seed: int = 0) -> Path:
    """A wider one in the layout of bitsandbytes, whose blocks are of 64."""
    widths = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    source = bf16(directory.with_name(directory.name + "-bf16"), 1, seed, **widths)
    quantize_checkpoint(source, directory, "nf4")
    return directory


def write_json(path: Path, value: object) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value, indent=1))


def change_json(path: Path, **changes: object) -> None:
    """Replace keys of a JSON object."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def change_tensors(directory: Path, change: object, file: str = st.SINGLE_FILE) -> None:
    """Rewrite the single file of a model, or another, after `change(dict of arrays)`."""
    tensors = {name: np.array(array) for name, array in st.open_files([directory / file]).items()}
    change(tensors)
    st.save(directory / file, tensors)
