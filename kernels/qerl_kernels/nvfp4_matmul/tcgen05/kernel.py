"""NVFP4 GEMM by `tcgen05.mma`, of compute capability 10.0 and 10.3: prefill and the update's forward pass.

    y[m, n] = multiplier[n] · Σ_k x[m, k] · w[n, k]  (+ bias[n])

The weight is A (128 features × 64), in tensor memory; B is x in shared memory; the sums, fp32, are in tensor memory. A
CTA has one tile of 128 features × 128 rows and two warpgroups:

    warpgroup 0            words -> registers -> bf16 A -> tensor memory; after the last k-tile the terms of y
    warpgroup 1, warp 0    TMA: words, scales and x of a k-tile into a stage
    warpgroup 1, warp 1    `tcgen05.mma`: m128n128k16, four a k-tile

A stage has its own place for A, so that one index is that of all. Tensor memory: 128 columns of sums and 32 for A of
each of 4 stages are 256, the half of an SM's: two CTAs share an SM, and one stores while the other multiplies.

Nothing hangs: TMA waits until words and scales of the stage's k-tile before are read (`weight`) and its MMA has ended
(`consumed`), warpgroup 0 for that MMA and for TMA (`full`), the MMA for both (`full`, `weight`); all go through the
k-tiles in one order, and none waits for a later one.
Compiled and interpreted, never run on such a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import Gpu
from qerl_kernels.nvfp4_matmul.dequant import weight_fragments
from qerl_kernels.nvfp4_matmul.gemm.kernel import pad_rows
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.tcgen05.config import STAGES, TILE_M, TILE_N
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.load import load
from qerl_kernels.ptx.values import I32, element

STORED_ROWS = 64  # of y at a time
# A warp of 32 lanes of tensor memory has 32 features: two of the four 16-row strips of a packed tile, for each of which
# a thread has four words and two words of scales.
WORDS = plgpu.Layout.TILED(
    plgpu.Tiling(((2, 4, 128), (2, 128), (4,))), warp_dims=(-6, -5), lane_dims=(-2,), vector_dim=-1
)
SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((2, 64), (32,), (16,), (2,))),
    warp_dims=(-5, -4),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


@functools.partial(jax.jit, static_argnames="gpu")
def gemm(x: jax.Array, weight: PackedNvfp4, *, bias: jax.Array | None = None, gpu: Gpu) -> jax.Array:
    """The equation of the module's docstring: x bf16 [m, k] -> bf16 [m, n]. `bias`: [n], any float dtype.

    Raises ValueError on another GPU: LLVM would end the process.
    """
    if not gpu.has_tcgen05:
        raise ValueError(f"gemm: tcgen05 takes compute capability 10.0 or 10.3, this is {gpu.name}, {gpu.arch / 10}")
    (n, k), m = weight.shape, x.shape[0]
    if x.shape != (m, k):
        raise ValueError(f"gemm: x is {x.shape}, the weight {n} x {k}")
    x = pad_rows(x)
    m_tiles, n_tiles = -(-m // TILE_M), -(-n // TILE_N)
    padded = n_tiles * TILE_N
    terms = [jnp.pad(term[:n], (0, padded - n)) for term in (weight.multiplier, bias) if term is not None]
    call = plgpu.kernel(
        functools.partial(_body, k_tiles=weight.words.shape[1], m_tiles=m_tiles),
        out_type=jax.ShapeDtypeStruct((x.shape[0], padded), jnp.bfloat16),
        grid=(n_tiles * m_tiles,),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            words_s=plgpu.SMEM((STAGES, 2, 4, 128), jnp.uint32),
            scales_s=plgpu.SMEM((STAGES, 2, 64), jnp.uint32),
            x_s=plgpu.SMEM((STAGES, TILE_M, TILE), jnp.bfloat16, transforms=swizzled(TILE, 2)),
            out_s=plgpu.SMEM((STORED_ROWS, TILE_N), jnp.bfloat16, transforms=swizzled(TILE, 2)),
            weight_t=plgpu.TMEM((TILE_N, STAGES * TILE), jnp.bfloat16, packed=True),
            sums_t=plgpu.TMEM((TILE_N, TILE_M), jnp.float32),
            full=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            weight=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES, orders_tensor_core=True),
            consumed=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES, orders_tensor_core=True),
            done=plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        ),
        kernel_name="nvfp4_tcgen05",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return call(x, weight.words, weight.scales, *terms)[:m, :n]


def _body(
    x_g: jax.Ref, words_g: jax.Ref, scales_g: jax.Ref, *rest: jax.Ref, k_tiles: int, m_tiles: int, **scratch: Any
):
    """The kernel. `rest`: multiplier and bias, if any; y."""
    *terms_g, out_g = rest
    tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
    n_tile, rows = lax.div(tile, m_tiles), pl.ds(lax.rem(tile, m_tiles) * TILE_M, TILE_M)

    @pl.when(warpgroup == 0)
    def _():
        lax.fori_loop(0, k_tiles, functools.partial(_store_weight, **scratch), None)
        features = pl.ds(n_tile * TILE_N, TILE_N)
        terms = [load(term.at[features], plgpu.Layout.TCGEN05.reduce(1)) for term in terms_g]
        _store(terms, out_g, rows.start, features, **scratch)

    @pl.when(warpgroup == 1)
    def _():
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                copy = functools.partial(_copy, (words_g, scales_g, x_g), n_tile, rows, **scratch)
                lax.fori_loop(0, k_tiles, copy, None)

            @pl.when(warp == 1)
            def _():
                lax.fori_loop(0, k_tiles, functools.partial(_multiply, **scratch), None)
                plgpu.tcgen05_commit_arrive(scratch["done"])


def _acquire(k_tile: jax.Array, *barriers: jax.Ref) -> jax.Array:
    """The stage of a k-tile, once these barriers are through with the k-tile that had it before."""
    stage = lax.rem(k_tile, STAGES)

    @pl.when(k_tile >= STAGES)
    def _():
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[stage])

    return stage


def _copy(sources, n_tile, rows, k_tile, carry, *, words_s, scales_s, x_s, full, weight, consumed, **_):
    """Words, scales and x of a k-tile; what lies past the end of an array is zero."""
    words_g, scales_g, x_g = sources
    stage = _acquire(k_tile, weight, consumed)
    tiles = pl.ds(2 * n_tile, 2), k_tile
    plgpu.copy_gmem_to_smem(words_g.at[tiles], words_s.at[stage], full.at[stage])
    plgpu.copy_gmem_to_smem(scales_g.at[tiles], scales_s.at[stage], full.at[stage])
    plgpu.copy_gmem_to_smem(x_g.at[rows, pl.ds(k_tile * TILE, TILE)], x_s.at[stage], full.at[stage])
    return carry


def _store_weight(k_tile, carry, *, words_s, scales_s, weight_t, full, weight, consumed, **_):
    """A k-tile of the weight in bf16 to tensor memory."""
    stage = _acquire(k_tile, consumed)
    plgpu.barrier_wait(full.at[stage])
    a = dequantize(load(words_s.at[stage], WORDS), load(scales_s.at[stage], SCALES))
    plgpu.async_store_tmem(weight_t.at[:, pl.ds(stage * TILE, TILE)], a)
    plgpu.commit_tmem()
    plgpu.barrier_arrive(weight.at[stage])
    return carry


def _multiply(k_tile, carry, *, x_s, weight_t, sums_t, full, weight, consumed, **_):
    stage = lax.rem(k_tile, STAGES)
    plgpu.barrier_wait(full.at[stage])
    plgpu.barrier_wait(weight.at[stage])
    plgpu.tcgen05_mma(
        sums_t,
        weight_t.at[:, pl.ds(stage * TILE, TILE)],
        x_s.at[stage].T,
        consumed.at[stage],
        accumulate=k_tile > 0,
    )
    return carry


def _store(terms, out_g, first_row, features, *, sums_t, out_s, done, **_):
    """The terms of y, in bf16 through shared memory, by TMA."""
    plgpu.barrier_wait(done)
    for i in range(TILE_M // STORED_ROWS):
        total = plgpu.async_load_tmem(sums_t.at[:, pl.ds(i * STORED_ROWS, STORED_ROWS)])
        plgpu.wait_load_tmem()
        multiplier, *bias = (lax.broadcast_in_dim(term.astype(jnp.float32), total.shape, (0,)) for term in terms)
        total = sum(bias, total * multiplier)
        y = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.TCGEN05_TRANSPOSED)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s.T[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_g.at[pl.ds(first_row + i * STORED_ROWS, STORED_ROWS), features])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def dequantize(words: jax.Array, scales: jax.Array) -> jax.Array:
    """Words [2, 4, 128] and scales [2, 64] of two tiles in registers -> [128, 64] bf16 (weight × 2^-13)."""
    out = plgpu.ShapeDtypeStruct((TILE_N, TILE), jnp.bfloat16, layout=plgpu.Layout.TCGEN05)
    return plgpu.inline_mgpu(arg_types=(WORDS, SCALES), return_type=out)(_dequantize_thread)(words, scales)


def emit_dequantize(machine: PtxMachine, words: list[list[I32]], scales: list[list[I32]]) -> np.ndarray:
    """A thread's registers of `Layout.TCGEN05` [8 groups of 8 columns, 4 of 8 rows], from those of `WORDS` and
    `SCALES`: four words and two words of scales of each of two strips of 16 rows."""
    registers = np.empty((8, 4), dtype=object)
    for strip, own in enumerate(zip(words, scales, strict=True)):
        for k16_step, fragment in enumerate(weight_fragments(machine, *own)):
            for j, register in enumerate(fragment):  # row half + 2 × column half
                registers[2 * k16_step + j // 2, 2 * strip + j % 2] = register
    return registers


def _dequantize_thread(ctx, words, scales):
    del ctx
    words, scales = ([[I32(element(vec, i)) for i in range(count)] for vec in array.registers.flat]
                     for array, count in ((words, 4), (scales, 2)))  # fmt: skip
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = emit_dequantize(PtxMachine(100), words, scales)
    for place, register in np.ndenumerate(registers):
        registers[place] = mgpu.utils.bitcast(register.value, pair)
    layout = plgpu.Layout.TCGEN05.to_mgpu()
    registers = registers.reshape(layout.registers_shape((TILE_N, TILE)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
