"""The exchange of sums between the CTAs of a cluster that share a tile: each sends the others the rows
that they finish.

A thread holds the same elements of a part in every CTA, so that sums travel as they lie in registers: a thread's four
values of each eight rows are 16 bytes, beside those of its neighbours. Each CTA begins with the one after it, so that
none is sent to by all others at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.ptx.arrays import SCALAR, f32_pair, fragmented_array
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import F32, I32, element

STEP = 128 * 16  # bytes of eight rows


def places(ctas: int, rows: int) -> tuple[int, ...]:
    """Shape in fp32 of what a warpgroup is sent: [senders, eights of rows, threads, values]."""
    return ctas - 1, rows // 8, 128, 4


def prepare(mbarrier: jax.Ref) -> None:
    """Prepares this warpgroup's mbarrier (8 bytes of shared memory), on which the bytes sent to it are counted."""

    def program(ctx, mbarrier) -> None:
        del ctx
        machine = PtxMachine(90)
        machine.mbarrier_init(machine.shared_address(mbarrier), machine.thread_index() % 128 == 0)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(program)(mbarrier)


def send(parts: Sequence[jax.Array], rank: jax.Array, sums_s: jax.Ref, mbarrier: jax.Ref) -> None:
    """Sends each other CTA of the cluster its part, [64, rows] in `Layout.WGMMA`, and its bytes to its mbarrier.

    Args:
      parts: the sums of each part; CTA i finishes part i.
      rank: cluster rank of this CTA.
      sums_s: this warpgroup's `places`, the same in each CTA.
      mbarrier: this warpgroup's.
    """
    ctas = sums_s.shape[0] + 1

    def program(ctx, rank, sums_s, mbarrier, *parts) -> None:
        del ctx
        machine = PtxMachine(90)
        to, barrier = machine.shared_address(sums_s), machine.shared_address(mbarrier)
        values, thread = [_values(part) for part in parts], machine.thread_index() % 128
        emit_send(machine, values, ctas, I32(rank.registers.item()), thread, to, barrier)

    types = (SCALAR, plgpu.RefType(), plgpu.RefType(), *(plgpu.Layout.WGMMA,) * len(parts))
    plgpu.inline_mgpu(arg_types=types)(program)(rank, sums_s, mbarrier, *parts)


def emit_send(
    machine: PtxMachine, parts: Sequence[list[F32]], ctas: int, rank: I32, thread: I32, to: I32, barrier: I32
) -> None:
    """The instructions of `send` for thread number `thread` of 128: its values of each part, to the places at `to`."""
    size = STEP * (max(map(len, parts)) // 4)
    for step in range(1, ctas):
        for part, values in enumerate(parts):
            with machine.when((rank + step) % ctas == part):
                at = to + (rank - (rank > part)) * size + thread * 16
                for i in range(0, len(values), 4):
                    machine.st_async(at, machine.i32(part), values[i : i + 4], barrier, byte=STEP * (i // 4))


def receive(own: jax.Array, sums_s: jax.Ref, mbarrier: jax.Ref, phase: jax.Array) -> jax.Array:
    """`own` [64, rows] in `Layout.WGMMA`, and the sums that all others send to this warpgroup's places, in their order,
    once they are there. `phase`: how often it was called before."""

    def program(ctx, own, sums_s, mbarrier, phase) -> mgpu.FragmentedArray:
        del ctx
        machine = PtxMachine(90)
        senders, eights, *_ = ir.MemRefType(sums_s.type).shape
        at, barrier = machine.shared_address(sums_s), machine.shared_address(mbarrier)
        thread, phase = machine.thread_index() % 128, I32(phase.registers.item())
        total = emit_receive(machine, _values(own), senders, STEP * eights, thread, at, barrier, phase)
        pairs = [f32_pair(*total[i : i + 2]) for i in range(0, len(total), 2)]
        return fragmented_array(pairs, own.shape, plgpu.Layout.WGMMA)

    result = plgpu.ShapeDtypeStruct(own.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    types = plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), SCALAR
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(program)(own, sums_s, mbarrier, phase)


def emit_receive(
    machine: PtxMachine, own: list[F32], senders: int, size: int, thread: I32, at: I32, barrier: I32, phase: I32
) -> list[F32]:
    """The instructions of `receive` for thread number `thread` of 128, from the places at `at` of `size` bytes each."""
    machine.mbarrier_expect(barrier, 4 * len(own) * senders)
    machine.mbarrier_wait(barrier, phase & 1)
    at, total = at + thread * 16, list(own)
    for sender in range(senders):
        for i in range(0, len(own), 4):
            came = machine.load_shared(at, 4, byte=sender * size + STEP * (i // 4))
            total[i : i + 4] = [a + b for a, b in zip(total[i : i + 4], came, strict=True)]
    return total


def _values(array: mgpu.FragmentedArray) -> list[F32]:
    """A thread's values, four for each eight rows of x."""
    assert array.shape[0] == TILE
    return [F32(element(pair, e)) for pair in array.registers.flat for e in range(2)]
