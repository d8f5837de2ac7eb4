"""NVFP4 GEMM for Hopper in Pallas Mosaic GPU, warp-specialized: prefill, training forward, large decode batches.

    forward     y[m, n]  = multiplier[n] · Σ_k x[m, k]  · w[n, k]  (+ bias[n])  (+ scale · Σ_r lora_x[m, r] · b[r, n])
    transposed  dx[m, k] = multiplier    · Σ_n dy[m, n] · w[n, k]               (`transposed`; one multiplier for all n)

The tensor cores multiply A (64 features × 16) from registers with B (16 × tile_m) from shared memory. The weight is A,
so that a small m wastes little of the machine. A CTA has `warpgroups_n · warpgroups_k` consumer warpgroups and one
producer warpgroup. Consumer (r, q) has 64 output features of the tile's `64 · warpgroups_n` and every `warpgroups_k`-th
part of the contraction. The producer (`producer`) copies words, scales and activations into a pipeline of `stages` by
TMA; consumers dequantize words into bf16 registers and multiply them (`mainloop`, `operand`), free the stage, and
finish the tile (`epilogue`). `schedule` says which CTA does what of which tile, `barriers` why nothing hangs.

Padding around the kernel: m above 8 to a multiple of 8, which TMA asks for; features to a multiple of 64, which every
projection of a model is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul.gemm.barriers import Barriers, declare_barriers
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.cta import Cta, Gmem, WeightOperand
from qerl_kernels.nvfp4_matmul.gemm.epilogue import load_row_terms, prepare_exchange, run_epilogue
from qerl_kernels.nvfp4_matmul.gemm.mainloop import Consumer, multiply
from qerl_kernels.nvfp4_matmul.gemm.operand import FORWARD
from qerl_kernels.nvfp4_matmul.gemm.producer import produce
from qerl_kernels.nvfp4_matmul.gemm.schedule import Segments, TileGrid
from qerl_kernels.nvfp4_matmul.gemm.smem import Smem, declare_smem
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms
from qerl_kernels.nvfp4_matmul.lora_input import describe, is_lora_x
from qerl_kernels.nvfp4_matmul.packing import TILE


# A jit of its own, although the callers are jitted: a program then lowers and compiles each shape once, not once for
# every layer (0.27 s + 0.3 s a call otherwise: minutes for the hundreds of GEMMs of a training step).
@functools.partial(jax.jit, static_argnames=("config", "scale", "gpu"))
def gemm(
    x: jax.Array,
    weight: PackedNvfp4,
    config: GemmConfig,
    *,
    bias: jax.Array | None = None,
    lora_x: jax.Array | None = None,
    lora_b: Sequence[jax.Array] = (),
    scale: float = 1.0,
    gpu: Gpu = H200,
) -> jax.Array:
    """The forward equation of the module's docstring: x bf16 [m, k] -> bf16 [m, n].

    Args:
      x: activations.
      weight: the packed weight.
      config: the tuning config.
      bias: [n], any float dtype.
      lora_x: `x A` of the adapters side by side, bf16 [m, 64 · adapters], each padded to 64 columns with zeros; one
        adapter alone may keep its rank. Or, of one adapter and for up to `config.tile_m` rows, its split-K partials,
        f32 [partials, m, rank].
      lora_b: B of each adapter, bf16 [rank, features]; together they cover the n features in order.
      scale: LoRA scale alpha / R.
      gpu: the GPU, of tier "wgmma".

    Raises:
      ValueError: the config fits neither the GPU nor these shapes, or `lora_x` has another shape or dtype than stated.
    """
    (n, k), m = weight.shape, x.shape[0]
    terms = Terms(
        has_bias=bias is not None,
        lora_widths=tuple(b.shape[1] for b in lora_b),
        scale=scale,
        has_partials=bool(lora_b) and lora_x is not None and lora_x.ndim == 3,
    )
    if x.shape != (m, k):
        raise ValueError(f"gemm: x is {x.shape}, the weight {n} x {k}")
    if lora_b and not config.can_fuse_lora(n, [b.shape for b in lora_b]):
        raise ValueError(f"gemm: adapters of shapes {[b.shape for b in lora_b]} do not fit {config} and {n} features")
    ranks = [b.shape[0] for b in lora_b]
    if not is_lora_x(lora_x, m, ranks) or (terms.has_partials and (len(ranks) > 1 or m > config.tile_m)):
        raise ValueError(f"gemm: x A is {describe(lora_x)}; {m} rows, adapters of ranks {ranks}, {config}")
    x = pad_rows(x)
    if lora_b and not terms.has_partials:
        lora_x = jnp.pad(lora_x, ((0, x.shape[0] - m), (0, 0)))
    if bias is not None:
        bias = jnp.pad(bias, (0, weight.multiplier.shape[0] - n))
    extra = (*(() if bias is None else (bias,)), *((lora_x, *lora_b) if lora_b else ()))
    return launch(x, weight, FORWARD, config, terms, extra, n, gpu)[:m, :n]


def _check_config(config: GemmConfig, terms: Terms, gpu: Gpu) -> None:
    if gpu.tier != "wgmma":  # LLVM would end the process
        raise ValueError(f"gemm: wgmma takes compute capability 9.0, this is {gpu.name}, {gpu.arch / 10}")
    smem = config.smem_bytes(terms.has_lora, terms.has_partials)
    if smem > gpu.smem_bytes:
        raise ValueError(f"gemm: {config} needs {smem} bytes of shared memory, a CTA has {gpu.smem_bytes}")
    if config.lookahead and config.stages < 2:  # with one stage its consumer would wait for itself
        raise ValueError(f"gemm: lookahead takes wgmma and two stages, this is {config}")


def pad_rows(x: jax.Array) -> jax.Array:
    """x [m, k] with as many rows and columns as TMA and k-tiles need, zeros past its own."""
    m, k = x.shape
    return jnp.pad(x, ((0, -m % 8 if m > 8 else 0), (0, -k % TILE)))


def launch(
    x: jax.Array,
    weight: PackedNvfp4,
    operand: WeightOperand,
    config: GemmConfig,
    terms: Terms,
    extra: Sequence[jax.Array],
    n: int,
    gpu: Gpu,
) -> jax.Array:
    """y [m, n padded to a multiple of 64] of padded inputs. `extra`: bias, `x A` and B, those of `terms`; n: output
    features of the GEMM."""
    _check_config(config, terms, gpu)
    m, k = x.shape
    together = -(-k // (TILE * config.stage_k_tiles * config.unroll))
    if together < config.cluster:  # a CTA would have no share of a sum
        config = dataclasses.replace(config, cluster=1)
    grid = TileGrid(
        m_tiles=-(-m // config.tile_m),
        widths=tuple(-(-width // TILE) for width in terms.lora_widths or (n,)),
        tile_blocks=config.warpgroups_n,
        k_iterations=together * config.unroll,
        clusters=config.resident_clusters(gpu),
    )
    grid = dataclasses.replace(grid, clusters=min(grid.clusters, grid.m_tiles * grid.n_tiles))
    words = operand.words(weight.words)
    weight_tiles = operand.place(config.warpgroups_n, config.stage_k_tiles)
    call = plgpu.kernel(
        functools.partial(_body, config=config, terms=terms, operand=operand, grid=grid),
        out_type=jax.ShapeDtypeStruct((m, -(-n // TILE) * TILE), jnp.bfloat16),
        grid=(grid.clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("cluster_rank",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[
            declare_smem(config, terms, weight_tiles, words.shape[2:], operand.word_transforms()),
            declare_barriers(config, terms),
        ],
        kernel_name=f"nvfp4_{operand.name}_m{config.tile_m}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return call(x, words, weight.scales, weight.multiplier, *extra)


def _body(
    x_g: jax.Ref,
    words_g: jax.Ref,
    scales_g: jax.Ref,
    multiplier_g: jax.Ref,
    *rest: jax.Ref | Smem | Barriers,
    config: GemmConfig,
    terms: Terms,
    operand: WeightOperand,
    grid: TileGrid,
) -> None:
    """The kernel. `rest`: bias, `x A` and B, those of `terms`; y; shared memory; barriers."""
    *extra, out_g, smem, barriers = rest
    bias_g = extra.pop(0) if terms.has_bias else None
    lora_x_g = extra.pop(0) if terms.has_lora else None
    warpgroup, cluster_index, rank = (lax.axis_index(name) for name in ("warpgroup", "cluster", "cluster_rank"))
    tiles = grid.tile_count(cluster_index)
    cta = Cta(
        config=config,
        terms=terms,
        operand=operand,
        grid=grid,
        segments=Segments(tiles, grid.k_iterations, config.cluster, config.unroll, rank, terms.has_lora),
        cluster_index=cluster_index,
        rank=rank,
        gmem=Gmem(x_g, words_g, scales_g, multiplier_g, bias_g, lora_x_g, tuple(extra), out_g),
        smem=smem,
        barriers=barriers,
    )

    @pl.when(warpgroup == config.consumers)
    def _():
        produce(cta)

    @pl.when(warpgroup < config.consumers)
    def _():
        _consume(cta, warpgroup)


def _consume(cta: Cta, warpgroup: jax.Array) -> None:
    """All that a consumer warpgroup does: mainloop and epilogue of each segment."""
    registers = cta.config.register_split()
    if registers:
        plgpu.set_max_registers(registers[1], action="increase")
    q, r = lax.div(warpgroup, cta.config.warpgroups_n), lax.rem(warpgroup, cta.config.warpgroups_n)
    consumer = Consumer(cta, r, q)
    if cta.config.cluster > 1:
        prepare_exchange(consumer)

    def one_segment(s, carry):
        span = cta.segments.span(s)
        row_terms = load_row_terms(consumer, span)
        run_epilogue(consumer, multiply(consumer, s), s, span, row_terms)
        return carry

    lax.fori_loop(0, cta.segments.count, one_segment, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
