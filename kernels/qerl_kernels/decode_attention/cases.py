"""The shapes that are tested and timed: attention of Qwen2.5, with random caches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

# model -> (query heads, key/value heads, head dim). 32B has the heads of 14B.
MODELS = {
    "0.5b": (14, 2, 64),
    "1.5b": (12, 2, 128),
    "3b": (16, 2, 128),
    "7b": (28, 4, 128),
    "14b": (40, 8, 128),
    "72b": (64, 8, 128),
}


@functools.partial(jax.jit, static_argnames=("model", "rows", "prompts", "slots", "own_slots"))
def random_caches(
    key: Array, model: str, rows: int, prompts: int, slots: int, own_slots: int
) -> tuple[Array, Array, Array, Array]:
    """(prompt_k, prompt_v, k, v), every slot filled with normal values."""
    _, kv_heads, width = MODELS[model]
    shapes = [(prompts, kv_heads, slots, width)] * 2 + [(rows, kv_heads, own_slots, width)] * 2
    keys = jax.random.split(key, 4)
    return tuple(jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))


def cache_bytes(model: str, prompt_tokens: int, own_tokens: int) -> int:
    """Bytes of keys and values of that many tokens."""
    _, kv_heads, width = MODELS[model]
    return 2 * 2 * kv_heads * width * (prompt_tokens + own_tokens)
