"""Key-value caches of a decoder: one array of keys and one of values a layer.

The layout is head-major, so that attention reads each head's keys contiguously; one array a layer lets XLA update a
donated cache in place.

Axes: B sequences or prompts, T packed tokens, S slots (tokens) of a cache, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from qerl_jax.partition import axis_spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of B prompts, or of B completions: slot s of row b holds those of token s.

    Attributes:
      keys: one array a layer, rotary positions applied.
      values: one array a layer.
    """

    keys: tuple[Float[Array, "B K S H"], ...]
    values: tuple[Float[Array, "B K S H"], ...]

    def partition_specs(self) -> KVCache:
        """Divided by key/value heads (`partition.specs`)."""
        return jax.tree.map(lambda _: axis_spec(1), self)


def init_cache(batch: int, slots: int, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
    """A cache of zeros with `2 · layers · batch · slots · kv_heads · head_dim` elements."""

    def arrays():
        return tuple(jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(layers))

    return KVCache(arrays(), arrays())


def write_prompts(
    cache: KVCache,
    rows: Int[Array, " T"],
    slots: Int[Array, " T"],
    entries: Sequence[tuple[Float[Array, "T K H"], Float[Array, "T K H"]]],
) -> KVCache:
    """The cache with the keys and values of packed prompts (`rollout.prefill`) written to their places.

    Args:
      cache: cache of the prompts.
      rows: row of each token; tokens whose row or slot is out of range are dropped.
      slots: slot of each token; no two tokens may share a row and a slot.
      entries: (keys, values) of the tokens, for every layer.
    """

    def put(into: Array, new: Array) -> Array:
        return into.at[rows, :, slots].set(new, mode="drop", unique_indices=True)

    keys = tuple(put(into, k) for into, (k, _) in zip(cache.keys, entries, strict=True))
    return KVCache(keys, tuple(put(into, v) for into, (_, v) in zip(cache.values, entries, strict=True)))
