"""Hugging Face's parameter names of a Qwen2, Qwen3 or Llama checkpoint, as one table."""

from __future__ import annotations

from qerl_jax.models.config import LAYER_NORMS
from qerl_jax.models.lora import PROJECTIONS

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
BIASED = ("q_proj", "k_proj", "v_proj")

# Suffixes of a quantized projection's tensors, in the order (codes, block scales, global scale, ignored activation
# scale); MXFP4 has no global scale. `io.bitsandbytes` names the further tensors of its NF4.
QUANTIZED = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors, MXFP4": ("weight_packed", "weight_scale", None, "input_global_scale"),
    "bitsandbytes": ("weight", "weight.absmax", None, None),
}
STORED_FORMAT = {
    "compressed-tensors": "nvfp4",
    "modelopt": "nvfp4",
    "compressed-tensors, MXFP4": "mxfp4",
    "bitsandbytes": "nf4",
}
"""The weight format, one of `WEIGHT_FORMATS`, of each layout in `QUANTIZED`."""

# The block of a decoder layer that a projection stands in.
BLOCK = {p: ("self_attn" if p in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp") for p in PROJECTIONS}


def layer_prefix(layer: int) -> str:
    """Prefix of everything in a decoder layer."""
    return f"model.layers.{layer}."


def projection(layer: int, name: str) -> str:
    """Module path of a projection, without `.weight`."""
    return f"{layer_prefix(layer)}{BLOCK[name]}.{name}"


def split_projection(name: str) -> tuple[str, str]:
    """Module path and suffix of a projection's tensor; the suffix of a quantized one may have dots. ("", name) for any
    other tensor.
    """
    path, found, suffix = name.partition("_proj.")
    return (f"{path}_proj", suffix) if found else ("", name)


def head_norm(layer: int, name: str) -> str:
    """Name of the weight of "q_norm" or "k_norm"."""
    return f"{layer_prefix(layer)}self_attn.{name}.weight"


def layer_norm(layer: int, name: str) -> str:
    """Name of a layer norm's weight."""
    if name not in LAYER_NORMS:
        raise ValueError(f"{name!r} is not a layer norm: {list(LAYER_NORMS)}")
    return f"{layer_prefix(layer)}{name}.weight"
