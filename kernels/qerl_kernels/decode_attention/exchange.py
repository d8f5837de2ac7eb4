"""How warps and blocks of a cluster meet: a barrier of four warps, and mail from block to block.

Mail is what each thread of the sender holds, written into shared memory of block 0 for the thread of the same number.
`st.async` counts its bytes on a barrier beside it, so that the sender needs no fence: with Mosaic's own
`async_store_smem` every thread of the sender arrives on the barrier with release semantics for the whole cluster, which
waits for all its memory traffic. Source: PTX ISA, "st.async", "mbarrier", "barrier.cluster".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from qerl_kernels.decode_attention.fragments import MERGED, QUERIES, array_of

_SCALAR = plgpu.Layout.WG_SPLAT(())
STAT = MERGED.reduce(0)
_STEP = 128 * 8  # bytes of one register pair of all threads


def mail_bytes(width: int) -> int:
    """Bytes of one part: output [H, 8], maximum and sum [8], the latter two once for every thread."""
    return (width // 32 + 2) * _STEP


def meet() -> None:
    """Waits for the four warps of the warpgroup; what they wrote to shared memory before can be read after."""
    plgpu.inline_mgpu()(lambda ctx: mgpu.utils.warpgroup_barrier())()


def release(empty: jax.Ref) -> None:
    """Arrives on the barrier of a slot that this thread has read, so that TMA may fill it anew.

    The fence orders the reads before the writes of the copy engine. Without it the arrival does not wait for an
    `ldmatrix` under way: about one pair in a thousand to ten thousand was torn.
    """
    _instruction("fence.proxy.async.shared::cta;")
    plgpu.barrier_arrive(empty)


def cluster_arrive() -> None:
    """Arrives on the cluster's barrier without ordering any memory but the set-up of `open_mail`."""
    _instruction("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait() -> None:
    """Waits until every thread of the cluster has arrived."""
    _instruction("barrier.cluster.wait.acquire.aligned;")


def open_mail(mail: jax.Ref, expected: jax.Array) -> None:
    """Sets up the barrier `mail` (8 bytes of shared memory) to complete once that many bytes have come; none if < 0."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))(_open_lane)(mail, expected)


def send(top: jax.Array, total: jax.Array, out: jax.Array, box: jax.Ref, mail: jax.Ref) -> None:
    """Writes a part to `box` of block 0 and counts its bytes on `mail` there."""
    types = (STAT, STAT, MERGED, plgpu.RefType(), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=types)(_send_lane)(top, total, out, box, mail)


def keep(top: jax.Array, total: jax.Array, out: jax.Array, box: jax.Ref) -> None:
    """Writes a part to a box of this block, for `receive`: each thread reads what it wrote itself."""
    plgpu.inline_mgpu(arg_types=(STAT, STAT, MERGED, plgpu.RefType()))(_keep_lane)(top, total, out, box)


def wait_for_mail(mail: jax.Ref) -> None:
    """Waits until all mail has come."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_wait_lane)(mail)


def receive(box: jax.Ref, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(maximum, sum, output) of a part from `box`."""
    stat = plgpu.ShapeDtypeStruct((QUERIES,), jnp.float32, layout=STAT)
    out = plgpu.ShapeDtypeStruct((width, QUERIES), jnp.float32, layout=MERGED)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(stat, stat, out))(_receive_lane)(box)


def _void(inputs: list[ir.Value], text: str, kinds: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), inputs, text, kinds, has_side_effects=True)


def _instruction(text: str) -> None:
    plgpu.inline_mgpu()(lambda ctx: _void([], text, ""))()


def _open_lane(ctx, mail, expected):
    del ctx
    expected = expected.registers.item()
    zero = mgpu.c(0, expected.type)
    wanted = arith.cmpi(arith.CmpIPredicate.sge, expected, zero)
    first = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
    with mgpu.utils.when(arith.andi(wanted, first)):
        barrier = mgpu.utils.memref_ptr(mail)
        nvvm.mbarrier_init(barrier, mgpu.c(1, expected.type))
        _void([], "fence.mbarrier_init.release.cluster;", "")
        _void([barrier, expected], "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "r,r")


def _of_thread(box: ir.Value) -> ir.Value:
    """Where this thread's pairs begin in a box."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.andi(mgpu.utils.thread_idx(), mgpu.c(127, i32))
    return mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(box), [arith.muli(thread, mgpu.c(8, i32))], ir.IntegerType.get_signless(8)
    )


def _send_lane(ctx, top, total, out, box, mail):
    del ctx
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    place, barrier = (
        mgpu.utils.get_cluster_ptr(pointer, mgpu.c(0, i32), generic=False)
        for pointer in (_of_thread(box), mgpu.utils.memref_ptr(mail))
    )
    for i, pair in enumerate(_pairs(top, total, out)):
        _void(
            [place, mgpu.utils.bitcast(pair, i64), barrier],
            f"st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [$0 + {i * _STEP}], $1, [$2];",
            "l,l,l",
        )


def _pairs(top, total, out) -> list[ir.Value]:
    return [*out.registers.flat, *top.registers.flat, *total.registers.flat]


def _keep_lane(ctx, top, total, out, box):
    del ctx
    place = _of_thread(box)
    for i, pair in enumerate(_pairs(top, total, out)):
        llvm.store(pair, mgpu.utils.getelementptr(place, [i * _STEP], ir.IntegerType.get_signless(8)))


def _wait_lane(ctx, mail):
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    nvvm.mbarrier_try_wait_parity(mgpu.utils.memref_ptr(mail), mgpu.c(0, i32), mgpu.c(10_000_000, i32))


def _receive_lane(ctx, box):
    del ctx
    place = _of_thread(box)
    count = ir.MemRefType(box.type).shape[0] * 4 // _STEP
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    pairs = [
        llvm.load(pair, mgpu.utils.getelementptr(place, [i * _STEP], ir.IntegerType.get_signless(8)))
        for i in range(count)
    ]
    *out, top, total = pairs
    stats = [array_of([stat], (QUERIES,), STAT) for stat in (top, total)]
    return *stats, array_of(out, (32 * len(out), QUERIES), MERGED)
