"""`x A` that comes as fp32 sums over parts of the features, added up by the warps of `mosaic_gpu`'s producer that have
nothing to copy: 1 to 3. The instructions of one thread.

A thread takes a few neighbouring columns of a token at a time, from all parts, and so on: it asks for all that one
addition needs before it waits. What it adds up is rounded to bf16 once and stored where `wgmma` reads it: in rows of
128 bytes, chunk c of 16 bytes of row r at c ^ (r % 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, div, less, mul, rem
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE

THREADS = 96
AT_ONCE = 8  # parts that a thread asks for before it adds them up; a power of two, so that the sum is that of all
OTHERS = 12  # registers for all else: addresses, numbers, what is made of the words


def reduce_partials(parts_g: jax.Ref, shrunk_s: jax.Ref, registers: int | None) -> None:
    """The sum of `parts_g`, f32 [parts, tokens, columns], in the order of `lanes.total`, into the first columns of
    `shrunk_s`, bf16 [tokens or more, 64], zeros in all else; visible to `wgmma` of whoever sees these warps arrive.

    To be called by warps 1 to 3 of a warpgroup whose threads have so many registers (None: enough).
    """
    shape, rows = parts_g.shape, shrunk_s.shape[0]

    def program(ctx, parts_g: ir.Value, shrunk_s: ir.Value) -> None:
        del ctx
        thread = add(rem(mgpu.utils.thread_idx(), 128), -32)
        emit(mgpu.utils.memref_ptr(parts_g), lanes.shared_base(shrunk_s), thread, shape, rows, registers)
        lanes.asm("fence.proxy.async.shared::cta;", effects=True)

    types = (plgpu.RefType(), plgpu.RefType(swizzled(TILE, 2)))
    plgpu.inline_mgpu(arg_types=types)(program)(parts_g, shrunk_s)


def emit(
    source: ir.Value, to: ir.Value, thread: ir.Value, shape: tuple[int, int, int], rows: int, registers: int | None
) -> None:
    """What a thread does of `add_up`: number `thread` of 96, from the array at `source` to the `rows` rows at `to`."""
    parts, tokens, columns = shape
    width = 4 if registers is None or 4 * min(parts, AT_ONCE) + OTHERS <= registers else 2
    here, rest = columns // width, (TILE - columns) // 4  # runs of a token: of sums, and of four zeros behind them

    def some(number: ir.Value) -> None:
        at, there = lanes.address(source, mul(number, 4 * width)), less(number, tokens * here)
        sums = _total(at, parts, 4 * tokens * columns, width, there)
        words = [lanes.to_bf16(*sums[i : i + 2]) for i in range(0, width, 2)]
        column = mul(rem(number, here), width)
        _store(to, div(number, here), column, words, less(number, rows * here))

    def nothing(number: ir.Value) -> None:
        column = add(mul(rem(number, rest), 4), columns)
        _store(to, div(number, rest), column, [lanes.const(0)] * 2, less(number, rows * rest))

    _each(thread, rows * here, some)
    if rest:
        _each(thread, rows * rest, nothing)


def _each(thread: ir.Value, count: int, body: Callable[[ir.Value], None]) -> None:
    """`body(number)` for all numbers below `count`, and some above, each by one thread."""

    def one_round(i: ir.Value, carry: list[ir.Value]) -> list[ir.Value]:
        del i
        body(carry[0])
        return [add(carry[0], THREADS)]

    lanes.repeat(lanes.const(math.ceil(count / THREADS)), [thread], one_round)


def _total(at: ir.Value, parts: int, size: int, width: int, there: ir.Value) -> list[ir.Value]:
    """The sum of `width` values over the parts, which lie `size` bytes apart; zeros where there are none."""
    totals = []
    for begin in range(0, parts, AT_ONCE):
        some = range(begin, min(begin + AT_ONCE, parts))
        loaded = [lanes.load(at, width, there, byte=part * size) for part in some]
        totals.append([lanes.total(list(map(lanes.as_float, words))) for words in zip(*loaded, strict=True)])
    return [lanes.total(values) for values in zip(*totals, strict=True)]


def _store(to: ir.Value, token: ir.Value, column: ir.Value, words: list[ir.Value], exists: ir.Value) -> None:
    """Two columns a word from `column` on, in the row of a token."""
    chunk = lanes.xor(div(column, 8), rem(token, 8))
    place = add(add(mul(token, 2 * TILE), mul(chunk, 16)), mul(rem(column, 8), 2))
    lanes.store_shared(add(to, place), [lanes.as_float(word) for word in words], exists)
