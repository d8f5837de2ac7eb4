"""Split-K reduction of fp32 sums: over the warps of a CTA through shared memory, over the CTAs of a cluster by
`st_async` to rank 0. Each sum has a fixed order, so bits do not change from run to run.

The caller puts a CTA barrier between `store_warp` and `sum_warps`, and the wait for the mbarrier between `send` and
`sum_ctas`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS
from qerl_kernels.nvfp4_matmul.skinny.config import SharedLayout, SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.thread import Thread
from qerl_kernels.ptx.values import F32, I32, tree_sum


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Reduction of sums fp32 [tile_m, tile_n]; a thread reduces vectors of four features of one row.

    Attributes:
      config: the kernel's config.
      layout: layout of shared memory.
      thread: the thread's coordinates.
      shared: address of each array in shared memory.
    """

    config: SkinnyConfig
    layout: SharedLayout
    thread: Thread
    shared: dict[str, I32]

    @property
    def row_vectors(self) -> int:
        """Vectors of four features in a row."""
        return 4 * self.config.m16_tiles

    def store_warp(self, sums: list[list[list[F32]]]) -> None:
        """Writes this warp's sums, [m16 tile][n8 tile] of four, over its stages as [row][feature]. No copy into the
        stages may be in flight and no read of them pending."""
        thread, row_bytes = self.thread, self.layout.row_bytes
        at = thread.memory + (thread.q * (2 * row_bytes) + thread.g * 4)
        for tile, fours in enumerate(sums):
            for n8, four in enumerate(fours):
                for i, value in enumerate(four):  # feature g + 8 h, row 2 q + e
                    h, e = divmod(i, 2)
                    byte = (8 * n8 + e) * row_bytes + 4 * (MMA_ROWS * tile + 8 * h)
                    thread.machine.store_shared(at, [value], byte=byte)

    def row_and_vector(self, start: int) -> tuple[I32, I32]:
        """(row, vector in it) that this thread reduces in the round from vector `start` on."""
        number = self.thread.index + start
        return number // self.row_vectors, number % self.row_vectors

    def rounds(self) -> Iterator[tuple[int, I32, I32, I32, I32]]:
        """(first vector of the round, this thread's vector, whether it exists, its row, its place in the row)."""
        count = self.config.tile_m * self.row_vectors
        for start in range(0, count, 32 * self.config.warps):
            number = self.thread.index + start
            yield start, number, number < count, number // self.row_vectors, number % self.row_vectors

    def sum_warps(self) -> list[list[F32]]:
        """Each of this thread's vectors summed over the CTA's warps, eight at a time to save registers."""
        machine, totals = self.thread.machine, []
        for _, _, _, row, vector in self.rounds():
            at = machine.minimum(row, self.config.tile_m - 1) * self.layout.row_bytes + vector * 16
            at, sums = self.shared["warps_s"] + at, []
            for begin in range(0, self.config.warps, 8):
                warps = range(begin, min(begin + 8, self.config.warps))
                vectors = [machine.load_shared(at, 4, byte=self.layout.warp_bytes * warp) for warp in warps]
                sums.append([tree_sum(values) for values in zip(*vectors, strict=True)])
            totals.append([tree_sum(values) for values in zip(*sums, strict=True)])
        return totals

    def send(self, sums: list[list[F32]]) -> None:
        """Sends this CTA's vectors to rank 0."""
        thread, machine = self.thread, self.thread.machine
        for (_, number, exists, _, _), values in zip(self.rounds(), sums, strict=True):
            place = (thread.rank - 1) * self.layout.vectors + number
            at = self.shared["sums_from_cluster_s"] + place * 16
            machine.st_async(at, machine.i32(0), values, self.shared["arrived_s"], exists)

    def sum_ctas(self, sums: list[list[F32]]) -> Iterator[tuple[int, list[F32]]]:
        """(first vector of the round, this thread's vector summed over the cluster), on rank 0 after its wait."""
        machine, last = self.thread.machine, self.config.tile_m * self.row_vectors - 1
        for (start, number, *_), values in zip(self.rounds(), sums, strict=True):
            if self.config.cluster > 1:
                at = self.shared["sums_from_cluster_s"] + machine.minimum(number, last) * 16
                ranks = range(self.config.cluster - 1)
                others = [machine.load_shared(at, 4, byte=16 * self.layout.vectors * rank) for rank in ranks]
                values = [tree_sum(each) for each in zip(values, *others, strict=True)]
            yield start, values
