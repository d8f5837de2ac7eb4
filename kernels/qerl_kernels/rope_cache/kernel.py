"""Rotary embedding and cache write for Hopper: see `rope.rope_and_cache` for what it computes.

All of it is latency: a thread loads four pairs (i, i + H/2) of a head, their cosines and sines and its row's slot, all
at once, rotates, and stores. Products and their sum are rounded one by one, as XLA has it, so that the bits are those
of the reference.

The caches are references: the call writes into the buffers that it is given, and XLA copies one only where somebody
reads later what it held before. No two threads write the same bytes, none reads what another one writes, none waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, asm, both, div, less, mul, rem

THREADS = 128  # of a block: a warpgroup, Mosaic's smallest
PAIRS = 4  # of a thread


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@jax.jit
def rope_and_cache(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `rope.rope_and_cache`, with cosines and sines of the angles, f32 [B, H/2]."""
    cache = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    rows, kv_heads, _, width = cache.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    of_row = (heads + 2 * kv_heads) * width // (2 * PAIRS)  # threads

    def body(*refs):
        index = lax.axis_index("row"), lax.axis_index("block")
        types = (plgpu.Layout.WG_SPLAT(()),) * 2 + (plgpu.RefType(),) * len(refs)

        def program(ctx, row, block, *refs):
            del ctx
            thread = add(mul(block.registers.item(), THREADS), mgpu.utils.thread_idx())
            _emit(heads, cache, row.registers.item(), thread, *(mgpu.utils.memref_ptr(ref) for ref in refs))

        plgpu.inline_mgpu(arg_types=types)(program)(*index, *refs)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, width), qkv.dtype),
        grid=(rows, pl.cdiv(of_row, THREADS)),
        grid_names=("row", "block"),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        kernel_name="rope_and_cache",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    key_ref, value_ref = jax.new_ref(keys), jax.new_ref(values)
    q = call(qkv, cos, sin, slots, key_ref, value_ref)
    return q, jax.freeze(key_ref), jax.freeze(value_ref)


def _emit(
    heads: int, cache: jax.ShapeDtypeStruct, row: ir.Value, thread: ir.Value,
    qkv: ir.Value, cos: ir.Value, sin: ir.Value, slots: ir.Value, keys: ir.Value, values: ir.Value, q: ir.Value,
) -> None:  # fmt: skip
    """The instructions of one thread, which has pairs `pair` to `pair + 3` of a head of q, k or v."""
    _, kv_heads, size, width = cache.shape
    half, all_heads = width // 2, heads + 2 * kv_heads
    head, pair = div(thread, half // PAIRS), mul(rem(thread, half // PAIRS), PAIRS)
    exists, is_query, is_value = less(head, all_heads), less(head, heads), less(heads + kv_heads - 1, head)

    [slot] = lanes.load(_address(slots, row, 4), 1, exists)
    source = _address(qkv, add(mul(row, all_heads), head), 2 * width, pair, 2)
    first, second = (lanes.load(source, 2, exists, byte) for byte in (0, 2 * half))
    cosines, sines = (lanes.load(_address(table, row, 4 * half, pair, 4), 4, exists) for table in (cos, sin))
    for i in range(2):
        turned = _rotated(first[i], second[i], cosines[2 * i : 2 * i + 2], sines[2 * i : 2 * i + 2])
        first[i], second[i] = lanes.either(is_value, first[i], turned[0]), lanes.either(is_value, second[i], turned[1])

    target = _address(q, add(mul(row, heads), head), 2 * width, pair, 2)
    lanes.store(target, first, is_query)
    lanes.store(target, second, is_query, 2 * half)

    kv_head = add(add(head, -heads), mul(is_value, -kv_heads))
    place = add(mul(add(mul(row, kv_heads), kv_head), size), slot)
    element = cache.dtype.itemsize
    target = _address(lanes.either(is_value, values, keys), place, element * width, pair, element)
    is_cached = both(both(less(-1, slot), less(slot, size)), both(exists, less(heads - 1, head)))
    if element == 1:
        first, second = [_e4m3(*first)], [_e4m3(*second)]
    lanes.store(target, first, is_cached)
    lanes.store(target, second, is_cached, element * half)


def _address(base: ir.Value, index: ir.Value, stride: int, more: ir.Value | None = None, size: int = 0) -> ir.Value:
    """base + index · stride + more · size, in 64 bits: a cache may be larger than 4 GiB."""
    text = f"mad.wide.u32 $0, $2, {stride}, $1;" + (f" mad.wide.u32 $0, $3, {size}, $0;" if size else "")
    return asm(text, "l", ("l", base), ("r", index), *([("r", more)] if size else []))[0]


def _rotated(
    first: ir.Value, second: ir.Value, cosines: Sequence[ir.Value], sines: Sequence[ir.Value]
) -> list[ir.Value]:
    """Two pairs: first · cos − second · sin and second · cos + first · sin in fp32, rounded to words of bf16."""
    text = lanes.unpacked("$2", "a") + lanes.unpacked("$3", "b") + ".reg .f32 c, s, x, y, u0, u1, v0, v1;\n"
    for i in range(2):
        text += (
            f"mov.b32 c, ${4 + i}; mov.b32 s, ${6 + i}; mul.rn.f32 x, a{i}, c; mul.rn.f32 y, b{i}, s;"
            f" sub.rn.f32 u{i}, x, y; mul.rn.f32 x, b{i}, c; mul.rn.f32 y, a{i}, s; add.rn.f32 v{i}, x, y;\n"
        )
    text += "cvt.rn.bf16x2.f32 $0, u1, u0; cvt.rn.bf16x2.f32 $1, v1, v0;"
    return asm(text, "rr", *(("r", word) for word in (first, second, *cosines, *sines)))


def _e4m3(low: ir.Value, high: ir.Value) -> ir.Value:
    """The four bf16 of two words as a word of e4m3; what is larger than 448 becomes that, NaN stays NaN."""
    text = lanes.unpacked("$1", "a") + lanes.unpacked("$2", "b") + ".reg .b16 l, h;"
    text += "cvt.rn.satfinite.e4m3x2.f32 l, a1, a0; cvt.rn.satfinite.e4m3x2.f32 h, b1, b0; mov.b32 $0, {l, h};"
    return asm(text, "r", ("r", low), ("r", high))[0]
