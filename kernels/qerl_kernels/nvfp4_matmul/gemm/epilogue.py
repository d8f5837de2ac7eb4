"""The epilogue: sums of warpgroups and CTAs are added up, then the terms of `y` one after another, then the store.

    acc + sums of the other warpgroups along k + sums of the other CTAs -> · multiplier -> + bias -> + LoRA -> bf16

A new term is a function `total -> total` in `_apply_terms`. Stores past the end of y are dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm.mainloop import Consumer
from qerl_kernels.nvfp4_matmul.gemm.schedule import Span
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.ptx.load import load


def load_row_terms(consumer: Consumer, tile: jax.Array) -> list[jax.Array]:
    """Multiplier, and bias if any, of this consumer's 64 features of a tile; called before the mainloop, which hides
    the latency."""
    cta = consumer.cta
    _, n_tile = cta.grid.origin(cta.cluster_index, tile)
    # A tile's last rows may lie past the weight; what is stored there is dropped, but the reads must stay inside.
    end = cta.gmem.multiplier_g.shape[0] - TILE
    first = jnp.minimum((n_tile * cta.config.warpgroups_n + consumer.r) * TILE, end)
    rows = pl.ds(cta.operand.multiplier_row(first), TILE)
    refs = [cta.gmem.multiplier_g, *([] if cta.gmem.bias_g is None else [cta.gmem.bias_g])]
    return [load(ref.at[rows], plgpu.Layout.WGMMA.reduce(1)) for ref in refs]


def run_epilogue(consumer: Consumer, total: jax.Array, s: jax.Array, span: Span, row_terms: list[jax.Array]) -> None:
    """All that follows the mainloop of segment s (`span`: `Segments.span(s)`), whose sum over this consumer's k-tiles
    is `total`."""
    cta, q, r = consumer.cta, consumer.q, consumer.r
    if cta.config.warpgroups_k == 1:
        _reduce_cluster(consumer, total, s, row_terms)
        return

    @pl.when(q > 0)
    def _():
        _send_to_first_warpgroup(consumer, total, s, span)

    @pl.when(q == 0)
    def _():
        plgpu.barrier_wait(cta.barriers.warpgroup_sums_full.at[r])
        whole = total
        for place in range(cta.config.warpgroups_k - 1):
            whole = _add(whole, cta.smem.warpgroup_sums_s.at[r, place])

        @pl.when(s < cta.segments.count - 1)
        def _():
            plgpu.barrier_arrive(cta.barriers.warpgroup_sums_empty.at[r])

        _reduce_cluster(consumer, whole, s, row_terms)


def _add(total: jax.Array, ref: jax.Ref) -> jax.Array:
    return total + load(ref, plgpu.Layout.WGMMA, swizzled(total.shape[1], 4))


def _send_to_first_warpgroup(consumer: Consumer, total: jax.Array, s: jax.Array, span: Span) -> None:
    """Hands the sum to warpgroup 0 along k."""
    cta, q, r = consumer.cta, consumer.q, consumer.r

    @pl.when(s > 0)
    def _():
        plgpu.barrier_wait(cta.barriers.warpgroup_sums_empty.at[r])

    cta.smem.warpgroup_sums_s.at[r, q - 1][...] = total
    plgpu.barrier_arrive(cta.barriers.warpgroup_sums_full.at[r])
    if cta.terms.has_lora:

        @pl.when(span.is_owner)
        def _():  # the stage of the LoRA input is freed by all consumers
            consumer.free(consumer.wait_full(s, span.k_end))


def _reduce_cluster(consumer: Consumer, total: jax.Array, s: jax.Array, row_terms: list[jax.Array]) -> None:
    """The CTA's sum is complete: send it to the tile's owner, or own the tile."""
    cta, r = consumer.cta, consumer.r
    tile = cta.segments.span(s).tile
    senders = cta.config.cluster - 1
    if senders == 0:
        _finish_tile(consumer, total, s, row_terms)
        return
    owner = cta.stream_k.owner(tile)

    @pl.when(owner != cta.rank)
    def _():
        place = cta.stream_k.senders_before(tile, cta.rank)
        plgpu.async_store_smem(
            total, cta.smem.sums_from_cluster_s.at[r, place],
            cta.barriers.sums_from_cluster_full.at[r * senders + place],
            cluster_idx=owner, cluster_dim="cluster_rank", optimized=False,
        )  # fmt: skip

    @pl.when(owner == cta.rank)
    def _():
        def add_one(place, total):
            plgpu.barrier_wait(cta.barriers.sums_from_cluster_full.at[r * senders + place])
            return _add(total, cta.smem.sums_from_cluster_s.at[r, place])

        whole = lax.fori_loop(0, cta.stream_k.senders_before(tile, cta.config.cluster), add_one, total)
        _finish_tile(consumer, whole, s, row_terms)


def _finish_tile(consumer: Consumer, total: jax.Array, s: jax.Array, row_terms: list[jax.Array]) -> None:
    """Applies the terms to the tile's sum and stores it as bf16 to its place in y."""
    cta = consumer.cta
    m_tile, n_tile = cta.grid.origin(cta.cluster_index, cta.segments.span(s).tile)
    _store(consumer, _apply_terms(consumer, total, s, row_terms), m_tile, n_tile)


def _apply_terms(consumer: Consumer, total: jax.Array, s: jax.Array, row_terms: list[jax.Array]) -> jax.Array:
    """total · multiplier (+ bias) (+ LoRA)."""
    terms = consumer.cta.terms
    total = total * lax.broadcast_in_dim(row_terms[0], total.shape, (0,))
    if terms.has_bias:
        total = total + lax.broadcast_in_dim(row_terms[1].astype(jnp.float32), total.shape, (0,))
    if terms.has_lora:
        total = _add_lora(consumer, total, s)
    return total


def _add_lora(consumer: Consumer, total: jax.Array, s: jax.Array) -> jax.Array:
    """total + scale · (x A) B, once the LoRA input is there."""
    cta = consumer.cta
    stage = consumer.wait_full(s, cta.segments.span(s).k_end)
    if cta.terms.has_partials:

        @pl.when(cta.segments.owned_before(s) == 0)
        def _():
            plgpu.barrier_wait(cta.barriers.lora_x_full)

    total = _expand_lora(consumer, total, stage)
    consumer.free(stage)

    @pl.when(s < cta.segments.count - 1)
    def _():
        plgpu.barrier_arrive(cta.barriers.lora_b_empty)

    return total


def _expand_lora(consumer: Consumer, total: jax.Array, stage: jax.Array) -> jax.Array:
    """total + scale · (x A) B by one `wgmma` that accumulates upon the sum."""
    terms, smem = consumer.cta.terms, consumer.cta.smem

    def accumulate(acc):
        lora_x = smem.lora_x_s if terms.has_partials else smem.x_s.at[stage, 0, :, pl.ds(0, TILE)]
        plgpu.wgmma(acc, smem.lora_b_s.at[consumer.r].T, lora_x.T)
        plgpu.wgmma_wait(0)

    # Accumulate total / scale, then multiply by scale: exact for powers of two, else a few fp32 roundings.
    if terms.scale == 1.0:
        return pl.run_state(accumulate)(plgpu.ACC.init(total))
    return pl.run_state(accumulate)(plgpu.ACC.init(total * (1.0 / terms.scale))) * terms.scale


def _store(consumer: Consumer, total: jax.Array, m_tile: jax.Array, n_tile: jax.Array) -> None:
    """Rounds to bf16 and stores [64, tile_m] through shared memory, by TMA."""
    cta, r = consumer.cta, consumer.r
    y = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store of the tile before has left the buffer
    cta.operand.store(cta.smem.out_s.at[r], y)
    plgpu.commit_smem()
    first = (n_tile * cta.config.warpgroups_n + r) * TILE

    # TMA would drop a store past the end by itself, but not where y is one tile wide: Mosaic leaves an axis of size one
    # and its index out of the copy, and the store would land on the tile before.
    @pl.when(first < cta.gmem.out_g.shape[1])
    def _():
        where = pl.ds(m_tile * cta.config.tile_m, cta.config.tile_m), pl.ds(first, TILE)
        plgpu.copy_smem_to_gmem(cta.smem.out_s.at[r], cta.gmem.out_g.at[where])
