"""The work of one CTA of decode attention: its pair, the pair's KV tiles, and the splits that are the CTA's.

A *pair* is one sequence and one key/value head: up to eight queries that read the same keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from qerl_kernels.decode_attention.config import KV_TILE, QUERIES, SPLITS, AttentionConfig, partial_slots


class Global(NamedTuple):
    """References to global memory: q [rows, H], the caches [pairs, slots, H], the integers, the output as q."""

    q: jax.Ref
    prompt_k: jax.Ref
    prompt_v: jax.Ref
    k: jax.Ref
    v: jax.Ref
    prompt_index: jax.Ref
    prompt_lengths: jax.Ref
    lengths: jax.Ref
    out: jax.Ref


class Shared(NamedTuple):
    """References to shared memory: pipeline stages with their barriers, the warps' sums, and the inbox.

    The inbox has slots for split-KV partials: in CTA 0 those that other CTAs send; slot 0 is a CTA's own running
    partial where it has several splits. Barriers and mbarrier: where a producer fills the stages.
    """

    stages: jax.Ref
    warp_max: jax.Ref
    warp_sum: jax.Ref
    outputs: jax.Ref
    inbox: jax.Ref
    full: jax.Ref | None = None
    empty: jax.Ref | None = None
    mbarrier: jax.Ref | None = None


class Work:
    """Indices of one CTA.

    Attributes:
      prompt_tokens, own_tokens: tokens of the pair in either cache.
      prompt_tiles, tiles: KV tiles of the prompt, and of both caches, the prompt's first.
      sent: splits that have a tile and are not CTA 0's.
      first_slot: slot of CTA 0's inbox for the first of them.
      own_query: row of q of the pair's first query.
      first_query: row of q at which the kernel begins to read eight queries, this pair's among them.
      group: query heads of a key/value head.
    """

    def __init__(self, refs: Global, config: AttentionConfig, kv_heads: int, group: int, is_cluster: bool = True):
        self.refs, self.config, self.group = refs, config, group
        self.warpgroup, self.pair = (lax.axis_index(name) for name in ("warpgroup", "pair"))
        self.cta = lax.axis_index("cta") if is_cluster else jnp.int32(0)
        row = lax.div(self.pair, kv_heads)
        self.width = refs.out.shape[1]
        self.prompt_tokens = refs.prompt_lengths[row]  # the three loads together: one latency
        self.own_tokens, prompt = refs.lengths[row], refs.prompt_index[row]
        self.prompt_pair = prompt * kv_heads + lax.rem(self.pair, kv_heads)
        self.prompt_tiles = pl.cdiv(self.prompt_tokens, KV_TILE)
        self.tiles = self.prompt_tiles + pl.cdiv(self.own_tokens, KV_TILE)
        self.sent = jnp.clip(self.tiles - config.splits, 0, SPLITS - config.splits)
        self.first_slot = partial_slots(config.ctas) - (SPLITS - config.splits)
        self.own_query = row * (kv_heads * group) + lax.rem(self.pair, kv_heads) * group
        self.first_query = jnp.minimum(self.own_query, refs.q.shape[0] - QUERIES)

    def fold_tiles(self, split: jax.Array, one_tile: Callable, init: Any) -> Any:
        """Folds `one_tile(carry, tile)` over the tiles of a split."""
        count = lax.div(self.tiles - split + SPLITS - 1, SPLITS)
        return lax.fori_loop(0, count, lambda i, carry: one_tile(carry, split + i * SPLITS), init)

    def fold_splits(self, one_split: Callable, init: Any) -> Any:
        """Folds `one_split(carry, split)` over the splits of this CTA."""
        splits = self.config.splits
        return lax.fori_loop(0, splits, lambda i, carry: one_split(carry, self.cta * splits + i), init)
