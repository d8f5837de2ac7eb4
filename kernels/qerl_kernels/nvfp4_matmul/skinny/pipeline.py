"""The pipeline of a warp of the skinny GEMM: stages of its own in shared memory, filled by `cp_async`.

A stage holds one k-tile, 64 input features:

    x        tile_m rows of 128 bytes; 16-byte chunk c of row r lies at c ^ (r % 8)
    A        (where the kernel computes x A) 64 rows of 16, 32 or 64 ranks of the CTA's adapter
    words    512 bytes for each m16 tile, as `packing` has them: 16 bytes for each lane
    scales   64 bytes for each m16 tile: 8 bytes for lanes 4 g ... 4 g + 3

The copies of a stage are one group. A group is committed for every k-tile, be it empty, so that "all but the last
stages - 1" is the present k-tile. Copies, not loads to registers: more stages cost no register, the loop is not
unrolled, and one wait covers all operands. With four or eight m16 tiles the weight that a warp reads is one contiguous
run.

x is read by `ldmatrix`, A as Aᵀ by `ldmatrix.trans`. The 16-byte chunks of a row of A are swizzled, so that the eight
rows of a matrix lie in different banks: rows of 32, 64 and 128 bytes have their chunk c at c ^ (r / 4 % 2),
c ^ (r / 2 % 4) and c ^ (r % 8). Commits, waits and barriers are the mainloop's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.skinny.config import (
    SCALES_M16_BYTES,
    SCALES_TILE_BYTES,
    WORDS_M16_BYTES,
    WORDS_TILE_BYTES,
    X_ROW_BYTES,
)
from qerl_kernels.nvfp4_matmul.skinny.lora import LoraTerm
from qerl_kernels.ptx.values import I32, Ptr


class Pipeline:
    """One thread's copies into its warp's stages and its reads from them.

    Attributes:
      rank: LoRA rank of the CTA's adapter where a stage has columns of A beyond it, else None.
    """

    def __init__(self, lora: LoraTerm, words: Ptr, scales: Ptr, x: Ptr):
        """Args: `words`, `scales`, `x`: addresses of the operands; the LoRA term has that of A."""
        self.problem, self.config, self.layout, self.thread = lora.problem, lora.config, lora.layout, lora.thread
        self.machine = lora.thread.machine
        self.words, self.scales, self.x = words, scales, x
        self.lora, self.rank = lora, None

    @property
    def most_rows(self) -> int:
        """Rows of the largest block."""
        return min(self.problem.m, self.config.tile_m)

    def begin(self, first: I32) -> list[Ptr]:
        """This lane's source addresses in a warp's first k-tile: words, scales, x and, where needed, A.

        Comes before all other methods: it emits the lane's offsets.
        """
        self._offsets()
        k_tiles, lane = self.problem.k_tiles, self.thread.lane
        tile, quarter = self.thread.first_tile // 4, self.thread.first_tile % 4
        k_tile = tile * k_tiles + first
        words = self.words + (k_tile * WORDS_TILE_BYTES + (quarter * WORDS_M16_BYTES + lane * 16))
        scales = k_tile * SCALES_TILE_BYTES + (quarter * SCALES_M16_BYTES + lane * 16)
        if self.config.m16_tiles == 8:  # lanes 16-31 have the second 64 features
            scales = scales + (lane // 16) * ((k_tiles - 1) * SCALES_TILE_BYTES)
        row = self.thread.block * self.config.tile_m + lane // 8
        x = row * (k_tiles * X_ROW_BYTES) + (first * X_ROW_BYTES + (lane % 8) * 16)
        at = [words, self.scales + scales, self.x + x]
        if self.config.computes_lora_x:
            row = first * TILE + lane // (self.layout.a_columns // 8)
            column = self.a_column + self.a_chunk * 8
            at.append(self.lora.lora_x + (row * self.problem.lora_columns + column) * 2)
        return at

    def advance(self, at: list[Ptr]) -> list[Ptr]:
        """The source addresses one k-tile on."""
        strides = (WORDS_TILE_BYTES, SCALES_TILE_BYTES, X_ROW_BYTES, TILE * 2 * self.problem.lora_columns)
        return [address + stride for address, stride in zip(at, strides[: len(at)], strict=True)]

    def fetch(self, stage: I32, at: list[Ptr], flag: I32) -> None:
        """Starts the copies of a k-tile to a stage where the flag is 1."""
        words, scales, x, *a = at
        tiles, k_tiles, words_at = self.config.m16_tiles, self.problem.k_tiles, self.layout.words_at
        linear = stage + self.to_linear
        sources = [tile // 4 * k_tiles * WORDS_TILE_BYTES + tile % 4 * WORDS_M16_BYTES for tile in range(tiles)]
        copies = [(words_at + WORDS_M16_BYTES * tile, source) for tile, source in enumerate(sources)]
        self.machine.cp_async(linear, words, copies, flag)
        has_scales = flag if tiles == 8 else flag & (self.thread.lane < 4 * tiles)
        self.machine.cp_async(linear, scales, [(words_at + WORDS_M16_BYTES * tiles, 0)], has_scales)
        low = stage + self.to_x
        high = low ^ 64
        for i in range(math.ceil(self.most_rows / 4)):  # garbage in a missing row of x spoils no other row
            exists = flag & self.x_exists[i] if i in self.x_exists else flag
            self.machine.cp_async((low, high)[i % 2], x, [(4 * i * X_ROW_BYTES, 4 * i * k_tiles * X_ROW_BYTES)], exists)
        if a:
            self._fetch_a(stage, *a, flag)

    def x_fragments(self, stage: I32) -> list[list[I32]]:
        """x of a k-tile: eight words for each n8 tile."""
        low = stage + self.from_x
        high = low ^ 64
        load = self.machine.ldmatrix
        bytes_ = [8 * X_ROW_BYTES * n8 for n8 in range(self.config.n8_tiles)]
        return [load(low, byte) + load(high, byte) for byte in bytes_]

    def weight(self, stage: I32, tile: int) -> tuple[list[I32], list[I32]]:
        """Four words of codes and two words of scales of an m16 tile."""
        words_at = self.layout.words_at
        scales_at = words_at + WORDS_M16_BYTES * self.config.m16_tiles
        words = self.machine.load_shared_words(stage + self.to_linear, 4, words_at + WORDS_M16_BYTES * tile)
        return words, self.machine.load_shared_words(stage + self.from_scales, 2, scales_at + SCALES_M16_BYTES * tile)

    def lora_a_fragments(self, stage: I32, rank_tile: int) -> Iterator[list[I32]]:
        """A fragments of Aᵀ, 16 ranks: one for each k16 step."""
        at = stage + self.from_a[rank_tile]
        for k16_step in range(TILE // 16):
            yield self.machine.ldmatrix(at, k16_step * 16 * 2 * self.layout.a_columns, transposed=True)

    def _offsets(self) -> None:
        """Offsets in a stage at which this lane writes and reads."""
        lane = self.thread.lane
        row, chunk = lane // 8, lane % 8
        # Rows 0-3 of an n8 tile, 8 lanes each; the second copy has rows 4-7, whose chunks lie 64 bytes away.
        self.to_x = row * X_ROW_BYTES + (chunk ^ row) * 16
        self.to_linear = lane * 16
        # Lane 8 j + r gives row r and chunk j, then chunk j + 4.
        self.from_x = chunk * X_ROW_BYTES + (row ^ chunk) * 16
        self.from_scales = self.thread.g * 8
        self.x_exists = {}  # flags of the copies of four rows that reach past the last row, in some block
        fewest = self.problem.m - (self.config.blocks(self.problem.m) - 1) * self.config.tile_m
        for i in range(math.ceil(self.most_rows / 4)):
            if fewest < 4 * i + 4:
                self.x_exists[i] = row + 4 * i < self.thread.rows
        if self.config.computes_lora_x:
            self._a_offsets()

    def _a_offsets(self) -> None:
        """The same for A; `chunks` of 16 bytes make a row."""
        layout, lane, chunks = self.layout, self.thread.lane, self.layout.a_columns // 8
        swizzle = lambda row, chunk: (chunk ^ row // (8 // chunks) % chunks) * 16  # noqa: E731
        row, self.a_chunk = lane // chunks, lane % chunks
        self.to_a = (row * (2 * layout.a_columns) + swizzle(row, self.a_chunk)) + layout.a_at
        # Lane 8 j + r gives row r of the matrix of chunk j % 2 and of the upper or lower eight of 16 rows.
        matrix, row = lane // 8, lane % 8
        rows = ((matrix // 2) * 8 + row) * (2 * layout.a_columns) + layout.a_at
        self.from_a = [rows + swizzle(row, matrix % 2 + 2 * i) for i in range(layout.rank_tiles)]
        *_, rank, self.a_column = self.lora.adapter_at(self.thread.first_tile * MMA_ROWS)
        ranks = [rank for rank, _ in self.problem.adapters]
        self.rank = rank if any(each < MMA_ROWS * layout.rank_tiles for each in ranks) else None
        is_exact = all(each == layout.a_columns for each in ranks)
        self.a_exists = None if is_exact else self.a_chunk * 8 < rank

    def _fetch_a(self, stage: I32, a: Ptr, flag: I32) -> None:
        """Starts the copies of a k-tile's rows of A, as far as the adapter has ranks."""
        columns, width = self.layout.a_columns, self.problem.lora_columns
        low, rows = stage + self.to_a, 32 * 8 // columns  # rows that the lanes copy at a time
        places = [(row * 2 * columns, row * 2 * width) for row in range(0, TILE, rows)]
        exists = flag if self.a_exists is None else flag & self.a_exists
        if columns == TILE:  # four rows of eight chunks: rows 4-7 have theirs 64 bytes away
            self.machine.cp_async(low, a, places[::2], exists)
            self.machine.cp_async(low ^ 64, a, places[1::2], exists)
        else:
            self.machine.cp_async(low, a, places, exists)
