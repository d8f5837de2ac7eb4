"""Rotary embedding and cache write, on any GPU from sm_80 on: see `api.rope_and_cache` for the equation.

The kernel is bound by latency: a thread loads four pairs (i, i + H/2) of a head, their cosines and sines and the slot
of its sequence, all at once, rotates, and stores. Products and their sum are rounded one by one, as in XLA, so that the
bits are those of the reference.

The caches are references: the call writes into the buffers that it is given, and XLA copies one only where its old
content is read later. No two threads write the same bytes, none reads bytes that another writes, none waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.ptx import arithmetic
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32, Ptr

THREADS = 128  # threads of a CTA: a warpgroup, Mosaic's smallest
PAIRS = 4  # rotated pairs of a thread


class Pointers(NamedTuple):
    """The kernel's arrays: inputs, caches, output."""

    qkv: Ptr
    cos: Ptr
    sin: Ptr
    slots: Ptr
    keys: Ptr
    values: Ptr
    q: Ptr


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@jax.jit
def rope_and_cache(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.rope_and_cache`, with cosines and sines of the angles, f32 [B, H/2]."""
    cache = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    rows, kv_heads, _, width = cache.shape
    heads = qkv.shape[1] // width - 2 * kv_heads

    def body(*refs):
        index = lax.axis_index("row"), lax.axis_index("block")
        types = (plgpu.Layout.WG_SPLAT(()),) * 2 + (plgpu.RefType(),) * len(refs)

        def program(ctx, row, cta, *refs):
            del ctx
            machine = PtxMachine()
            thread = I32(cta.registers.item()) * THREADS + machine.thread_index()
            pointers = Pointers(*(Ptr(mgpu.utils.memref_ptr(ref)) for ref in refs))
            emit(machine, I32(row.registers.item()), thread, pointers, heads=heads, cache=cache)

        plgpu.inline_mgpu(arg_types=types)(program)(*index, *refs)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, width), qkv.dtype),
        grid=(rows, pl.cdiv(threads_of_row(heads, cache), THREADS)),
        grid_names=("row", "block"),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        kernel_name="rope_and_cache",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    key_ref, value_ref = jax.new_ref(keys), jax.new_ref(values)
    q = call(qkv, cos, sin, slots, key_ref, value_ref)
    return q, jax.freeze(key_ref), jax.freeze(value_ref)


def threads_of_row(heads: int, cache: jax.ShapeDtypeStruct) -> int:
    """Threads that have pairs of a sequence's token."""
    _, kv_heads, _, width = cache.shape
    return (heads + 2 * kv_heads) * width // (2 * PAIRS)


def emit(
    machine: PtxMachine, row: I32, thread: I32, pointers: Pointers, *, heads: int, cache: jax.ShapeDtypeStruct
) -> None:
    """The instructions of one thread, which has pairs `pair` to `pair + 3` of a head of q, k or v.

    Args:
      machine: emits or runs the instructions.
      row: index of the sequence.
      thread: index among the sequence's threads.
      pointers: the kernel's arrays.
      heads: query heads.
      cache: shape and dtype of each cache, [B, K, S, H].
    """
    _, kv_heads, size, width = cache.shape
    half, all_heads = width // 2, heads + 2 * kv_heads
    head, pair = thread // (half // PAIRS), thread % (half // PAIRS) * PAIRS
    exists, is_query, is_value = head < all_heads, head < heads, head > heads + kv_heads - 1

    [slot] = machine.load_global(machine.mad_wide(pointers.slots, (row, 4)), 1, exists)
    source = machine.mad_wide(pointers.qkv, (row * all_heads + head, 2 * width), (pair, 2))
    first, second = (machine.load_global(source, 2, exists, byte) for byte in (0, 2 * half))
    cos, sin = (
        machine.load_global(machine.mad_wide(table, (row, 4 * half), (pair, 4)), 4, exists)
        for table in (pointers.cos, pointers.sin)
    )
    for i in range(2):
        rotated = _rotate(machine, first[i], second[i], cos[2 * i : 2 * i + 2], sin[2 * i : 2 * i + 2])
        first[i] = machine.select(is_value, first[i], rotated[0])
        second[i] = machine.select(is_value, second[i], rotated[1])

    target = machine.mad_wide(pointers.q, (row * heads + head, 2 * width), (pair, 2))
    machine.store_global(target, first, is_query)
    machine.store_global(target, second, is_query, 2 * half)

    kv_head = head - heads + is_value * -kv_heads
    place = (row * kv_heads + kv_head) * size + slot
    base = machine.select(is_value, pointers.values, pointers.keys)
    target = machine.mad_wide(base, (place, 2 * width), (pair, 2))
    is_cached = ((slot > -1) & (slot < size)) & (exists & (head > heads - 1))
    machine.store_global(target, first, is_cached)
    machine.store_global(target, second, is_cached, 2 * half)


def _rotate(machine: PtxMachine, first: I32, second: I32, cos: Sequence[I32], sin: Sequence[I32]) -> list[I32]:
    """Two pairs: first · cos − second · sin and second · cos + first · sin in fp32, rounded to words of bf16."""
    text = arithmetic.unpack("$2", "a") + arithmetic.unpack("$3", "b") + ".reg .f32 c, s, x, y, u0, u1, v0, v1;\n"
    for i in range(2):
        text += (
            f"mov.b32 c, ${4 + i}; mov.b32 s, ${6 + i}; mul.rn.f32 x, a{i}, c; mul.rn.f32 y, b{i}, s;"
            f" sub.rn.f32 u{i}, x, y; mul.rn.f32 x, b{i}, c; mul.rn.f32 y, a{i}, s; add.rn.f32 v{i}, x, y;\n"
        )
    text += "cvt.rn.bf16x2.f32 $0, u1, u0; cvt.rn.bf16x2.f32 $1, v1, v0;"
    return machine.asm(text, "rr", first, second, *cos, *sin)
