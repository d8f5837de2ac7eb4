"""Key-value caches of a decoder: one K and one V array a layer, head-major, so that a donated cache is updated in place
and attention reads each head's keys as one piece of memory.

Axes: B sequences, P prompts, S slots (tokens) of a cache, L layers, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from qerl_kernels.rope_cache.reference import to_cache


@functools.partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Slot s of row b holds the key and value of one token of sequence b: of a prompt's token s, or of the completion's
    token s.
    """

    keys: tuple[Float[Array, "B K S H"], ...]
    values: tuple[Float[Array, "B K S H"], ...]


def init_cache(
    batch: int, slots: int, layers: int, kv_heads: int, head_dim: int, dtype: DTypeLike | Sequence[DTypeLike]
) -> KVCache:
    """An empty cache of `2 · layers · batch · slots · kv_heads · head_dim` elements.

    dtype: one for all layers, or one for each; raises ValueError where these are not as many as layers.
    """
    dtypes = list(dtype) if isinstance(dtype, Sequence) and not isinstance(dtype, str) else [dtype] * layers
    if len(dtypes) != layers:
        raise ValueError(f"{len(dtypes)} dtypes for the caches of {layers} layers")

    def arrays():
        return tuple(jnp.zeros((batch, kv_heads, slots, head_dim), of_layer) for of_layer in dtypes)

    return KVCache(arrays(), arrays())


def write_prompts(
    cache: KVCache,
    rows: Int[Array, " T"],
    slots: Int[Array, " T"],
    entries: Sequence[tuple[Float[Array, "T K H"], Float[Array, "T K H"]]],
) -> KVCache:
    """Put the tokens of whole prompts (keys and values of every layer) into their rows and slots, no two into the same;
    what lies outside the cache is dropped.
    """

    def put(into: Array, new: Array) -> Array:
        return into.at[rows, :, slots].set(to_cache(new, into.dtype), mode="drop", unique_indices=True)

    keys = tuple(put(into, k) for into, (k, _) in zip(cache.keys, entries, strict=True))
    return KVCache(keys, tuple(put(into, v) for into, (_, v) in zip(cache.values, entries, strict=True)))
