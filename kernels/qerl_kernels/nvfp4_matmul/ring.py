"""What a warp of the kernel for few tokens brings of its operands, and how it reads them: a ring of slots of its own.

A unit, 64 along the contraction, is in its slot of shared memory

    x        8 · octets token rows of 128 bytes; 16-byte chunk c of row r lies at c ^ (r % 8)
    A        (that shrinks) 64 rows of 16, 32 or 64 ranks, those of the block's adapter
    words    512 bytes for each 16 features, as `packing` has them: 16 bytes for each lane
    scales   64 bytes for each 16 features: 8 bytes for lanes 4 g ... 4 g + 3

all brought by `cp.async`, `depth` units ahead, one group of copies each (one is always ended, be it empty, so that
"all but the last depth - 1" is the present unit). Copies, not loads to registers: the depth costs no register, the loop
is not unrolled, and all operands are waited for together. With four or eight times 16 features what a warp reads of the
weight is one contiguous run.

x is read by `ldmatrix`, A as Aᵀ by `ldmatrix.trans`. The 16-byte chunks of a row of A are swizzled so that the eight
rows that one matrix takes lie in different banks: rows of 32, 64 and 128 bytes have their chunk c at c ^ (r / 4 % 2),
c ^ (r / 2 % 4) and c ^ (r % 8). Groups, waits and barriers are the caller's: see `few_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, both, div, less, mul, rem
from qerl_kernels.nvfp4_matmul.adapters import Adapters
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.sums import Place


class Ring:
    """The copies into a warp's slots and the reads from them, of one thread.

    Attributes:
      rank: of the block's adapter, where A has columns in a slot that are not its own; else None.
    """

    def __init__(self, place: Place, adapters: Adapters, words: ir.Value, scales: ir.Value, x: ir.Value):
        """`words`, `scales`, `x`: addresses of the operands; that of A the adapters have."""
        self.task, self.split, self.layout = adapters.task, adapters.split, adapters.layout
        self.place, self.words, self.scales, self.x = place, words, scales, x
        self.adapters, self.rank = adapters, None

    def _offsets(self) -> None:
        """Where in a slot this lane writes and reads."""
        row, chunk = div(self.place.lane, 8), rem(self.place.lane, 8)
        # rows 0-3 of an octet, 8 lanes each; the second copy has rows 4-7, whose chunks lie 64 bytes away
        self.to_x = add(mul(row, 128), mul(lanes.xor(chunk, row), 16))
        self.to_rest = mul(self.place.lane, 16)
        # lane 8 j + r gives row r and chunk j, then chunk j + 4
        self.from_x = add(mul(chunk, 128), mul(lanes.xor(row, chunk), 16))
        self.from_scales = mul(self.place.g, 8)
        self.x_exists = {}  # whether the token is there, for the copies of four rows where it may not be
        for i in range(2 * self.split.octets):
            if 4 * i < self.task.tokens < 4 * i + 4:
                self.x_exists[i] = less(add(row, 4 * i), self.task.tokens)
        if self.split.shrinks:
            self._offsets_of_a()

    def _offsets_of_a(self) -> None:
        """The same for A; `chunks` of 16 bytes make a row."""
        layout, chunks = self.layout, self.layout.columns // 8
        swizzled = lambda row, chunk: mul(lanes.xor(chunk, rem(div(row, 8 // chunks), chunks)), 16)  # noqa: E731
        row, self.a_chunk = div(self.place.lane, chunks), rem(self.place.lane, chunks)
        self.to_a = add(add(mul(row, 2 * layout.columns), swizzled(row, self.a_chunk)), layout.a_at)
        # lane 8 j + r gives row r of the matrix of chunk j % 2 and of the upper or lower eight of 16 rows
        matrix, row = div(self.place.lane, 8), rem(self.place.lane, 8)
        rows = add(mul(add(mul(div(matrix, 2), 8), row), 2 * layout.columns), layout.a_at)
        self.from_a = [add(rows, swizzled(row, add(rem(matrix, 2), 2 * i))) for i in range(layout.steps)]
        *_, rank, self.a_column = self.adapters.at(mul(self.place.first_row, MMA_ROWS))
        self.rank = rank if any(r < MMA_ROWS * layout.steps for r, _ in self.task.adapters) else None
        exact = all(r == layout.columns for r, _ in self.task.adapters)
        self.a = self.adapters.a_or_t
        self.a_exists = None if exact else less(mul(self.a_chunk, 8), rank)

    def sources(self, first: ir.Value) -> list[ir.Value]:
        """Addresses of what this lane copies of a warp's first unit: words, scales, x and, where it is needed, A. To be
        called before all else."""
        self._offsets()
        units, rows = self.task.units, self.split.rows
        tile, quarter = div(self.place.first_row, 4), rem(self.place.first_row, 4)
        unit = add(mul(tile, units), first)
        words = lanes.address(self.words, add(mul(unit, 2048), add(mul(quarter, 512), mul(self.place.lane, 16))))
        scales = add(mul(unit, 256), add(mul(quarter, 64), mul(self.place.lane, 16)))
        if rows == 8:  # lanes 16-31 have the second tile
            scales = add(scales, mul(div(self.place.lane, 16), (units - 1) * 256))
        x = add(mul(div(self.place.lane, 8), units * 128), add(mul(first, 128), mul(rem(self.place.lane, 8), 16)))
        at = [words, lanes.address(self.scales, scales), lanes.address(self.x, x)]
        if self.split.shrinks:
            row = add(mul(first, TILE), div(self.place.lane, self.layout.columns // 8))
            column = add(self.a_column, mul(self.a_chunk, 8))
            at.append(lanes.address(self.a, mul(add(mul(row, self.task.columns), column), 2)))
        return at

    def advanced(self, at: list[ir.Value]) -> list[ir.Value]:
        """The addresses one unit on."""
        steps = (2048, 256, 128, TILE * 2 * self.task.columns)
        return [lanes.address(a, lanes.const(step)) for a, step in zip(at, steps[: len(at)], strict=True)]

    def request(self, slot: ir.Value, at: list[ir.Value], flag: ir.Value) -> None:
        """Starts the copies of a unit where `flag` is 1."""
        words, scales, x, *a = at
        rows, units, words_at = self.split.rows, self.task.units, self.layout.words_at
        rest = add(slot, self.to_rest)
        of_tile = [(r // 4) * units * 2048 + r % 4 * 512 for r in range(rows)]
        lanes.copy(rest, words, [(words_at + 512 * r, there) for r, there in enumerate(of_tile)], flag)
        some = flag if rows == 8 else both(flag, less(self.place.lane, 4 * rows))
        lanes.copy(rest, scales, [(words_at + 512 * rows, 0)], some)
        low = add(slot, self.to_x)
        high = lanes.xor(low, 64)
        for i in range(math.ceil(self.task.tokens / 4)):  # a token that is not there spoils no other
            exists = both(flag, self.x_exists[i]) if i in self.x_exists else flag
            lanes.copy((low, high)[i % 2], x, [(512 * i, 4 * i * units * 128)], exists)
        if a:
            self._request_a(slot, *a, flag)

    def _request_a(self, slot: ir.Value, a: ir.Value, flag: ir.Value) -> None:
        """Starts the copies of a unit's rows of A; those of ranks that there are."""
        columns, width = self.layout.columns, self.task.columns
        low, rows = add(slot, self.to_a), 32 * 8 // columns  # rows that the lanes copy at a time
        places = [(r * 2 * columns, r * 2 * width) for r in range(0, TILE, rows)]
        exists = flag if self.a_exists is None else both(flag, self.a_exists)
        if columns == TILE:  # four rows of eight chunks: rows 4-7 have theirs 64 bytes away
            lanes.copy(low, a, places[::2], exists)
            lanes.copy(lanes.xor(low, 64), a, places[1::2], exists)
        else:
            lanes.copy(low, a, places, exists)

    def x_of(self, slot: ir.Value) -> list[list[ir.Value]]:
        """x of a unit from its slot: eight words an octet."""
        low = add(slot, self.from_x)
        high = lanes.xor(low, 64)
        return [
            lanes.read_matrices(low, 1024 * o) + lanes.read_matrices(high, 1024 * o) for o in range(self.split.octets)
        ]

    def weight_of(self, slot: ir.Value, row: int) -> tuple[list[ir.Value], list[ir.Value]]:
        """Four words and two words of scales of a row from a unit's slot."""
        words_at = self.layout.words_at
        scales_at = words_at + 512 * self.split.rows
        words = lanes.read_shared(add(slot, self.to_rest), 4, words_at + 512 * row)
        return words, lanes.read_shared(add(slot, self.from_scales), 2, scales_at + 64 * row)

    def a_of(self, slot: ir.Value, number: int) -> Iterator[list[ir.Value]]:
        """Aᵀ of 16 ranks from a unit's slot: the operand of each 16 of k."""
        at = add(slot, self.from_a[number])
        for step in range(TILE // 16):
            yield lanes.read_matrices(at, step * 16 * 2 * self.layout.columns, transposed=True)
