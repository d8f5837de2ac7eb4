"""Plain JAX equivalent of the kernel, and the path where it does not run.

Axes: B sequences, T tokens, N query heads, K key/value heads, S slots of a cache, H head dim, A = H / 2 rotary angles.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from qerl_kernels.ops import rotate


def rope_and_cache(
    qkv: Float[Array, "B M"],
    angles: Float32[Array, "B A"],
    slots: Int[Array, " B"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """As `api.rope_and_cache`, in any float dtype."""
    rows, kv_heads, _, width = keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    q, k, v = jnp.split(qkv.reshape(rows, -1, width), (heads, heads + kv_heads), axis=1)
    return rotate(q, angles), write_token(keys, slots, rotate(k, angles)), write_token(values, slots, v)


def write_token(
    cache: Float[Array, "B K S H"], slots: Int[Array, " B"], new: Float[Array, "B K H"]
) -> Float[Array, "B K S H"]:
    """Puts one token's entry of each sequence into its slot; slots outside the cache are dropped."""
    rows = jnp.arange(cache.shape[0])
    slots = jnp.where(slots < 0, cache.shape[2], slots)  # a negative index would count from the end
    return cache.at[rows, :, slots].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
