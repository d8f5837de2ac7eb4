"""fp32 sums of which every warp of a cluster has a part: left in shared memory, added up over the warps of a block,
sent to the first block, added up there over the blocks. Orders are fixed, so bits do not change from run to run.

Between `leave` and `over_warps` stands a barrier of the block, between `send` and `over_blocks` the wait for what was
sent; both are the caller's. The instructions of one thread, as all of `few_tokens`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, div, less, mul, rem
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS
from qerl_kernels.nvfp4_matmul.split import Layout, Split


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
      part: its block in the cluster.
      is_first: whether that is the first.
      first_row: of the cluster's features, in operands of 16.
      thread: in the block.
      warp: in the block.
      lane: in the warp.
      g: lane / 4.
      q: lane % 4.
      memory: where its warp's own part of the ring begins.
    """

    part: ir.Value
    is_first: ir.Value
    first_row: ir.Value
    thread: ir.Value
    warp: ir.Value
    lane: ir.Value
    g: ir.Value
    q: ir.Value
    memory: ir.Value


@dataclasses.dataclass(frozen=True)
class Sums:
    """fp32 [tokens][features].

    Attributes:
      split: of the kernel.
      layout: of the block's shared memory.
      place: of the thread.
      shared: where each array of shared memory begins.
    """

    split: Split
    layout: Layout
    place: Place
    shared: dict[str, ir.Value]

    @property
    def groups(self) -> int:
        """Of four features."""
        return 4 * self.split.rows

    def leave(self, sums: list[list[list[ir.Value]]]) -> None:
        """This warp's sums over its slots, [token][feature], after the last copy and the last read of them."""
        row_bytes = self.layout.row_bytes
        at = add(self.place.memory, add(mul(self.place.q, 2 * row_bytes), mul(self.place.g, 4)))
        for r, row in enumerate(sums):
            for o, four in enumerate(row):
                for i, value in enumerate(four):  # feature g + 8 h, token 2 q + e
                    h, e = divmod(i, 2)
                    byte = (8 * o + e) * row_bytes + 4 * (MMA_ROWS * r + 8 * h)
                    lanes.store_shared(at, [value], byte=byte)

    def item(self, start: int) -> tuple[ir.Value, ir.Value]:
        """(token, group) of the four that this thread adds up, of those from `start` on."""
        index = add(self.place.thread, start)
        return div(index, self.groups), rem(index, self.groups)

    def items(self) -> Iterator[tuple[int, ir.Value, ir.Value, ir.Value, ir.Value]]:
        """Which fours this thread adds up: (first of all threads', number, whether there is one, token, group)."""
        count = self.split.tokens * self.groups
        for start in range(0, count, 32 * self.split.warps):
            number = add(self.place.thread, start)
            yield start, number, less(number, count), div(number, self.groups), rem(number, self.groups)

    def over_warps(self) -> list[list[ir.Value]]:
        """Each of this thread's fours, of all warps of the block; eight warps at a time, because more would take too
        many registers."""
        found = []
        for _, _, _, token, group in self.items():
            at = add(mul(lanes.smaller(token, self.split.tokens - 1), self.layout.row_bytes), mul(group, 16))
            at, sums = add(self.shared["ring_s"], at), []
            for begin in range(0, self.split.warps, 8):
                some = range(begin, min(begin + 8, self.split.warps))
                fours = [lanes.load_shared(at, 4, byte=self.layout.warp_bytes * w) for w in some]
                sums.append([lanes.total(values) for values in zip(*fours, strict=True)])
            found.append([lanes.total(values) for values in zip(*sums, strict=True)])
        return found

    def send(self, wholes: list[list[ir.Value]]) -> None:
        """To the first block of the cluster."""
        for (_, number, exists, _, _), whole in zip(self.items(), wholes, strict=True):
            place = add(mul(add(self.place.part, -1), self.layout.items), number)
            at = add(self.shared["box_s"], mul(place, 16))
            lanes.send(at, lanes.const(0), whole, self.shared["arrived_s"], exists)

    def over_blocks(self, wholes: list[list[ir.Value]]) -> Iterator[tuple[int, list[ir.Value]]]:
        """(first of all threads', this thread's four of all blocks), in the first one and after it has waited."""
        last = self.split.tokens * self.groups - 1
        for (start, number, *_), whole in zip(self.items(), wholes, strict=True):
            if self.split.cluster > 1:
                at = add(self.shared["box_s"], mul(lanes.smaller(number, last), 16))
                blocks = range(self.split.cluster - 1)
                others = [lanes.load_shared(at, 4, byte=16 * self.layout.items * i) for i in blocks]
                whole = [lanes.total(values) for values in zip(whole, *others, strict=True)]
            yield start, whole
