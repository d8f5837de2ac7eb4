"""The sum of `api.peer_sum` in one launch, on GPUs that reach each other's memory.

A device writes its values into the memory of each other one, and reads what has come into its own. They travel as
packets of 16 bytes: two words of values, each with the number of the call behind it. Whoever reads a packet until both
numbers are those of its call has the values: 8 bytes arrive at once, so that neither side needs a fence or a barrier
(the protocol "LL" of NCCL). A sum takes one way over NVLink.

Why no packet is overwritten before it is read: calls take the two sets of packets in turn. A device that writes for
call n + 2 has ended call n + 1, and so has packets that the others sent in theirs; these have then ended call n, which
read the same set. Why none is taken for another: a place holds packets of one set alone, their numbers only grow, and
memory begins with zeros, while the first call is number 1.

Why nothing hangs: each CTA first sends all its packets, then waits for those of the CTA of its index on each other
device, which does the same; a GPU holds all of them at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.peer_sum.api import THREADS, VALUES
from qerl_kernels.ptx import arithmetic
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32, Ptr


class Pointers(NamedTuple):
    """The kernel's arrays: this device's, and the packets of the devices behind it, in a ring."""

    x: Ptr
    packets: Ptr
    calls: Ptr
    out: Ptr
    peers: Sequence[Ptr]


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames="axis")
def peer_sum(x: jax.Array, packets: jax.Array, calls: jax.Array, axis: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.peer_sum`."""
    _, _, devices, room, _ = packets.shape
    ctas = calls.shape[1]

    def body(x, packets, calls, out):
        device = lax.axis_index(axis)
        peers = [plgpu.remote_ref(packets, lax.rem(device + i, devices)) for i in range(1, devices)]
        types = (plgpu.Layout.WG_SPLAT(()),) * 2 + (plgpu.RefType(),) * (4 + len(peers))

        def program(ctx, cta, device, *refs):
            del ctx
            machine = PtxMachine()
            cta, device = (I32(each.registers.item()) for each in (cta, device))
            own = [Ptr(mgpu.utils.memref_ptr(ref)) for ref in refs]
            emit(machine, cta, device, Pointers(*own[:4], own[4:]), size=x.size, room=room, ctas=ctas)

        plgpu.inline_mgpu(arg_types=types)(program)(lax.axis_index("cta"), device, x, packets, calls, out, *peers)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        kernel_name="peer_sum",
        # No barrier of XLA's over all devices in front of each call, which takes twice as long as the sum.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, skip_device_barrier=True),
    )
    packets, calls = jax.new_ref(packets), jax.new_ref(calls)
    out = call(x, packets, calls)
    return out, jax.freeze(packets), jax.freeze(calls)


def emit(machine: PtxMachine, cta: I32, device: I32, pointers: Pointers, *, size: int, room: int, ctas: int) -> None:
    """The instructions of one thread, which has packets `THREADS · ctas` apart.

    Args:
      machine: emits or runs the instructions.
      cta: index of the CTA.
      device: index of this device.
      pointers: the kernel's arrays.
      size: values of x.
      room: packets for which there is room, whatever the size: so that a place holds packets of one kind alone.
      ctas: CTAs, whatever the size: so that all count the same calls.
    """
    devices, count = 1 + len(pointers.peers), pl.cdiv(size, VALUES)
    counter = machine.mad_wide(pointers.calls, (cta, 4))
    call = machine.load_global(counter, 1, machine.i32(1))[0] + 1
    machine.cta_sync()  # all have read it
    machine.store_global(counter, [call], machine.thread_index() == 0)

    places = [cta * THREADS + machine.thread_index() + first for first in range(0, count, THREADS * ctas)]
    sets = (call & 1) * devices
    own = [machine.load_global(machine.mad_wide(pointers.x, (place, 8)), 2, place < count) for place in places]
    for place, words in zip(places, own, strict=True):
        for peer in pointers.peers:
            at = machine.mad_wide(peer, ((sets + device) * room + place, 16))
            machine.send_packet(at, words, call, place < count)
    for place, words in zip(places, own, strict=True):
        parts = []
        for sender in range(devices):
            at = machine.mad_wide(pointers.packets, ((sets + sender) * room + place, 16))
            came = machine.receive_packet(at, words, call, (device != sender) & (place < count))
            parts.append([arithmetic.bf16_to_f32(machine, word, high) for word in came for high in (False, True)])
        sums = [functools.reduce(operator.add, values) for values in zip(*parts, strict=True)]
        rounded = machine.asm("cvt.rn.bf16x2.f32 $0, $3, $2; cvt.rn.bf16x2.f32 $1, $5, $4;", "rr", *sums)
        machine.store_global(machine.mad_wide(pointers.out, (place, 8)), rounded, place < count)
