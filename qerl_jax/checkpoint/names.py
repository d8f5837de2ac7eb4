"""Hugging Face's parameter names of a Qwen2, Qwen3 or Llama checkpoint, beside the table of `models.config`."""

from __future__ import annotations

import re

from qerl_jax.models.config import PROJECTION_MODULES, hf_module

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Rotary frequencies, which every library computes itself, and scales of an FP8 KV cache, as ModelOpt and
# compressed-tensors leave them at the attention or its projections: caches here have their own.
_UNUSED = re.compile(r"rotary_emb\.inv_freq$|\.self_attn\.(?:\w+_proj\.)?(?:[qkv]|kv)_(?:scale|zero_point)$")


def is_unused(name: str) -> bool:
    """Whether a tensor is one that checkpoints may hold, and that no policy needs."""
    return bool(_UNUSED.search(name))


def projection(layer: int, name: str) -> str:
    """Module path of a projection, without `.weight`."""
    return hf_module(PROJECTION_MODULES[name], layer)


def layer_norm(layer: int, name: str) -> str:
    """Name of a layer norm's weight."""
    return f"{hf_module(name, layer)}.weight"
