"""Hugging Face `config.json` and `generation_config.json` to `ModelConfig`, and their quantization sections."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from qerl_jax.checkpoint.layouts import Quantization, quantization_of
from qerl_jax.checkpoint.run_files import ADAPTER_DIR, is_run
from qerl_jax.checkpoint.safetensors import CheckpointError, read_json, unread_weights
from qerl_jax.checkpoint.tokenizer import eos_id
from qerl_jax.config.values import LARGEST_INT
from qerl_jax.messages import shown
from qerl_jax.models.config import ModelConfig, RopeScaling

MODELOPT_FILE = "hf_quant_config.json"
MAX_LAYERS, _MAX_PARAMETERS = 1_000, 1e13
_MODEL_TYPES = ("qwen2", "qwen3", "llama")
_QWEN3_HEAD_DIM = 128  # transformers' default, whatever the hidden size
_DEFAULT_ROPE_THETA = 10_000.0  # what transformers takes; every published Qwen2.5 states its own
_DEFAULT_KV_HEADS, _DEFAULT_WINDOW_LAYERS = 32, 28  # likewise, for a Qwen that does not name them


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
        state = f"is a file{unread_weights(directory.parent)}" if directory.exists() else f"does not exist{hint}"
        raise FileNotFoundError(f"model directory {directory} {state}")
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            _of_training(directory)
            or f"{path} does not exist: a model is a Hugging Face directory with config.json and safetensors"
            f"{unread_weights(directory)}"
        )
    config = read_json(path)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_config(config, generation, str(path), eos_id(directory))


def _of_training(directory: Path) -> str:
    """What to name in the place of the directory of an adapter, a run or an export; "" for another one."""
    from qerl_jax.checkpoint.peft_config import CONFIG_FILE  # which reads this module

    for adapter in (directory, directory / ADAPTER_DIR):
        if (adapter / CONFIG_FILE).is_file():
            base = read_json(adapter / CONFIG_FILE).get("base_model_name_or_path")
            return f"{directory} is no model: give its base, {shown(base)}, as the model and {adapter} as the adapter"
    if is_run(directory):
        write = f"python -m qerl_jax.export {shlex.quote(str(directory))} OUT"
        return f"{directory} is a run, not a model: `{write}` writes its newest adapter, `--as merged` a model"
    return ""


def parse_config(
    config: dict[str, Any], generation: dict[str, Any], where: str, tokenizer_eos: int | None = None
) -> ModelConfig:
    """`ModelConfig` from the two JSON objects as transformers 5 reads them. `where` names the file in errors.
    `tokenizer_eos`: id of the tokenizer's `eos_token`, which ends a completion, too.
    """
    _refuse_unsupported(config, where)
    theta, scaling = _rope(config, where)

    def positive(key: str, default: int | None = None) -> int:
        value = config.get(key) if config.get(key) is not None else default
        highest = MAX_LAYERS if key == "num_hidden_layers" else LARGEST_INT
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
    vocab, num_layers = positive("vocab_size"), positive("num_hidden_layers")
    _refuse_windows(config, num_layers, where)
    grouped = "num_key_value_heads" in config or config["model_type"] == "llama"
    eos = _token_ids("eos_token_id", config, generation, vocab, where)
    if tokenizer_eos is not None and tokenizer_eos not in eos and 0 <= tokenizer_eos < vocab:
        eos += (tokenizer_eos,)
    pad = _token_ids("pad_token_id", config, generation, vocab, where)
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": positive("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": positive("num_key_value_heads", default=heads if grouped else _DEFAULT_KV_HEADS),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rms_norm_eps": _positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6), where),
        "tie_word_embeddings": _flag("tie_word_embeddings", config, where),
        "max_position_embeddings": positive("max_position_embeddings"),
        "eos_token_ids": eos,
        "pad_token_id": (*pad, *eos, 0)[0],
        "qkv_bias": config["model_type"] == "qwen2",
        "qk_norm": config["model_type"] == "qwen3",
        "rope_scaling": scaling,
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


def _rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and stretching of the rotary frequencies: those of `rope_scaling` where it holds anything, else those of
    `rope_parameters`; what that section leaves out stands at top level.
    """
    found = {key: _section(key, config, where) for key in ("rope_scaling", "rope_parameters")}
    key = "rope_scaling" if found["rope_scaling"] else "rope_parameters"
    section = found[key]
    kind = section.get("rope_type", section.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise CheckpointError(
            f"{where}: {key} asks for rotary positions of type {shown(kind)}, supported are 'default' and 'llama3'"
        )
    for name, value in section.items():
        if isinstance(value, dict):
            raise CheckpointError(f"{where}: {key} has rotary positions for {name!r} alone, which is not supported")
    inherited = ("rope_theta", "partial_rotary_factor")
    merged = {**{name: config[name] for name in inherited if name in config}, **section}
    if merged.get("partial_rotary_factor", 1) not in (None, 1):
        raise CheckpointError(
            f"{where}: partial_rotary_factor is {shown(merged['partial_rotary_factor'])}, supported is 1"
        )
    theta = _positive_number("rope_theta", merged.get("rope_theta", _DEFAULT_ROPE_THETA), where)
    if kind == "default":
        return theta, None
    name = "original_max_position_embeddings"  # beside the section it comes before its own
    given = config.get(name), merged.get(name), config.get("max_position_embeddings")
    merged[name] = next((value for value in given if value is not None), None)
    factor, low, high, original = (
        _positive_number(f"{key}.{field.name}", merged.get(field.name), where)
        for field in dataclasses.fields(RopeScaling)
    )
    if low >= high or original != int(original):
        raise CheckpointError(
            f"{where}: {key} has low_freq_factor {low:g}, high_freq_factor {high:g} and "
            f"original_max_position_embeddings {original:g}: the first must be below the second, the third whole"
        )
    return theta, RopeScaling(factor, low, high, int(original))


def _refuse_windows(config: dict[str, Any], num_layers: int, where: str) -> None:
    """Refuse layers that attend to a window: those of `layer_types`; without it, of a Qwen that uses windows, those
    from `max_window_layers` on.
    """
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{where}: layer_types is {shown(kinds)}; only 'full_attention' is implemented")
    if kinds or config["model_type"] == "llama" or not config.get("use_sliding_window"):
        return
    first = config.get("max_window_layers", _DEFAULT_WINDOW_LAYERS)
    if type(first) is not int or first < num_layers:
        raise CheckpointError(
            f"{where}: use_sliding_window is {json.dumps(config['use_sliding_window'])} with max_window_layers "
            f"{shown(first)} of {num_layers} layers; only full attention is implemented"
        )


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


def stored_quantization(directory: Path) -> Quantization | None:
    """How a model directory's weights are quantized, None if they are not: by `quantization_config` of config.json, or
    by ModelOpt's hf_quant_config.json where that says nothing.

    Raises CheckpointError for a scheme that is neither NVFP4, MXFP4 nor NF4.
    """
    path, beside = directory / "config.json", directory / MODELOPT_FILE
    section = _section("quantization_config", read_json(path), str(path))
    if not section and beside.exists():
        path, section = beside, read_json(beside)
    return quantization_of(section, str(path)) if section else None
