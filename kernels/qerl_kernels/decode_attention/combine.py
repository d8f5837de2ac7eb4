"""Combines the split-KV partials of a pair: over the warps of a CTA, its splits, and the CTAs of the cluster.

A partial is a running maximum m [8], a sum of weights l [8] and an output [H, 8], in registers of the consumer
warpgroup. CTA 0 gets the partials of the other CTAs by `st.async`: each thread writes its own registers for the thread
of the same index in CTA 0. The instruction counts its bytes on an mbarrier beside the data, so that the sender needs no
fence: with Mosaic's own `async_store_smem` every thread of the sender arrives on the barrier with release semantics for
the whole cluster, which waits for all its memory traffic. Source: PTX ISA, "st.async", "mbarrier", "barrier.cluster".
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
from jaxlib.mlir.dialects import arith, llvm, nvvm

from qerl_kernels.decode_attention.config import QUERIES
from qerl_kernels.decode_attention.kv_tiles import smem_transforms
from qerl_kernels.decode_attention.layouts import ACCUMULATOR, MERGED, PER_QUERY, SCALAR, fragmented_array
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.load import load
from qerl_kernels.ptx.values import I32, Ptr, Value

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


class _Pair(Value):
    """Two fp32 values in a 64-bit register."""

    letter = "l"


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


def cluster_arrive() -> None:
    """Arrives on the cluster's barrier without ordering any memory but the mbarrier of `init_mbarrier`."""
    _emit_instruction("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait() -> None:
    """Waits until every thread of the cluster has arrived."""
    _emit_instruction("barrier.cluster.wait.acquire.aligned;")


def init_mbarrier(mbarrier: jax.Ref, expected: jax.Array) -> None:
    """Sets up `mbarrier` (8 bytes of shared memory) to complete once so many bytes have come; not where it is < 0."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))(_emit_init)(mbarrier, expected)


def wait_for_partials(mbarrier: jax.Ref) -> None:
    """Waits until all bytes that `init_mbarrier` expects have come."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_emit_wait)(mbarrier)


# ---- partials in shared memory ----


def send(partial: Partial, slot: jax.Ref, mbarrier: jax.Ref) -> None:
    """Writes a partial to `slot` of CTA 0 and counts its bytes on `mbarrier` there."""
    types = (PER_QUERY, PER_QUERY, MERGED, plgpu.RefType(), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=types)(_emit_send)(*partial, slot, mbarrier)


def keep(partial: Partial, slot: jax.Ref) -> None:
    """Writes a partial to a slot of this CTA, for `receive`: each thread reads what it wrote itself."""
    plgpu.inline_mgpu(arg_types=(PER_QUERY, PER_QUERY, MERGED, plgpu.RefType()))(_emit_keep)(*partial, slot)


def receive(slot: jax.Ref, width: int) -> Partial:
    """The partial in a slot of this CTA."""
    per_query = plgpu.ShapeDtypeStruct((QUERIES,), jnp.float32, layout=PER_QUERY)
    out = plgpu.ShapeDtypeStruct((width, QUERIES), jnp.float32, layout=MERGED)
    types = (per_query, per_query, out)
    return Partial(*plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=types)(_emit_receive)(slot))


def _emit_instruction(text: str) -> None:
    def emit(ctx):
        PtxMachine().asm(text, "", effects=True)

    plgpu.inline_mgpu()(emit)()


def _emit_init(ctx, mbarrier, expected):
    del ctx
    machine, expected = PtxMachine(), I32(expected.registers.item())
    wanted = arith.cmpi(arith.CmpIPredicate.sge, expected.value, machine.i32(0).value)
    first = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
    with mgpu.utils.when(arith.andi(wanted, first)):
        address = mgpu.utils.memref_ptr(mbarrier)
        nvvm.mbarrier_init(address, machine.i32(1).value)
        machine.asm("fence.mbarrier_init.release.cluster;", "", effects=True)
        text = "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;"
        machine.asm(text, "", _SharedAddress(address), expected, effects=True)


class _SharedAddress(Value):
    """A pointer to shared memory, which a 32-bit register holds."""

    letter = "r"


def _own_place(machine: PtxMachine, slot: ir.Value) -> ir.Value:
    """Where this thread's register pairs begin in a slot."""
    thread = machine.thread_index() & 127
    byte = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(slot), [(thread * 8).value], byte)


def _pairs(m, l, out) -> list[ir.Value]:  # noqa: E741
    return [*out.registers.flat, *m.registers.flat, *l.registers.flat]


def _emit_send(ctx, m, l, out, slot, mbarrier):  # noqa: E741
    del ctx
    machine = PtxMachine()
    place, barrier = (
        Ptr(mgpu.utils.get_cluster_ptr(pointer, machine.i32(0).value, generic=False))
        for pointer in (_own_place(machine, slot), mgpu.utils.memref_ptr(mbarrier))
    )
    for i, pair in enumerate(_pairs(m, l, out)):
        text = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [$0 + {i * _STEP}], $1, [$2];"
        value = _Pair(mgpu.utils.bitcast(pair, ir.IntegerType.get_signless(64)))
        machine.asm(text, "", place, value, barrier, effects=True)


def _emit_keep(ctx, m, l, out, slot):  # noqa: E741
    del ctx
    place = _own_place(PtxMachine(), slot)
    for i, pair in enumerate(_pairs(m, l, out)):
        llvm.store(pair, mgpu.utils.getelementptr(place, [i * _STEP], ir.IntegerType.get_signless(8)))


def _emit_wait(ctx, mbarrier):
    del ctx
    machine = PtxMachine()
    ticks = machine.i32(10_000_000).value
    nvvm.mbarrier_try_wait_parity(mgpu.utils.memref_ptr(mbarrier), machine.i32(0).value, ticks)


def _emit_receive(ctx, slot):
    del ctx
    place = _own_place(PtxMachine(), slot)
    count = ir.MemRefType(slot.type).shape[0] * 4 // _STEP
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    byte = ir.IntegerType.get_signless(8)
    pairs = [llvm.load(pair, mgpu.utils.getelementptr(place, [i * _STEP], byte)) for i in range(count)]
    *out, m, l = pairs  # noqa: E741
    per_query = [fragmented_array([each], (QUERIES,), PER_QUERY) for each in (m, l)]
    return *per_query, fragmented_array(out, (32 * len(out), QUERIES), MERGED)
