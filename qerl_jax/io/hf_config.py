"""Hugging Face `config.json` and `generation_config.json` to `ModelConfig`, and their quantization sections."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK

from qerl_jax.config.values import LARGEST_INT
from qerl_jax.io.safetensors import CheckpointError, read_json
from qerl_jax.models.config import ModelConfig, RopeScaling
from qerl_jax.untrusted import require_regular, shown

_MAX_LAYERS, _MAX_PARAMETERS = 1_000, 1e13
_MODEL_TYPES = ("qwen2", "qwen3", "llama")
_QWEN3_HEAD_DIM = 128  # transformers' default, whatever the hidden size
_DEFAULT_ROPE_THETA = 10_000.0  # what transformers takes; every published Qwen2.5 states its own
# What a compressed-tensors scheme must say of its weights, where it says it, for the bytes to mean NVFP4 or MXFP4.
_FP4_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_COMPRESSED = {  # layout, and its weights, by the format that compressed-tensors names
    "nvfp4-pack-quantized": ("compressed-tensors", {**_FP4_WEIGHTS, "group_size": NVFP4_BLOCK}),
    "mxfp4-pack-quantized": ("compressed-tensors, MXFP4", {**_FP4_WEIGHTS, "group_size": MXFP4_BLOCK}),
}
# What bitsandbytes must say for its bytes to mean NF4; an older config does not say how the codes are stored.
_NF4_WEIGHTS = {"load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_NF4_STORAGE = {"bnb_4bit_quant_storage": "uint8"}

# ModelOpt's algorithms whose weights have the layout of NVFP4. That of AWQ also tells that inputs of some projections
# may be scaled; `tensor_names` refuses those.
_MODELOPT = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")


def model_config(directory: Path) -> ModelConfig:
    """Shape of the model in a directory.

    Raises:
      FileNotFoundError: no such directory, or no config.json in it.
      CheckpointError: not a Qwen2, Qwen3 or Llama model, or a feature that is not implemented (another activation,
        biases by `attention_bias`, rotary positions scaled otherwise than in Llama 3.1, sliding windows); the message
        names file, key and value.
    """
    if not directory.is_dir():
        hint = "; a model of the hub is named ORGANIZATION/NAME" if directory.parent == Path() else ""
        raise FileNotFoundError(f"model directory {directory} does not exist{hint}")
    for entry in sorted(directory.iterdir()):  # libraries open files of any name
        require_regular(entry)
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: a model is a Hugging Face directory with config.json and safetensors"
        )
    config = read_json(path)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_config(config, generation, str(path))


def parse_config(config: dict[str, Any], generation: dict[str, Any], where: str) -> ModelConfig:
    """`ModelConfig` from the two JSON objects; `where` names the file in errors."""
    _refuse_unsupported(config, where)

    def positive(key: str, default: int | None = None) -> int:
        value = config.get(key) if config.get(key) is not None else default
        highest = _MAX_LAYERS if key == "num_hidden_layers" else LARGEST_INT
        if type(value) is not int or not 0 < value <= highest:
            raise CheckpointError(f"{where}: {key} must be a whole number from 1 to {highest:,}, got {shown(value)}")
        return value

    heads, hidden = positive("num_attention_heads"), positive("hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim is given"
        )
    head_dim = positive("head_dim", default=_QWEN3_HEAD_DIM if config["model_type"] == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {head_dim} is odd: rotary positions turn pairs")
    vocab = positive("vocab_size")
    eos = _token_ids("eos_token_id", config, generation, vocab, where)
    pad = _token_ids("pad_token_id", config, generation, vocab, where)
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": positive("intermediate_size"),
        "num_layers": positive("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": positive("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "rope_theta": rope_theta(config, where),
        "rms_norm_eps": _positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6), where),
        "tie_word_embeddings": _flag("tie_word_embeddings", config, where),
        "max_position_embeddings": positive("max_position_embeddings"),
        "eos_token_ids": eos,
        "pad_token_id": (*pad, *eos, 0)[0],
        "qkv_bias": config["model_type"] == "qwen2",
        "qk_norm": config["model_type"] == "qwen3",
        "rope_scaling": _rope_scaling(config, where),
    }
    try:
        model = ModelConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if model.parameter_count() > _MAX_PARAMETERS:
        raise CheckpointError(
            f"{where}: its sizes make a model of {model.parameter_count():.1e} parameters, at most "
            f"{_MAX_PARAMETERS:.0e} are supported"
        )
    return model


def _positive_number(key: str, value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"{where}: {key} must be a number above 0, got {shown(value)}")
    return float(value)


def _flag(key: str, config: dict[str, Any], where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} must be true or false, got {shown(value)}")
    return value


def _section(key: str, config: dict[str, Any], where: str) -> dict[str, Any]:
    """A nested object; empty if it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} must be an object, got {shown(value)}")
    return value or {}


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    if config.get("model_type") not in _MODEL_TYPES:
        raise CheckpointError(
            f"{where}: model_type is {shown(config.get('model_type'))}, supported are 'qwen2', 'qwen3' and 'llama'"
        )
    for key in ("attention_bias", "mlp_bias"):  # Qwen2's biases of q, k and v are not optional, and have no key
        if config.get(key):
            raise CheckpointError(f"{where}: {key} is {shown(config[key])}; only models without it are supported")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act is {shown(config['hidden_act'])}, supported is 'silu'")
    if config.get("use_sliding_window"):
        raise CheckpointError(
            f"{where}: use_sliding_window is {json.dumps(config['use_sliding_window'])}; only full attention is "
            "implemented"
        )
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise CheckpointError(f"{where}: layer_types is {shown(layer_types)}; only 'full_attention' is implemented")
    for key in ("rope_scaling", "rope_parameters"):
        section = _section(key, config, where)
        kind = section.get("rope_type", section.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise CheckpointError(
                f"{where}: {key} asks for rotary positions of type {shown(kind)}, supported are 'default' and 'llama3'"
            )


def _rope_scaling(config: dict[str, Any], where: str) -> RopeScaling | None:
    """Stretched frequencies, from `rope_scaling` or `rope_parameters` (transformers 5)."""
    for key in ("rope_scaling", "rope_parameters"):
        section = _section(key, config, where)
        if section.get("rope_type", section.get("type")) != "llama3":
            continue
        factor, low, high, original = (
            _positive_number(f"{key}.{field.name}", section.get(field.name), where)
            for field in dataclasses.fields(RopeScaling)
        )
        if low >= high or original != int(original):
            raise CheckpointError(
                f"{where}: {key} has low_freq_factor {low:g}, high_freq_factor {high:g} and "
                f"original_max_position_embeddings {original:g}: the first must be below the second, the third whole"
            )
        return RopeScaling(factor, low, high, int(original))
    return None


def rope_theta(config: dict[str, Any], where: str) -> float:
    """Base of the rotary angles: at top level, or in `rope_parameters` (transformers 5). Raises CheckpointError for
    what is no number above 0.
    """
    nested = _section("rope_parameters", config, where).get("rope_theta")
    value = config.get("rope_theta") if config.get("rope_theta") is not None else nested
    return _DEFAULT_ROPE_THETA if value is None else _positive_number("rope_theta", value, where)


def _token_ids(
    key: str, config: dict[str, Any], generation: dict[str, Any], vocab_size: int, where: str
) -> tuple[int, ...]:
    """Every id that generation_config.json and config.json give for a key, in this order."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
                file = where if source is config else f"generation_config.json beside {where}"
                raise CheckpointError(
                    f"{file}: {key} is {shown(value)}, but token ids are whole numbers below vocab_size {vocab_size}"
                )
            if token is not None and token not in ids:
                ids.append(token)
    return tuple(ids)


def stored_format(directory: Path) -> str | None:
    """`quantization_format` of a model directory."""
    path = directory / "config.json"
    return quantization_format(read_json(path), str(path))


def quantization_format(config: dict[str, Any], where: str) -> str | None:
    """Layout of the quantized weights, a key of `names.QUANTIZED`, or None, from `quantization_config`.

    Raises CheckpointError for a scheme that is neither NVFP4, MXFP4 nor NF4.
    """
    if config.get("quantization_config") is None:
        return None
    section = _section("quantization_config", config, where)
    method, algorithm = section.get("quant_method"), section.get("quant_algo")
    if method == "compressed-tensors":
        packed = section.get("format")
        if not isinstance(packed, str) or packed not in _COMPRESSED:
            supported = " and ".join(map(repr, _COMPRESSED))
            raise CheckpointError(f"{where}: compressed-tensors format {shown(packed)}, supported are {supported}")
        layout, needed = _COMPRESSED[packed]
        for name, group in _section("config_groups", section, where).items():
            weights = (group.get("weights") if isinstance(group, dict) else None) or {}
            for key, expected in needed.items():
                if not isinstance(weights, dict) or weights.get(key, expected) != expected:
                    raise CheckpointError(
                        f"{where}: config_groups.{name}.weights is {shown(weights)}, {packed[:5].upper()} has {key} "
                        f"{expected!r}"
                    )
        return layout
    if method == "modelopt" or _section("producer", section, where).get("name") == "modelopt":
        if algorithm not in _MODELOPT:
            raise CheckpointError(f"{where}: ModelOpt quant_algo {shown(algorithm)}, supported are {list(_MODELOPT)}")
        return "modelopt"
    if method == "bitsandbytes":
        for key, expected in {**_NF4_WEIGHTS, **_NF4_STORAGE}.items():
            value = section.get(key, _NF4_STORAGE.get(key, False))
            if value != expected:
                raise CheckpointError(f"{where}: quantization_config has {key} {shown(value)}, NF4 has {expected!r}")
        return "bitsandbytes"
    raise CheckpointError(
        f"{where}: quantization method {shown(method)}, supported are 'compressed-tensors' with NVFP4 or MXFP4, "
        "'modelopt' with NVFP4, and 'bitsandbytes' with NF4"
    )
