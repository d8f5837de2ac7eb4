"""The tuning config of the warp-specialized GEMM, and what it takes of an SM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul import lora_input
from qerl_kernels.nvfp4_matmul.packing import TILE

# Rows of x up to which a decode prologue is faster where it leaves `x A` as split-K partials: SiLU of 7B took an H200
# 4.1 and 5.0 us for 32 and 64 rows, against 5.5 and 6.4 with the whole `x A`; from 96 rows on there was no difference.
MAX_PARTIALS_M = 64


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and pipeline of the kernel, which runs on Hopper alone; found by `nvfp4_matmul.tuner`.

    M, N and K are those of the GEMM: rows of x, output features and contraction; for dx the weight's n is the K.

    Attributes:
      tile_m: rows of x in a tile (8 to 256, a multiple of 8).
      warpgroups_n: consumer warpgroups side by side, 64 output features each.
      warpgroups_k: consumer warpgroups that share the contraction of the same features.
      cluster: CTAs of a cluster, which share the tiles that are left over (1 to 4; `schedule`).
      k_tiles: k-tiles of 64 that a consumer takes from one pipeline stage.
      stages: pipeline stages.
      ctas_per_sm: CTAs resident on one SM.
      lookahead: dequantize the next k-tile while `wgmma` multiplies the present one. Without, consumers that share a
        stage all dequantize and then all wait for the tensor cores: a k-tile takes the sum of both times.
    """

    tile_m: int
    warpgroups_n: int = 4
    warpgroups_k: int = 1
    cluster: int = 1
    k_tiles: int = 2
    stages: int = 4
    ctas_per_sm: int = 1
    lookahead: bool = False

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a CTA."""
        return self.warpgroups_n * self.warpgroups_k

    @property
    def tile_n(self) -> int:
        """Output features of a tile."""
        return TILE * self.warpgroups_n

    @property
    def stage_k_tiles(self) -> int:
        """k-tiles of 64 in a pipeline stage."""
        return self.warpgroups_k * self.k_tiles

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(first row, rows) of the parts in which a tile is finished: of a tile that the CTAs of a cluster share, each
        finishes one; the last may have none."""
        rows = -(-self.tile_m // (8 * self.cluster)) * 8
        return [(first, min(rows, self.tile_m - first)) for first in range(0, self.tile_m, rows)]

    @property
    def unroll(self) -> int:
        """k-iterations that the mainloop takes together. With lookahead two A fragments alternate, which takes an even
        number of k-tiles."""
        return 2 if self.lookahead and self.k_tiles % 2 else 1

    def smem_bytes(self, has_lora: bool = False, has_partials: bool = False) -> int:
        """Shared memory of a CTA, with or without LoRA, whose `x A` may come as split-K partials. Each array is a whole
        number of KiB; barriers take half a KiB."""
        stage = self.stage_k_tiles * (self.warpgroups_n * 512 * 4 + self.tile_m * TILE * 2)
        scales = -(-self.stages * self.stage_k_tiles * self.warpgroups_n // 4) * 1024
        part = self.parts[0][1]
        sums = self.tile_n * (4 * self.tile_m * (self.warpgroups_k - 1) + part * (2 + 4 * (self.cluster - 1)))
        sums += 1024 * (self.cluster > 1)  # mbarriers
        lora = has_lora * self.tile_n * TILE * 2 + has_partials * self.tile_m * TILE * 2
        return self.stages * stage + scales + sums + lora + 512

    def fits(self, has_lora: bool = False) -> bool:
        """Whether the kernel has these sizes, which a table of the user's need not be, and an SM can hold `ctas_per_sm`
        CTAs by shared memory, threads, and roughly a consumer's registers."""
        parts = self.warpgroups_n, self.warpgroups_k, self.cluster, self.k_tiles, self.stages, self.ctas_per_sm
        if min(parts) < 1 or self.tile_m not in range(8, 257, 8):
            return False
        threads = (self.consumers + 1) * 128
        split = self.register_split()
        at_launch = 65536 // (threads * self.ctas_per_sm) // 8 * 8
        registers = split[1] if split else at_launch
        accumulator = self.tile_m // 2
        # beside it: A while the consumer multiplies, or the sums that it adds at the end
        addends = accumulator if self.warpgroups_k > 1 or self.cluster > 1 else 0
        operands = 16 * (2 if self.lookahead else self.k_tiles)
        # with lookahead a few words spill where there are more consumers, as compiling showed
        spills = self.consumers > (3 if self.cluster > 2 else 5)
        return (
            self.smem_bytes(has_lora) * self.ctas_per_sm <= H200.smem_bytes
            and threads * self.ctas_per_sm <= 2048
            and self.consumers <= 7
            and self.cluster <= 4
            and not (self.lookahead and (self.stages < 2 or spills))
            and accumulator + 28 + max(addends, operands) <= registers
            and accumulator + 30 <= at_launch  # the registers that one `wgmma` names
        )

    def can_fuse_lora(self, n: int, shapes: Sequence[tuple[int, int]]) -> bool:
        """Whether the epilogue can add adapters with B of these shapes: fusible, and none begins within 64 features."""
        return n % TILE == 0 and lora_input.can_fuse(n, shapes, TILE)

    def takes_partials(self, m: int, shapes: Sequence[tuple[int, int]]) -> bool:
        """Whether the kernel should be given `x A` of adapters with B of these shapes as split-K partials: there is one
        adapter, one tile has all m rows, shared memory has room, and it is the faster way."""
        has_room = self.smem_bytes(True, has_partials=True) * self.ctas_per_sm <= H200.smem_bytes
        return len(shapes) == 1 and m <= min(self.tile_m, MAX_PARTIALS_M) and has_room

    def register_split(self) -> tuple[int, int] | None:
        """Registers of a producer and of a consumer thread, or None to leave them even. The producer, for which 24 or
        40 would do, gets all that the consumers leave.

        `setmaxnreg` moves registers within what the CTA was launched with: the largest multiple of 8 that fits 64 Ki
        for all its threads. A request for more in all would wait for ever.
        """
        if self.consumers == 1 or self.ctas_per_sm > 1:
            return None
        at_launch = 65536 // ((self.consumers + 1) * 128) // 8 * 8 * (self.consumers + 1)  # of a thread of each
        least = 40 if self.consumers <= 2 else 24
        consumer = min(240, (at_launch - least) // self.consumers // 8 * 8)
        return at_launch - self.consumers * consumer, consumer

    def resident_clusters(self, gpu: Gpu) -> int:
        """Clusters that a GPU should hold at a time."""
        return max(1, gpu.resident_clusters(self.cluster) * self.ctas_per_sm)
