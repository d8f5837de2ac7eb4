"""Key-value cache of a decoder: one K and one V array a layer, so that a donated cache is updated in place.

Axes: B sequences, S cache slots, T tokens, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Slot s of row b holds the key and value of the token at position s of sequence b."""

    keys: tuple[Float[Array, "B S K H"], ...]
    values: tuple[Float[Array, "B S K H"], ...]


def init_cache(batch: int, slots: int, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
    """An empty cache of `2 · layers · batch · slots · kv_heads · head_dim` elements."""

    def arrays():
        return tuple(jnp.zeros((batch, slots, kv_heads, head_dim), dtype) for _ in range(layers))

    return KVCache(arrays(), arrays())


def write(cache: Float[Array, "B S K H"], positions: Int[Array, "B T"], new: Float[Array, "B T K H"]) -> Array:
    """Put each token's entry into the slot of its position; positions outside the cache are dropped."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, positions].set(new.astype(cache.dtype), mode="drop")
