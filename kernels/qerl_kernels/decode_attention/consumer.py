"""The consumer warpgroup: online softmax over the KV tiles, and the output.

Each warp has 16 of a tile's 64 tokens and its own running maximum m, sum of weights l and output, so that the warps
need not meet in the mainloop. Scores are multiplied by log2(e), so that exp is exp2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.decode_attention import combine
from qerl_kernels.decode_attention.combine import Partial, over_rows, over_tokens
from qerl_kernels.decode_attention.config import KV_TILE, QUERIES, WARP_TOKENS
from qerl_kernels.decode_attention.layouts import ACCUMULATOR, B_OPERAND, MERGED, PER_QUERY
from qerl_kernels.decode_attention.stages import CopiedStages, TmaStages
from qerl_kernels.decode_attention.warp_mma import add_values, scores, store_output
from qerl_kernels.decode_attention.work import Shared, Work
from qerl_kernels.ptx.load import load

LOG2_E = 1.4426950408889634
M_INIT = -1e30  # running maximum at first: finite, so that m − m is 0 where there is no token
SHAPE = (4, WARP_TOKENS, QUERIES)


def consume(work: Work, shared: Shared, scale: float, stages: TmaStages | CopiedStages) -> None:
    """The mainloop over this CTA's splits, and the output of the pair in CTA 0.

    Args:
      work: indices of the CTA.
      shared: its shared memory.
      scale: scale of the scores times log2(e).
      stages: who fills them.
    """
    ctas = work.config.ctas
    stages.start()
    consumer = _Consumer(work, shared, scale, stages)
    if ctas > 1:
        combine.cluster_wait()  # while the first tile is on its way
    if work.config.splits == 1:
        _, result = consumer.attend_split(jnp.int32(0), work.cta)
    else:
        running = shared.inbox.at[0]
        combine.keep(_empty_partial(work.width), running)
        work.fold_splits(consumer.merge_split, jnp.int32(0))
        result = combine.receive(running, work.width)

    @pl.when(work.cta == 0)
    def _():
        _, total, out = consumer.merge_ctas(result) if ctas > 1 else result
        divisor = jnp.where(total > 0, total, 1.0)
        out = out / over_rows(divisor, work.width)
        skip = work.own_query - work.first_query
        store_output(out, work.refs.out, work.first_query, skip, work.group)


class _Consumer:
    """Queries and the mainloop. `use` counts the stages that were used."""

    def __init__(self, work: Work, shared: Shared, scale: float, stages: TmaStages | CopiedStages):
        self.work, self.shared, self.scale, self.stages = work, shared, scale, stages
        self.q = load(work.refs.q.at[pl.ds(work.first_query, QUERIES)], B_OPERAND)
        warp, token = (plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=ACCUMULATOR) for axis in (0, 1))
        self.token = warp * WARP_TOKENS + token

    def attend_tile(self, carry: tuple, tile: jax.Array) -> tuple:
        """Online softmax: (use, m, l, out) with one more KV tile."""
        work, (use, m, total, out) = self.work, carry
        is_prompt = tile < work.prompt_tiles
        prompt_left = work.prompt_tokens - tile * KV_TILE
        own_left = work.own_tokens - (tile - work.prompt_tiles) * KV_TILE
        tokens = jnp.where(is_prompt, prompt_left, own_left)
        stage = self.stages.wait(use)
        tile_scores = scores(self.q, self.shared.stages.at[stage])
        self.stages.release(stage, use, is_values=False)
        tile_scores = jnp.where(self.token < tokens, tile_scores * self.scale, -jnp.inf)
        higher = jnp.maximum(m, tile_scores.max(axis=1))
        rescale = jnp.exp2(m - higher)
        weights = jnp.exp2(tile_scores - over_tokens(higher, SHAPE))
        total = total * over_tokens(rescale, SHAPE) + weights
        stage = self.stages.wait(use + 1)
        out = add_values(out * over_tokens(rescale, out.shape), weights, self.shared.stages.at[stage], tokens)
        self.stages.release(stage, use + 1, is_values=True)
        return use + 2, higher, total, out

    def attend_split(self, use: jax.Array, split: jax.Array) -> tuple[jax.Array, Partial]:
        """The tiles of a split; sent to CTA 0 where it has one and is not CTA 0's."""
        work, shared = self.work, self.shared
        start = (
            _filled(M_INIT, (4, QUERIES), ACCUMULATOR.reduce(1)),
            _filled(0.0, SHAPE, ACCUMULATOR),
            _filled(0.0, (4, work.width, QUERIES), ACCUMULATOR),
        )
        use, m, total, out = work.fold_tiles(split, self.attend_tile, (use, *start))
        partial = combine.merge_warps(m, total.sum(axis=1), out, shared.warp_max, shared.warp_sum, shared.outputs)
        if work.config.ctas > 1:

            @pl.when((work.cta > 0) & (split < work.tiles))
            def _():
                combine.send(partial, shared.inbox.at[work.first_slot + split - work.config.splits], shared.mbarrier)

        return use, partial

    def merge_split(self, use: jax.Array, split: jax.Array) -> jax.Array:
        """A split, merged with those before it: in shared memory, because there are no registers to spare."""
        use, partial = self.attend_split(use, split)
        running = self.shared.inbox.at[0]
        combine.keep(combine.merge(combine.receive(running, self.work.width), partial), running)
        return use

    def merge_ctas(self, partial: Partial) -> Partial:
        """In CTA 0: with the partials of the other CTAs, in the order of the splits."""
        combine.wait_for_partials(self.shared.mbarrier)
        first, width = self.work.first_slot, self.work.width
        add = lambda i, so_far: combine.merge(so_far, combine.receive(self.shared.inbox.at[first + i], width))  # noqa: E731
        return lax.fori_loop(0, self.work.sent, add, partial)


def _empty_partial(width: int) -> Partial:
    return Partial(
        _filled(M_INIT, (QUERIES,), PER_QUERY),
        _filled(0.0, (QUERIES,), PER_QUERY),
        _filled(0.0, (width, QUERIES), MERGED),
    )


def _filled(value: float, shape: tuple[int, ...], layout: plgpu.Layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
