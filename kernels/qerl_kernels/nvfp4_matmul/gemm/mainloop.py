"""The mainloops of a consumer warpgroup: dequantize a k-tile of the weight into A fragments, multiply it with x, free
the pipeline stage. `multiply` picks one of two: `wgmma`, or `wgmma` with lookahead."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm.cta import Cta
from qerl_kernels.nvfp4_matmul.packing import TILE


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup: `r` along n (64 output features each), `q` along k."""

    cta: Cta
    r: jax.Array
    q: jax.Array

    def wait_full(self, s: jax.Array, k_iteration: jax.Array) -> jax.Array:
        """The stage of a k-iteration, once its data is there; to be called once for each k-iteration."""
        stage = self.cta.stage(s, k_iteration)
        plgpu.barrier_wait(self.cta.barriers.full.at[stage])
        return stage

    def free(self, stage: jax.Array) -> None:
        """Tells the producer that this consumer has read the stage."""
        plgpu.barrier_arrive(self.cta.barriers.empty.at[stage])

    def weight(self, stage: jax.Array, d: int) -> jax.Array:
        """This consumer's k-tile d of a stage as A fragments."""
        operand, smem = self.cta.operand, self.cta.smem
        place = (stage, *operand.place(self.r, self.q * self.cta.config.k_tiles + d))
        return operand.dequantize(*operand.load(smem.words_s.at[place], smem.scales_s.at[place]))

    def x(self, stage: jax.Array, d: int) -> jax.Ref:
        """x of the k-tile, [64, tile_m] in shared memory."""
        return self.cta.smem.x_s.at[stage, self.q, :, pl.ds(d * TILE, TILE)].T


def multiply(consumer: Consumer, s: jax.Array) -> jax.Array:
    """This consumer's sum over segment s, [64, tile_m] fp32."""
    config = consumer.cta.config
    mainloop = mainloop_wgmma_lookahead if config.lookahead else mainloop_wgmma

    def accumulate(acc):
        mainloop(consumer, s, acc)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE, config.tile_m), jnp.float32))


def mainloop_wgmma(consumer: Consumer, s: jax.Array, acc: jax.Ref) -> None:
    """Dequantizes each k-tile of a stage and starts its `wgmma`; waits for all before it frees the stage."""
    span = consumer.cta.segments.span(s)

    def one_k_iteration(k_iteration, carry):
        stage = consumer.wait_full(s, k_iteration)
        for d in range(consumer.cta.config.k_tiles):
            plgpu.wgmma(acc, consumer.weight(stage, d), consumer.x(stage, d))
        plgpu.wgmma_wait(0)
        consumer.free(stage)
        return carry

    lax.fori_loop(span.k_begin, span.k_end, one_k_iteration, None)


def mainloop_wgmma_lookahead(consumer: Consumer, s: jax.Array, acc: jax.Ref) -> None:
    """Two A fragments alternate: one is dequantized while the tensor cores read the other.

    tensor cores   wgmma i               wgmma i + 1               wgmma i + 2
    this warp      dequantize i + 1      dequantize i + 2          dequantize i + 3
    stages         free that of i - 1    free that of i            free that of i + 1     (where it ends there)
    """
    cta, unroll, k_tiles = consumer.cta, consumer.cta.config.unroll, consumer.cta.config.k_tiles
    span = cta.segments.span(s)

    def one_iteration(t, carry, is_last=False):
        for u, d in itertools.product(range(unroll), range(k_tiles)):
            is_final = is_last and (u, d) == (unroll - 1, k_tiles - 1)
            carry = _lookahead_k_tile(consumer, s, acc, t * unroll + u, d, *carry, is_last=is_final)
        return carry

    stage = consumer.wait_full(s, span.k_begin)
    carry = stage, jnp.int32(-1), consumer.weight(stage, 0)
    last = lax.div(span.k_end, unroll) - 1
    carry = lax.fori_loop(lax.div(span.k_begin, unroll), last, one_iteration, carry)
    one_iteration(last, carry, is_last=True)


def _lookahead_k_tile(
    consumer: Consumer,
    s: jax.Array,
    acc: jax.Ref,
    k_iteration: jax.Array,
    d: int,
    stage: jax.Array,
    previous_stage: jax.Array,
    a_fragment: jax.Array,
    is_last: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Multiplies with `a_fragment`, k-tile d of `stage` (that of `k_iteration`), and dequantizes the next k-tile.

    `previous_stage`: the stage of the k-iteration before, while its last `wgmma` may be under way; negative where there
    is none. Returns stage, previous stage and A fragment of the next k-tile.
    """
    plgpu.wgmma(acc, a_fragment, consumer.x(stage, d))
    plgpu.wgmma_wait(0 if is_last else 1)  # the k-tile before is done
    if d == 0:

        @pl.when(previous_stage >= 0)
        def _():
            consumer.free(previous_stage)

    if is_last:
        consumer.free(stage)
        return stage, previous_stage, a_fragment
    if d < consumer.cta.config.k_tiles - 1:
        return stage, previous_stage, consumer.weight(stage, d + 1)
    next_stage = consumer.wait_full(s, k_iteration + 1)
    return next_stage, stage, consumer.weight(next_stage, 0)
