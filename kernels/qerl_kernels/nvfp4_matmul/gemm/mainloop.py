"""The mainloops of a consumer warpgroup: dequantize a k-tile of the weight into A fragments, multiply it with x, free
the pipeline stage. `multiply` picks one of three: `wgmma`, `wgmma` with lookahead, `mma.sync`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm.cta import Cta
from qerl_kernels.nvfp4_matmul.gemm.mma_sync import mma_k_tile, order_reads
from qerl_kernels.nvfp4_matmul.packing import TILE


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup: `r` along n (64 output features each), `q` along k."""

    cta: Cta
    r: jax.Array
    q: jax.Array

    def wait_full(self, s: jax.Array, step: jax.Array) -> jax.Array:
        """The stage of a k-step, once its data is there; to be called once for each k-step."""
        stage = self.cta.stage(s, step)
        plgpu.barrier_wait(self.cta.barriers.full.at[stage])
        return stage

    def free(self, stage: jax.Array) -> None:
        """Tells the producer that this consumer has read the stage."""
        plgpu.barrier_arrive(self.cta.barriers.empty.at[stage])

    def load(self, stage: jax.Array, d: int) -> tuple[jax.Array, jax.Array]:
        """Words and scales of this consumer's k-tile d of a stage, in registers."""
        place = self.cta.operand.place(self.r, self.q * self.cta.config.k_tiles + d)
        words_s, scales_s = self.cta.smem.words_s, self.cta.smem.scales_s
        return self.cta.operand.load(words_s.at[(stage, *place)], scales_s.at[(stage, *place)])

    def weight(self, stage: jax.Array, d: int) -> jax.Array:
        """The same k-tile as A fragments."""
        return self.cta.operand.dequantize(*self.load(stage, d))

    def x(self, stage: jax.Array, d: int) -> jax.Ref:
        """x of the k-tile, [64, tile_m] in shared memory."""
        return self.cta.smem.x_s.at[stage, self.q, :, pl.ds(d * TILE, TILE)].T


def multiply(consumer: Consumer, s: jax.Array) -> jax.Array:
    """This consumer's sum over segment s, [64, tile_m] fp32."""
    config = consumer.cta.config
    if config.mma_sync:
        return mainloop_mma_sync(consumer, s)
    mainloop = mainloop_wgmma_lookahead if config.lookahead else mainloop_wgmma

    def accumulate(acc):
        mainloop(consumer, s, acc)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE, config.tile_m), jnp.float32))


def _over_steps(consumer: Consumer, s: jax.Array, init: Any, one_stage: Callable[[jax.Array, Any], Any]) -> Any:
    """`carry = one_stage(stage, carry)` for each k-step of segment s, whose stage is freed after it."""
    _, low, high = consumer.cta.segments.span(s)

    def one_step(step, carry):
        stage = consumer.wait_full(s, step)
        carry = one_stage(stage, carry)
        if consumer.cta.config.mma_sync:
            order_reads()
        consumer.free(stage)
        return carry

    return lax.fori_loop(low, high, one_step, init)


def mainloop_wgmma(consumer: Consumer, s: jax.Array, acc: jax.Ref) -> None:
    """Dequantizes each k-tile of a stage and starts its `wgmma`; waits for all before it frees the stage."""

    def one_stage(stage, carry):
        for d in range(consumer.cta.config.k_tiles):
            plgpu.wgmma(acc, consumer.weight(stage, d), consumer.x(stage, d))
        plgpu.wgmma_wait(0)
        return carry

    _over_steps(consumer, s, None, one_stage)


def mainloop_mma_sync(consumer: Consumer, s: jax.Array) -> jax.Array:
    """Multiplies by `mma.sync`, warp by warp."""
    config = consumer.cta.config

    def one_stage(stage, total):
        for d in range(config.k_tiles):
            total = mma_k_tile(
                total, consumer.weight(stage, d), consumer.cta.smem.x_s.at[stage, consumer.q], d, config.k_tiles
            )
        return total

    zero = plgpu.layout_cast(jnp.zeros((TILE, config.tile_m), jnp.float32), plgpu.Layout.WGMMA)
    return _over_steps(consumer, s, zero, one_stage)


def mainloop_wgmma_lookahead(consumer: Consumer, s: jax.Array, acc: jax.Ref) -> None:
    """Two operands alternate: one is dequantized while the tensor cores read the other."""
    cta, unroll, k_tiles = consumer.cta, consumer.cta.config.unroll, consumer.cta.config.k_tiles
    _, low, high = cta.segments.span(s)

    def one_iteration(t, carry, is_last=False):
        for u, d in itertools.product(range(unroll), range(k_tiles)):
            is_final = is_last and (u, d) == (unroll - 1, k_tiles - 1)
            carry = _lookahead_k_tile(consumer, s, acc, t * unroll + u, d, *carry, is_last=is_final)
        return carry

    stage = consumer.wait_full(s, low)
    carry = stage, jnp.int32(-1), consumer.weight(stage, 0)
    last = lax.div(high, unroll) - 1
    carry = lax.fori_loop(lax.div(low, unroll), last, one_iteration, carry)
    one_iteration(last, carry, is_last=True)


def _lookahead_k_tile(
    consumer: Consumer,
    s: jax.Array,
    acc: jax.Ref,
    step: jax.Array,
    d: int,
    stage: jax.Array,
    before: jax.Array,
    a: jax.Array,
    is_last: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Multiplies with `a`, the operand of k-tile d of `stage` (k-step `step`), and dequantizes the next one.

    `before`: the stage of the k-step before, while its last `wgmma` may be under way; negative where there is none.
    Returns stage, before and a of the next k-tile.
    """
    config = consumer.cta.config
    ends_stage = d == config.k_tiles - 1

    def load_next():
        after = consumer.wait_full(s, step + 1) if ends_stage else stage
        return after, consumer.load(after, 0 if ends_stage else d + 1)

    if config.lookahead == 1 and not is_last:
        after, packed = load_next()
    plgpu.wgmma(acc, a, consumer.x(stage, d))
    if config.lookahead == 2:
        plgpu.wgmma_wait(0 if is_last else 1)  # the k-tile before is done
        if d == 0:

            @pl.when(before >= 0)
            def _():
                consumer.free(before)

        if not is_last:
            after, packed = load_next()
    if not is_last:
        a = consumer.cta.operand.dequantize(*packed)
    if config.lookahead == 1:
        plgpu.wgmma_wait(0)
    if (config.lookahead == 1 and ends_stage) or is_last:
        consumer.free(stage)
    return (stage, before, a) if is_last else (after, stage if ends_stage else before, a)
