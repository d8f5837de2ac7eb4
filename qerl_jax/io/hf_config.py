"""Hugging Face `config.json` and `generation_config.json` to `ModelConfig`, and what their quantization sections
mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qerl_jax.io.safetensors import CheckpointError
from qerl_jax.models.qwen2 import ModelConfig

_DEFAULT_ROPE_THETA = 1e6


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, or CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def model_config(directory: Path) -> ModelConfig:
    """Shape of the model in a directory.

    Raises:
      FileNotFoundError: no config.json.
      CheckpointError: not a Qwen2 model, or a feature that is not implemented (another activation, scaled rotary
        positions, sliding windows); the message names file, key and value.
    """
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

    def positive(key: str, kind: type = int, default: Any = None) -> Any:
        value = config.get(key) if config.get(key) is not None else default
        if not isinstance(value, int | kind) or isinstance(value, bool) or value <= 0:
            noun = "whole number" if kind is int else "number"
            raise CheckpointError(f"{where}: {key} must be a {noun} above 0, got {value!r}")
        return value

    heads, hidden = positive("num_attention_heads"), positive("hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim is given"
        )
    head_dim = positive("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {head_dim} is odd: rotary positions turn pairs")
    eos = _eos_ids(config, generation)
    pad = next((p for p in (generation.get("pad_token_id"), config.get("pad_token_id")) if isinstance(p, int)), None)
    try:
        return ModelConfig(
            vocab_size=positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=positive("intermediate_size"),
            num_layers=positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=positive("num_key_value_heads", default=heads),
            head_dim=head_dim,
            rope_theta=float(rope_theta(config)),
            rms_norm_eps=float(positive("rms_norm_eps", float, 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=positive("max_position_embeddings"),
            eos_token_ids=eos,
            pad_token_id=pad if pad is not None else (eos[0] if eos else 0),
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    if config.get("model_type") != "qwen2":
        raise CheckpointError(f"{where}: model_type is {config.get('model_type')!r}, supported is 'qwen2'")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act is {config['hidden_act']!r}, supported is 'silu'")
    if config.get("use_sliding_window"):
        raise CheckpointError(f"{where}: use_sliding_window is true; only full attention is implemented")
    for key in ("rope_scaling", "rope_parameters"):
        kind = (config.get(key) or {}).get("rope_type", (config.get(key) or {}).get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"{where}: {key} asks for rotary positions of type {kind!r}, supported is 'default'")


def rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary angles: at top level, or in `rope_parameters` (transformers 5)."""
    return config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or _DEFAULT_ROPE_THETA


def _eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Every EOS id of both files, generation_config.json first."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in ids:
                ids.append(token)
    return tuple(ids)


def quantization_format(config: dict[str, Any], where: str) -> str | None:
    """`"compressed-tensors"`, `"modelopt"` or None, from `quantization_config`.

    Raises CheckpointError for a scheme that is not weight-only NVFP4.
    """
    section = config.get("quantization_config")
    if not section:
        return None
    method, algorithm = section.get("quant_method"), section.get("quant_algo")
    if method == "compressed-tensors":
        if section.get("format") != "nvfp4-pack-quantized":
            raise CheckpointError(
                f"{where}: compressed-tensors format {section.get('format')!r}, supported is 'nvfp4-pack-quantized'"
            )
        return "compressed-tensors"
    if method == "modelopt" or (section.get("producer") or {}).get("name") == "modelopt":
        if algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise CheckpointError(
                f"{where}: ModelOpt quant_algo {algorithm!r}, supported are 'NVFP4' and 'W4A16_NVFP4'"
            )
        return "modelopt"
    raise CheckpointError(
        f"{where}: quantization method {method!r}, supported are 'compressed-tensors' and 'modelopt' with NVFP4"
    )
