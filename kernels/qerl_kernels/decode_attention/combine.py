"""Combines the split-KV partials of a pair: over the warps of a CTA, its splits, and the CTAs of the cluster.

A partial is a running maximum m [8], a sum of weights l [8] and an output [H, 8], in registers of the consumer
warpgroup. CTA 0 gets the partials of the other CTAs by `st.async`: each thread writes its own registers for the thread
of the same index in CTA 0. With Mosaic's own `async_store_smem` every thread of the sender would arrive on the barrier
with release semantics for the whole cluster, which waits for all its memory traffic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.decode_attention.config import QUERIES
from qerl_kernels.decode_attention.kv_tiles import smem_transforms
from qerl_kernels.decode_attention.layouts import ACCUMULATOR, MERGED, PER_QUERY
from qerl_kernels.ptx.arrays import SCALAR, f32_pair, fragmented_array
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.load import load
from qerl_kernels.ptx.values import F32, I32, element

OUTPUT_TRANSFORMS = smem_transforms(QUERIES, jnp.float32)
"""Tiling and swizzle of the warps' outputs in shared memory."""
_STEP = 128 * 8  # bytes of one register pair of all threads


class Partial(NamedTuple):
    """Attention over some of the tokens, before the division by the sum of weights.

    Attributes:
      m: running maximum of the scores of each query, f32 [8].
      l: sum of the weights exp2(score − m), f32 [8].
      out: sum of the weighted values, f32 [H, 8].
    """

    m: jax.Array
    l: jax.Array  # noqa: E741
    out: jax.Array


def merge(one: Partial, other: Partial) -> Partial:
    """The partial over both sets of tokens. With an empty set, exactly that over the other."""
    m = jnp.maximum(one.m, other.m)
    rescale_one, rescale_other = jnp.exp2(one.m - m), jnp.exp2(other.m - m)
    out = one.out * over_rows(rescale_one, len(one.out)) + other.out * over_rows(rescale_other, len(one.out))
    return Partial(m, one.l * rescale_one + other.l * rescale_other, out)


def merge_warps(
    m: jax.Array,
    l: jax.Array,  # noqa: E741
    out: jax.Array,
    warp_max: jax.Ref,
    warp_sum: jax.Ref,
    outputs: jax.Ref,
) -> Partial:
    """The partial of a split from those of its four warps, through shared memory.

    Args:
      m: maximum of each warp, [4, 8] as `ACCUMULATOR` reduced.
      l: sum of weights of each warp, likewise.
      out: output of each warp, [4, H, 8] in `ACCUMULATOR`.
      warp_max: shared memory for m.
      warp_sum: shared memory for l.
      outputs: shared memory for out.
    """
    warp_max[...] = m
    warpgroup_sync()
    each = [load(warp_max.at[warp], ACCUMULATOR.reduce((0, 1))) for warp in range(4)]
    highest = functools.reduce(jnp.maximum, each)
    rescale = jnp.exp2(m - lax.broadcast_in_dim(highest, m.shape, (1,)))
    warp_sum[...] = l * rescale
    outputs[...] = out * over_tokens(rescale, out.shape)
    warpgroup_sync()
    each = [load(warp_max.at[warp], PER_QUERY) for warp in range(4)]
    total = sum(load(warp_sum.at[warp], PER_QUERY) for warp in range(4))
    out = sum(load(outputs.at[warp], MERGED, OUTPUT_TRANSFORMS) for warp in range(4))
    warpgroup_sync()  # the next split may write
    return Partial(functools.reduce(jnp.maximum, each), total, out)


def over_tokens(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A warp's value for each query, [4, 8], over its tokens or over the head dim."""
    return lax.broadcast_in_dim(value, shape, (0, 2))


def over_rows(value: jax.Array, rows: int) -> jax.Array:
    """A value for each query, [8], over the head dim."""
    return lax.broadcast_in_dim(value, (rows, QUERIES), (1,))


# ---- barriers ----


def warpgroup_sync() -> None:
    """All four warps of the warpgroup arrive, and see each other's shared memory."""
    plgpu.inline_mgpu()(lambda ctx: mgpu.utils.warpgroup_barrier())()


def init_mbarrier(mbarrier: jax.Ref, expected: jax.Array) -> None:
    """Prepares this CTA's `mbarrier` (8 bytes of shared memory) for so many bytes, and announces it to the cluster."""

    def emit(ctx, mbarrier, expected):
        machine = PtxMachine(90)
        barriers = [(machine.shared_address(mbarrier), I32(expected.registers.item()))]
        machine.init_mbarriers(barriers, machine.thread_index())

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))(emit)(mbarrier, expected)


def cluster_wait() -> None:
    """Waits until every thread of the cluster has announced its mbarrier."""
    plgpu.inline_mgpu()(lambda ctx: PtxMachine(90).cluster_wait())()


def wait_for_partials(mbarrier: jax.Ref) -> None:
    """Waits until all bytes that `init_mbarrier` expects have come."""

    def emit(ctx, mbarrier):
        machine = PtxMachine(90)
        machine.mbarrier_wait(machine.shared_address(mbarrier))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(mbarrier)


# ---- partials in shared memory: thread t has register pair i of a partial at byte 1024 i + 8 t of a slot ----


def send(partial: Partial, slot: jax.Ref, mbarrier: jax.Ref) -> None:
    """Writes a partial to `slot` of CTA 0 and counts its bytes on `mbarrier` there."""

    def emit(ctx, m, l, out, slot, mbarrier):  # noqa: E741
        machine = PtxMachine(90)
        place, barrier = _place(machine, slot), machine.shared_address(mbarrier)
        for byte, pair in _pairs(m, l, out):
            machine.st_async(place, machine.i32(0), pair, barrier, byte=byte)

    types = (PER_QUERY, PER_QUERY, MERGED, plgpu.RefType(), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=types)(emit)(*partial, slot, mbarrier)


def keep(partial: Partial, slot: jax.Ref) -> None:
    """Writes a partial to a slot of this CTA, for `receive`: each thread reads what it wrote itself."""

    def emit(ctx, m, l, out, slot):  # noqa: E741
        machine = PtxMachine()
        place = _place(machine, slot)
        for byte, pair in _pairs(m, l, out):
            machine.store_shared(place, pair, byte=byte)

    plgpu.inline_mgpu(arg_types=(PER_QUERY, PER_QUERY, MERGED, plgpu.RefType()))(emit)(*partial, slot)


def receive(slot: jax.Ref, width: int) -> Partial:
    """The partial in a slot of this CTA."""

    def emit(ctx, slot):
        machine = PtxMachine()
        place = _place(machine, slot)
        count = ir.MemRefType(slot.type).shape[0] * 4 // _STEP
        *out, m, l = (f32_pair(*machine.load_shared(place, 2, byte=i * _STEP)) for i in range(count))  # noqa: E741
        per_query = [fragmented_array([each], (QUERIES,), PER_QUERY) for each in (m, l)]
        return *per_query, fragmented_array(out, (width, QUERIES), MERGED)

    per_query = plgpu.ShapeDtypeStruct((QUERIES,), jnp.float32, layout=PER_QUERY)
    out = plgpu.ShapeDtypeStruct((width, QUERIES), jnp.float32, layout=MERGED)
    types = (per_query, per_query, out)
    return Partial(*plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=types)(emit)(slot))


def _place(machine: PtxMachine, slot: ir.Value) -> I32:
    """Where this thread's register pairs begin in a slot."""
    return machine.shared_address(slot) + (machine.thread_index() & 127) * 8


def _pairs(m, l, out) -> list[tuple[int, list[F32]]]:  # noqa: E741
    """(byte from `_place` on, values) of each register pair of a partial."""
    pairs = [*out.registers.flat, *m.registers.flat, *l.registers.flat]
    return [(i * _STEP, [F32(element(pair, e)) for e in range(2)]) for i, pair in enumerate(pairs)]
