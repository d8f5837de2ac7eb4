"""The stages of the pipeline from the consumer's side: filled by the producer's TMA, or by the consumer's own copies.

`CopiedStages` (tier "warp"): no producer. Each warp reads only its own 16 tokens of a KV tile, so that it also copies
them, by `cp_async`, and no warp waits for another. A group of copies is committed for every use of a stage, be it
empty, so that "all but the last stages - 1" is the present use. What is not copied, past the tokens of a cache, is
masked by the consumer. A lane waits for its own copies; `warp_sync` makes those of the others visible, and a second one
stands between the last read of a stage and the copies that fill it anew.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.decode_attention.config import KV_TILE, SPLITS, WARP_TOKENS
from qerl_kernels.decode_attention.kv_tiles import ROW_BYTES, lane_and_warp, smem_transforms
from qerl_kernels.decode_attention.work import Shared, Work
from qerl_kernels.ptx.arrays import SCALAR
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32, Ptr


class TmaStages:
    """Stages that `producer` fills."""

    def __init__(self, work: Work, shared: Shared):
        self.work, self.shared = work, shared

    def start(self) -> None:
        """The producer has started."""

    def wait(self, use: jax.Array) -> jax.Array:
        """The stage of a use, once its copy has come."""
        stage = lax.rem(use, self.work.config.stages)
        plgpu.barrier_wait(self.shared.full.at[stage])
        return stage

    def release(self, stage: jax.Array, use: jax.Array, is_values: bool) -> None:
        """Arrives on the barrier of a stage that this thread has read, so that TMA may fill it anew.

        The fence orders the reads before the writes of the copy engine. Without it the arrival does not wait for an
        `ldmatrix` under way: about one pair in a thousand to ten thousand was torn.
        """
        del use, is_values
        plgpu.inline_mgpu()(lambda ctx: PtxMachine(90).fence_proxy_async())()
        plgpu.barrier_arrive(self.shared.empty.at[stage])


class CopiedStages:
    """Stages that the warps fill. Even uses are keys, odd ones values; the number of stages is even."""

    def __init__(self, work: Work, shared: Shared):
        self.work, self.shared = work, shared
        counts = [lax.div(work.tiles - split + SPLITS - 1, SPLITS) for split in range(SPLITS)]
        self.begins = [jnp.int32(0), *(sum(counts[:split]) for split in range(1, SPLITS))]

    def start(self) -> None:
        """Fills all stages."""
        for use in range(self.work.config.stages):
            self._fetch(jnp.int32(use // 2), self.shared.stages.at[use], bool(use % 2))

    def wait(self, use: jax.Array) -> jax.Array:
        """The stage of a use, once this warp's copies have come."""
        pending = self.work.config.stages - 1

        def emit(ctx):
            machine = PtxMachine()
            machine.wait_group(pending)
            machine.warp_sync()

        plgpu.inline_mgpu()(emit)()
        return lax.rem(use, self.work.config.stages)

    def release(self, stage: jax.Array, use: jax.Array, is_values: bool) -> None:
        """Fills a stage that this warp has read anew."""
        plgpu.inline_mgpu()(lambda ctx: PtxMachine().warp_sync())()
        ordinal = lax.div(use + self.work.config.stages, 2)
        self._fetch(ordinal, self.shared.stages.at[stage], is_values)

    def tile_of(self, ordinal: jax.Array) -> jax.Array:
        """The KV tile that the consumer takes as its `ordinal`-th: those of a split one after another."""
        split, begin = jnp.int32(0), self.begins[0]
        for i in range(1, SPLITS):
            is_past = ordinal >= self.begins[i]
            split, begin = jnp.where(is_past, i, split), jnp.where(is_past, self.begins[i], begin)
        return split + SPLITS * (ordinal - begin)

    def _fetch(self, ordinal: jax.Array, stage: jax.Ref, is_values: bool) -> None:
        """Starts this warp's copies of a tile's keys or values, and makes them a group."""
        work, refs, tile = self.work, self.work.refs, self.tile_of(ordinal)
        exists, is_prompt = ordinal < work.tiles, tile < work.prompt_tiles
        own_tile = tile - work.prompt_tiles

        @pl.when(exists & is_prompt)
        def _():
            cache = refs.prompt_v if is_values else refs.prompt_k
            copy(cache, stage, work.prompt_pair, tile * KV_TILE, work.prompt_tokens - tile * KV_TILE)

        @pl.when(exists & (tile >= work.prompt_tiles))
        def _():
            cache = refs.v if is_values else refs.k
            copy(cache, stage, work.pair, own_tile * KV_TILE, work.own_tokens - own_tile * KV_TILE)

        plgpu.inline_mgpu()(lambda ctx: PtxMachine().commit_group())()


def copy(cache: jax.Ref, stage: jax.Ref, pair: jax.Array, first: jax.Array, tokens: jax.Array) -> None:
    """Starts copies of a warp's 16 of the 64 tokens from `first` on, of which the first `tokens` exist."""

    def emit(ctx, cache, stage, *scalars):
        del ctx
        machine = PtxMachine()
        base, at = Ptr(mgpu.utils.memref_ptr(cache)), machine.shared_address(stage)
        _, slots, width = ir.MemRefType(cache.type).shape
        emit_copy(machine, base, at, *(I32(each.registers.item()) for each in scalars), slots=slots, width=width)

    tile = plgpu.RefType(smem_transforms(cache.shape[2], cache.dtype))
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tile, SCALAR, SCALAR, SCALAR))(emit)(
        cache, stage, pair, first, tokens
    )


def emit_copy(
    machine: PtxMachine, base: Ptr, stage: I32, pair: I32, first: I32, tokens: I32, *, slots: int, width: int
) -> None:
    """`copy` of one thread, which has 16 bytes of a token at a time. Layout of the stage: `kv_tiles`.

    Args:
      machine: emits or runs the instructions.
      base: address of the cache, bf16 [pairs, slots, width].
      stage: address of the stage in shared memory.
      pair: index of the pair in the cache.
      first: slot of the tile's first token.
      tokens: tokens of the tile that exist.
      slots: slots of a pair.
      width: head dim.
    """
    lane, warp = lane_and_warp(machine)
    chunks = width * 2 // 16
    token, chunk = warp * WARP_TOKENS + lane // chunks, lane % chunks
    source = machine.mad_wide(base, (pair * slots + first + token, 2 * width), (chunk, 16))
    for more in range(0, WARP_TOKENS, 32 // chunks):
        here = token + more
        row = here & 7
        block = (here >> 3) * (16 * width) + (chunk >> 3) * (8 * ROW_BYTES)
        at = stage + block + row * ROW_BYTES + ((chunk & 7) ^ row) * 16
        machine.cp_async(at, source, [(0, more * 2 * width)], here < tokens)
