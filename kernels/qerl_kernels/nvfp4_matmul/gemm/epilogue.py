"""The epilogue: sums of warpgroups and CTAs are added up, then the terms of `y` one after another, then the store.

    acc + sums of the other warpgroups along k + sums of the other CTAs -> · multiplier -> + bias -> + LoRA -> bf16

A whole tile of a cluster of several CTAs is finished in as many parts as a shared one.

A new term is a function `total -> total` in `_apply_terms`. Stores past the end of y are dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm import exchange
from qerl_kernels.nvfp4_matmul.gemm.mainloop import Consumer
from qerl_kernels.nvfp4_matmul.gemm.schedule import Span
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.ptx.load import load


def load_row_terms(consumer: Consumer, span: Span) -> list[jax.Array]:
    """Multiplier, and bias if any, of this consumer's 64 features of a tile; called before the mainloop, which hides
    the latency."""
    cta = consumer.cta
    _, block, _ = cta.origin(span)
    # A tile's last features may lie past the weight; what is stored there is dropped, but the reads must stay inside.
    first = jnp.minimum((block + consumer.r) * TILE, cta.gmem.multiplier_g.shape[0] - TILE)
    rows = pl.ds(cta.operand.multiplier_row(first), TILE)
    refs = [cta.gmem.multiplier_g, *([] if cta.gmem.bias_g is None else [cta.gmem.bias_g])]
    return [load(ref.at[rows], plgpu.Layout.WGMMA.reduce(1)) for ref in refs]


def run_epilogue(consumer: Consumer, total: jax.Array, s: jax.Array, span: Span, row_terms: list[jax.Array]) -> None:
    """All that follows the mainloop of segment s (`span`: `Segments.span(s)`), whose sum over this consumer's k-tiles
    is `total`."""
    cta, q, r = consumer.cta, consumer.q, consumer.r
    if cta.config.warpgroups_k == 1:
        _finish(consumer, total, s, span, row_terms)
        return

    @pl.when(q > 0)
    def _():
        _send_to_first_warpgroup(consumer, total, s, span)

    @pl.when(q == 0)
    def _():
        plgpu.barrier_wait(cta.barriers.warpgroup_sums_full.at[r])
        whole = total
        for place in range(cta.config.warpgroups_k - 1):
            sums = cta.smem.warpgroup_sums_s.at[r, place]
            whole = whole + load(sums, plgpu.Layout.WGMMA, swizzled(total.shape[1], 4))

        @pl.when(s < cta.segments.count - 1)
        def _():
            plgpu.barrier_arrive(cta.barriers.warpgroup_sums_empty.at[r])

        _finish(consumer, whole, s, span, row_terms)


def _send_to_first_warpgroup(consumer: Consumer, total: jax.Array, s: jax.Array, span: Span) -> None:
    """Hands the sum to warpgroup 0 along k."""
    cta, q, r = consumer.cta, consumer.q, consumer.r

    @pl.when(s > 0)
    def _():
        plgpu.barrier_wait(cta.barriers.warpgroup_sums_empty.at[r])

    cta.smem.warpgroup_sums_s.at[r, q - 1][...] = total
    plgpu.barrier_arrive(cta.barriers.warpgroup_sums_full.at[r])
    if cta.terms.has_lora:
        consumer.free(consumer.wait_full(s, span.k_end))  # all consumers free the stage of the LoRA input


def _finish(consumer: Consumer, total: jax.Array, s: jax.Array, span: Span, row_terms: list[jax.Array]) -> None:
    """The CTA's sum over the segment is complete: applies the terms, stores the tile or its part of a shared one."""
    cta = consumer.cta
    if cta.config.cluster > 1:

        @pl.when(~span.is_whole)
        def _():
            _send_parts(consumer, total)

    stage = _wait_for_lora(consumer, s, span) if cta.terms.has_lora else None
    if cta.config.cluster == 1:
        y = _apply_terms(consumer, total, 0, stage, row_terms)
        _free_lora(consumer, s, stage)
        _store(consumer, y, 0, span)
        return
    for part, (first, rows) in enumerate(cta.config.parts):

        @pl.when(span.is_whole | (cta.rank == part))
        def _(first=first, rows=rows):
            whole = _add_received(consumer, total[:, first : first + rows], s, span)
            _store(consumer, _apply_terms(consumer, whole, first, stage, row_terms), first, span)

    _free_lora(consumer, s, stage)

    @pl.when(~span.is_whole & (s < cta.segments.count - 1))
    def _():  # all warps have read the sums: `_store`, where they meet, lies behind it
        plgpu.barrier_arrive(cta.barriers.sums_from_cluster_empty.at[consumer.r])


def prepare_exchange(consumer: Consumer) -> None:
    """Makes ready for what the other CTAs of the cluster send this warpgroup, if they share tiles; called once."""
    cta = consumer.cta

    @pl.when((consumer.q == 0) & (cta.segments.count > cta.segments.whole))
    def _():
        exchange.prepare(_sums_from_cluster(consumer)[1])
        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.barriers.sums_from_cluster_empty.at[consumer.r])


def _send_parts(consumer: Consumer, total: jax.Array) -> None:
    """Sends each other CTA the sums of its part of a shared tile."""
    cta = consumer.cta
    plgpu.barrier_wait(cta.barriers.sums_from_cluster_empty.at[consumer.r])
    parts = [total[:, first : first + rows] for first, rows in cta.config.parts]
    exchange.send(parts, cta.rank, *_sums_from_cluster(consumer))


def _add_received(consumer: Consumer, own: jax.Array, s: jax.Array, span: Span) -> jax.Array:
    """This CTA's sums of a part, and of a shared tile the other CTAs' with them."""

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        del i
        return exchange.receive(total, *_sums_from_cluster(consumer), s - consumer.cta.segments.whole)

    return lax.fori_loop(0, (~span.is_whole).astype(jnp.int32), add, own)


def _sums_from_cluster(consumer: Consumer) -> tuple[jax.Ref, jax.Ref]:
    """This warpgroup's places for the sums of the other CTAs, and their mbarrier."""
    smem = consumer.cta.smem
    return smem.sums_from_cluster_s.at[consumer.r], smem.sums_from_cluster_full_s.at[consumer.r]


def _wait_for_lora(consumer: Consumer, s: jax.Array, span: Span) -> jax.Array:
    """The pipeline stage of the LoRA input, once all of it is there."""
    stage = consumer.wait_full(s, span.k_end)
    if consumer.cta.terms.has_partials:

        @pl.when(s == 0)
        def _():
            plgpu.barrier_wait(consumer.cta.barriers.lora_x_full)

    return stage


def _free_lora(consumer: Consumer, s: jax.Array, stage: jax.Array | None) -> None:
    """Tells the producer that the LoRA input has been read."""
    if stage is None:
        return
    consumer.free(stage)

    @pl.when(s < consumer.cta.segments.count - 1)
    def _():
        plgpu.barrier_arrive(consumer.cta.barriers.lora_b_empty)


def _apply_terms(
    consumer: Consumer, total: jax.Array, first: int, stage: jax.Array | None, row_terms: list[jax.Array]
) -> jax.Array:
    """total · multiplier (+ bias) (+ LoRA) of the tile's rows from `first` on."""
    terms = consumer.cta.terms
    total = total * lax.broadcast_in_dim(row_terms[0], total.shape, (0,))
    if terms.has_bias:
        total = total + lax.broadcast_in_dim(row_terms[1].astype(jnp.float32), total.shape, (0,))
    if terms.has_lora:
        total = _add_lora(consumer, total, first, stage)
    return total


def _add_lora(consumer: Consumer, total: jax.Array, first: int, stage: jax.Array) -> jax.Array:
    """total + scale · (x A) B by one `wgmma` that accumulates upon the sum."""
    terms, smem = consumer.cta.terms, consumer.cta.smem

    def accumulate(acc):
        lora_x = smem.lora_x_s if terms.has_partials else smem.x_s.at[stage, 0, :, pl.ds(0, TILE)]
        plgpu.wgmma(acc, smem.lora_b_s.at[consumer.r].T, lora_x.at[pl.ds(first, total.shape[1])].T)
        plgpu.wgmma_wait(0)

    # Accumulate total / scale, then multiply by scale: exact for powers of two, else a few fp32 roundings.
    if terms.scale == 1.0:
        return pl.run_state(accumulate)(plgpu.ACC.init(total))
    return pl.run_state(accumulate)(plgpu.ACC.init(total * (1.0 / terms.scale))) * terms.scale


def _store(consumer: Consumer, total: jax.Array, first: int, span: Span) -> None:
    """Rounds to bf16 and stores the tile's rows from `first` on, [64, rows], through shared memory, by TMA."""
    cta, r = consumer.cta, consumer.r
    y = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    out_s = cta.smem.out_s.at[r, pl.ds(0, total.shape[1])]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store before has left the buffer
    cta.operand.store(out_s, y)
    plgpu.commit_smem()
    row, block, end = cta.origin(span)
    row, block = row + first, block + r

    # TMA would drop a store past the end by itself, but not where y is one tile wide or high: Mosaic leaves an axis of
    # size one and its index out of the copy, and the store would land on the tile before.
    @pl.when((block < end) & (row < cta.gmem.out_g.shape[0]))
    def _():
        where = pl.ds(row, total.shape[1]), pl.ds(block * TILE, TILE)
        plgpu.copy_smem_to_gmem(out_s, cta.gmem.out_g.at[where])
