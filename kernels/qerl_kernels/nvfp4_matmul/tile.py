"""How the kernel for all numbers of tokens (`mosaic_gpu`) cuts its work, and what that takes of a multiprocessor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from qerl_kernels.dispatch import MULTIPROCESSORS, SMEM_BYTES
from qerl_kernels.nvfp4_matmul import lora_input
from qerl_kernels.nvfp4_matmul.packing import TILE

# Clusters of so many blocks that an H200 holds, one block a multiprocessor, as its driver says
# (cuOccupancyMaxActiveClusters); other chips of the kind may differ by a few.
AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
# Tokens up to which what precedes a product is faster where it leaves `x A` in parts: SiLU of 7B took an H200 4.1 and
# 5.0 us for 32 and 64 tokens, 5.5 and 6.4 with the whole; from 96 on there was no difference.
MOST_IN_PARTS = 64


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the work is cut; found by `tools/tune_matmul.py`.

    Attributes:
      tokens: rows of x in a tile (8 to 256, a multiple of 8).
      rows: consumer warpgroups side by side, 64 output features each.
      slices: consumer warpgroups that share the contraction of the same features.
      cluster: blocks that walk over the same tiles, cut into equal runs (1, 2, 3, 4 or 8).
      depth: units of 64 along the contraction that a consumer takes from one slot of the ring.
      stages: slots of the ring.
      blocks_per_sm: blocks resident on one multiprocessor.
      warp_mma: multiply with `mma.sync` (a warp's own instruction) and not `wgmma`: for few tokens, where `wgmma`
        takes as long for 8 as for 32.
      ahead: make the next unit's operand while `wgmma` works at the present one, which the next then waits for (1) or
        follows at once (2). With 0, consumers that share a slot all make theirs and then all wait for the tensor cores:
        a unit takes the sum of both times.
    """

    tokens: int
    rows: int = 4
    slices: int = 1
    cluster: int = 1
    depth: int = 2
    stages: int = 4
    blocks_per_sm: int = 1
    warp_mma: bool = False
    ahead: int = 0

    def takes(self, tokens: int, adapters: Sequence[tuple[int, int]]) -> Literal["whole", "parts"]:
        """What the kernel is best given of the `x A` of `adapters` (shapes of B), for that many tokens (see
        `Split.takes`): it adds up parts for one adapter, where one tile has all tokens and shared memory has room."""
        able = len(adapters) == 1 and tokens <= self.tokens
        room = self.smem_bytes(True, in_parts=True) * self.blocks_per_sm <= SMEM_BYTES
        return "parts" if able and room and tokens <= MOST_IN_PARTS else "whole"

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a block."""
        return self.rows * self.slices

    @property
    def turn(self) -> int:
        """Passes of the ring that a consumer takes together: with `ahead` so many that two operands can take turns."""
        return 2 if self.ahead and self.depth % 2 else 1

    def smem_bytes(self, adapted: bool = False, in_parts: bool = False) -> int:
        """Shared memory of a block, with or without adapters, whose `x A` may come in parts; half a KiB of it for
        barriers, each array a whole number of KiB."""
        units = self.slices * self.depth
        slot = units * (self.rows * 512 * 4 + self.tokens * TILE * 2)
        scales = -(-self.stages * units * self.rows // 4) * 1024
        sums = self.rows * self.tokens * TILE * (2 + 4 * (self.slices + self.cluster - 2))
        adapter = adapted * self.rows * TILE * TILE * 2 + in_parts * self.tokens * TILE * 2
        return self.stages * slot + scales + sums + adapter + 512


def can_fuse(tile: Tile, n: int, shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether this kernel can add adapters with B of these shapes: `lora_input.can_fuse`, and none begins within a
    tile."""
    return n % TILE == 0 and lora_input.can_fuse(n, shapes, TILE * tile.rows)


def clusters_at_once(tile: Tile, sms: int) -> int:
    """Clusters that a GPU should hold, none waiting for another to end.

    A cluster lies within one group of multiprocessors, so that those of three, four or eight blocks leave some idle.
    """
    at_once = AT_ONCE[tile.cluster] if sms == MULTIPROCESSORS else sms // tile.cluster
    return max(1, at_once * tile.blocks_per_sm)


def register_split(tile: Tile, sums: bool = False) -> tuple[int, int] | None:
    """Registers of a producer and of a consumer thread, or None to leave them even. A producer that `sums` gets what
    the consumers leave.

    `setmaxnreg` moves registers within what the block was launched with: the largest multiple of 8 that fits 64 Ki for
    all its threads. Asking for more than that in all would wait for ever.
    """
    if tile.consumers == 1 or tile.blocks_per_sm > 1:
        return None
    threads = (tile.consumers + 1) * 128
    at_launch = 65536 // threads // 8 * 8 * threads
    producer = 40 if tile.consumers <= 2 else 24
    consumer = min(240, (at_launch // 128 - producer) // tile.consumers // 8 * 8)
    if sums:
        producer = (at_launch // 128 - tile.consumers * consumer) // 8 * 8
    return producer, consumer


def fits(tile: Tile, adapted: bool = False) -> bool:
    """Whether a multiprocessor can hold `tile`: shared memory, threads, and about the registers of a consumer."""
    threads = (tile.consumers + 1) * 128
    split = register_split(tile)
    at_launch = 65536 // (threads * tile.blocks_per_sm) // 8 * 8
    registers = split[1] if split else at_launch
    own = tile.tokens // 2  # its sums: beside them A while it multiplies, or those that it adds at the end
    others = own if tile.slices > 1 or tile.cluster > 1 else 0
    operands = 16 * (2 if tile.ahead else tile.depth)
    spills = tile.consumers > (3 if tile.cluster > 2 else 5)  # a few words with `ahead`, as compiling them showed
    return (
        tile.smem_bytes(adapted) * tile.blocks_per_sm <= SMEM_BYTES
        and threads * tile.blocks_per_sm <= 2048
        and tile.consumers <= 7
        and tile.cluster in (1, 2, 3, 4, 8)
        and not (tile.ahead and (tile.stages < 2 or tile.warp_mma or spills))
        and (tile.warp_mma or own + 28 + max(others, operands) <= registers)
        and (tile.warp_mma or own + 30 <= at_launch)  # what one `wgmma` names has to be there then
    )
