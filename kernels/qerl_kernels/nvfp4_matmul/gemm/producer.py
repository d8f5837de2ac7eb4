"""The producer warpgroup: copies by TMA into the pipeline, and the reduction of split-K partials of `x A`.

TMA at the borders: loads past the end of an array are zero-filled, so that x needs no padding to whole tiles.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm.barriers import full_arrivals, k_iteration_copies, lora_copies
from qerl_kernels.nvfp4_matmul.gemm.cta import Cta
from qerl_kernels.nvfp4_matmul.gemm.reduce_partials import reduce_partials
from qerl_kernels.nvfp4_matmul.packing import TILE


def produce(cta: Cta) -> None:
    """All that the producer warpgroup does."""
    registers = cta.config.register_split()
    if registers:
        plgpu.set_max_registers(registers[0], action="decrease")
    if not cta.terms.has_partials:
        _copy_all(cta)
        return

    @plgpu.warp_map
    def _(warp):
        """Warp 0 copies; the others reduce `x A`."""

        @pl.when(warp == 0)
        def _():
            _copy_all(cta)

        @pl.when(warp > 0)
        def _():
            reduce_partials(cta.gmem.lora_x_g, cta.smem.lora_x_s, registers[0] if registers else None)
            plgpu.barrier_arrive(cta.barriers.lora_x_full)


def _copy_all(cta: Cta) -> None:
    """The copies of all segments: each k-iteration, then the LoRA input."""

    def one_segment(s, carry):
        span = cta.segments.span(s)
        first_row, block, _ = cta.origin(span)
        rows = pl.ds(first_row, cta.config.tile_m)

        def one_k_iteration(k_iteration, carry):
            _copy_k_iteration(cta, s, k_iteration, rows, block)
            return carry

        lax.fori_loop(span.k_begin, span.k_end, one_k_iteration, None)
        if cta.terms.has_lora:
            _copy_lora(cta, s, span.k_end, rows, block)
        return carry

    lax.fori_loop(0, cta.segments.count, one_segment, None)


def _acquire(cta: Cta, use: jax.Array) -> jax.Array:
    """The stage of pipeline use number `use`, once its consumers have freed it."""
    stage = lax.rem(use, cta.config.stages)

    @pl.when(use >= cta.config.stages)
    def _():
        plgpu.barrier_wait(cta.barriers.empty.at[stage])

    return stage


def _copy_k_iteration(cta: Cta, s: jax.Array, k_iteration: jax.Array, rows: pl.Slice, block: jax.Array) -> None:
    """One k-iteration: words, scales and x of `stage_k_tiles` k-tiles. `block`: first of the tile's output features."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem
    k_tile = k_iteration * config.stage_k_tiles
    stage = _acquire(cta, cta.segments.pipeline_index(s, k_iteration))
    full = cta.barriers.full.at[stage]
    along_k, along_n = pl.ds(k_tile, config.stage_k_tiles), pl.ds(block, config.warpgroups_n)
    weight_tiles = cta.operand.place(along_n, along_k)
    plgpu.copy_gmem_to_smem(gmem.words_g.at[weight_tiles], smem.words_s.at[stage], full)
    plgpu.copy_gmem_to_smem(gmem.scales_g.at[weight_tiles], smem.scales_s.at[stage], full)
    for q in range(config.warpgroups_k):
        columns = pl.ds((k_tile + q * config.k_tiles) * TILE, config.k_tiles * TILE)
        plgpu.copy_gmem_to_smem(gmem.x_g.at[rows, columns], smem.x_s.at[stage, q], full)
    for _ in range(full_arrivals(config, cta.terms) - k_iteration_copies(config)):
        plgpu.barrier_arrive(full)


def _copy_lora(cta: Cta, s: jax.Array, k_end: jax.Array, rows: pl.Slice, block: jax.Array) -> None:
    """One more use of the pipeline: `x A`, if it comes whole, into the place of x, and B beside it (zero-filled past
    its rank). `k_end`: that of the segment's `Span`."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem

    @pl.when(s > 0)
    def _():
        plgpu.barrier_wait(cta.barriers.lora_b_empty)

    stage = _acquire(cta, cta.segments.pipeline_index(s, k_end))
    full = cta.barriers.full.at[stage]
    offset = 0
    for adapter, (width, b_g) in enumerate(zip(cta.terms.lora_widths, gmem.lora_b_g, strict=True)):
        first = block * TILE

        @pl.when((first >= offset) & (first < offset + width))
        def _(adapter=adapter, b_g=b_g, offset=offset, first=first):
            if not cta.terms.has_partials:
                columns = pl.ds(adapter * TILE + 0 * stage, config.k_tiles * TILE)  # a traced start may pass the end
                plgpu.copy_gmem_to_smem(gmem.lora_x_g.at[rows, columns], smem.x_s.at[stage, 0], full)
            for r in range(config.warpgroups_n):
                where = pl.ds(0 * stage, TILE), pl.ds(first - offset + r * TILE, TILE)
                plgpu.copy_gmem_to_smem(b_g.at[where], smem.lora_b_s.at[r], full)

        offset += width
    for _ in range(full_arrivals(config, cta.terms) - lora_copies(config, cta.terms)):
        plgpu.barrier_arrive(full)
