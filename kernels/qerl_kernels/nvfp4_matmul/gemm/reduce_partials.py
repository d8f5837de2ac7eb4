"""The reduction of split-K partials of `x A` by the warps of the producer that copy nothing: 1 to 3. The instructions
of one thread.

A thread takes a few neighbouring columns of a row at a time, from all partials: it starts all loads of one addition
before it waits. The sum is rounded to bf16 once and stored where `wgmma` reads it: in rows of 128 bytes, chunk c of 16
bytes of row r at c ^ (r % 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.ptx import arithmetic
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import F32, I32, Flag, Ptr, tree_sum

THREADS = 96
IN_FLIGHT = 8  # partials that a thread loads before it adds them; a power of two, so that the tree is that of all
OTHER_REGISTERS = 12  # registers of a thread beside its loads: addresses, indices, results


def reduce_partials(partials_g: jax.Ref, lora_x_s: jax.Ref, registers: int | None) -> None:
    """The sum of `partials_g`, f32 [partials, m, columns], in the order of `tree_sum`, into the first columns of
    `lora_x_s`, bf16 [tile_m, 64], zeros elsewhere; visible to the `wgmma` of any thread that sees these warps arrive.

    To be called by warps 1 to 3 of a warpgroup whose threads have so many registers (None: enough).
    """
    shape, rows = partials_g.shape, lora_x_s.shape[0]

    def program(ctx, partials_g: ir.Value, lora_x_s: ir.Value) -> None:
        del ctx
        machine = PtxMachine(90)
        thread = machine.thread_index() % 128 - 32
        source = Ptr(mgpu.utils.memref_ptr(partials_g))
        emit(machine, source, machine.shared_address(lora_x_s), thread, shape, rows, registers)
        machine.fence_proxy_async()

    types = (plgpu.RefType(), plgpu.RefType(swizzled(TILE, 2)))
    plgpu.inline_mgpu(arg_types=types)(program)(partials_g, lora_x_s)


def emit(
    machine: PtxMachine,
    source: Ptr,
    to: I32,
    thread: I32,
    shape: tuple[int, int, int],
    rows: int,
    registers: int | None,
) -> None:
    """The instructions of `reduce_partials` for thread number `thread` of 96, from the array at `source` to the `rows`
    rows at `to`."""
    partials, m, columns = shape
    width = 4 if registers is None or 4 * min(partials, IN_FLIGHT) + OTHER_REGISTERS <= registers else 2
    sum_runs, zero_runs = columns // width, (TILE - columns) // 4  # runs of a row: of sums, and of four zeros

    def store_sums(run: I32) -> None:
        at, exists = source + run * (4 * width), run < m * sum_runs
        sums = _total(machine, at, partials, 4 * m * columns, width, exists)
        words = [arithmetic.pack_bf16(machine, *sums[i : i + 2]) for i in range(0, width, 2)]
        column = run % sum_runs * width
        _store(machine, to, run // sum_runs, column, words, run < rows * sum_runs)

    def store_zeros(run: I32) -> None:
        column = run % zero_runs * 4 + columns
        _store(machine, to, run // zero_runs, column, [machine.i32(0)] * 2, run < rows * zero_runs)

    _for_each(machine, thread, rows * sum_runs, store_sums)
    if zero_runs:
        _for_each(machine, thread, rows * zero_runs, store_zeros)


def _for_each(machine: PtxMachine, thread: I32, count: int, body: Callable[[I32], None]) -> None:
    """`body(run)` for all runs below `count`, and some above, each by one thread."""

    def one_round(i: I32, carry: list[I32]) -> list[I32]:
        del i
        body(carry[0])
        return [carry[0] + THREADS]

    machine.fori(machine.i32(math.ceil(count / THREADS)), [thread], one_round)


def _total(machine: PtxMachine, at: Ptr, partials: int, size: int, width: int, exists: Flag) -> list[F32]:
    """The sum of `width` values over the partials, which lie `size` bytes apart; zeros where there are none."""
    totals = []
    for begin in range(0, partials, IN_FLIGHT):
        batch = range(begin, min(begin + IN_FLIGHT, partials))
        loaded = [machine.load_global(at, width, exists, byte=i * size) for i in batch]
        columns = zip(*loaded, strict=True)
        totals.append([tree_sum([arithmetic.as_float(machine, word) for word in column]) for column in columns])
    return [tree_sum(values) for values in zip(*totals, strict=True)]


def _store(machine: PtxMachine, to: I32, row: I32, column: I32, words: list[I32], exists: Flag) -> None:
    """Two columns a word from `column` on."""
    chunk = (column // 8) ^ (row % 8)
    place = row * (2 * TILE) + chunk * 16 + column % 8 * 2
    machine.store_shared(to + place, [arithmetic.as_float(machine, word) for word in words], exists)
