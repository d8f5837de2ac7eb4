"""Problem, tuning config and shared-memory layout of the skinny GEMM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS, can_fuse
from qerl_kernels.nvfp4_matmul.packing import TILE

MAX_TILE_M = 64
X_ROW_BYTES = 2 * TILE  # a row of x in a k-tile
# Codes and block scales of a 64 × 64 tile of the packed weight, and of an m16 tile's quarter of it.
WORDS_TILE_BYTES, SCALES_TILE_BYTES = 2048, 256
WORDS_M16_BYTES, SCALES_M16_BYTES = WORDS_TILE_BYTES // 4, SCALES_TILE_BYTES // 4
LORA_ROW_BYTES = 4 * (MMA_ROWS + 4)  # one row of x in an m16 tile of a LoRA term


@dataclasses.dataclass(frozen=True)
class SkinnyProblem:
    """One GEMM with its epilogue terms.

    Attributes:
      m: rows of x.
      n: output features of the weight.
      k_tiles: k-tiles of 64 input features.
      scale: LoRA scale alpha / R.
      bias_bytes: bytes of one bias element, None without a bias.
      adapters: (rank, features) of each adapter.
      lora_columns: columns of `lora_x` or of A.
      partials: split-K partials in `lora_x`, 0 where it is whole.
    """

    m: int
    n: int
    k_tiles: int
    scale: float
    bias_bytes: int | None
    adapters: tuple[tuple[int, int], ...]
    lora_columns: int
    partials: int

    @property
    def rank(self) -> int:
        """The largest LoRA rank."""
        return max((rank for rank, _ in self.adapters), default=0)

    @property
    def rank_tiles(self) -> int:
        """Tiles of 16 ranks."""
        return -(-self.rank // MMA_ROWS)


@dataclasses.dataclass(frozen=True)
class SkinnyConfig:
    """Tuning config, found by `nvfp4_matmul.tuner`.

    Attributes:
      tile_m: rows of x of a CTA, a multiple of 8 up to `MAX_TILE_M`.
      m16_tiles: `mma` tiles of 16 output features in a CTA (1, 2, 4 or 8).
      warps: warps of a CTA, which split K (a multiple of 4).
      cluster: CTAs of a cluster, which split K (1 to 8).
      stages: k-tiles that a warp has in flight.
      computes_lora_x: True where the kernel takes A and computes `x A` itself; a CTA then has features of one adapter.
    """

    tile_m: int
    m16_tiles: int = 4
    warps: int = 8
    cluster: int = 1
    stages: int = 4
    computes_lora_x: bool = False

    @property
    def n8_tiles(self) -> int:
        """`mma` tiles of eight rows of x."""
        return self.tile_m // 8

    @property
    def tile_n(self) -> int:
        """Output features of a CTA."""
        return MMA_ROWS * self.m16_tiles

    def clusters(self, n: int) -> int:
        """Clusters of the grid for n output features, for each block of rows."""
        return math.ceil(n / TILE) * TILE // self.tile_n

    def blocks(self, m: int) -> int:
        """Blocks of up to `tile_m` rows."""
        return -(-m // self.tile_m)

    def smem_bytes(self, rank: int = 0) -> int:
        """Shared memory of a CTA with or without adapters, each array a whole number of KiB.

        Args:
          rank: the largest LoRA rank; counts where the kernel computes `x A`.
        """
        kib = lambda size: -(-size // 1024) * 1024  # noqa: E731
        sizes = SharedLayout(self, rank).arrays()
        return sum(kib(size) for name, size in sizes.items() if name != "arrived_s") + 1024

    def fits(self, n: int, k: int, rank: int = 0, gpu: Gpu = H200) -> bool:
        """Whether an SM can hold a CTA, and the weight [n, k] divides into such CTAs.

        Args:
          n: output features.
          k: input features.
          rank: the largest LoRA rank, above 0 where the kernel computes `x A`.
          gpu: the GPU.
        """
        return (
            self.tile_m in range(8, MAX_TILE_M + 1, 8)
            and self.m16_tiles in (1, 2, 4, 8)
            and self.warps % 4 == 0
            and 4 <= self.warps <= 32
            and 1 <= self.cluster <= 8
            and self.stages >= 1
            and math.ceil(n / TILE) * 4 % self.m16_tiles == 0
            and math.ceil(k / TILE) >= self.cluster
            and (self.cluster == 1 or gpu.tier == "wgmma")
            and self._fits_sm(rank, gpu)
        )

    def specialize(self, n: int, adapters: Sequence[tuple[int, int]] = (), gpu: Gpu = H200) -> SkinnyConfig:
        """The config for a weight with n output features and these adapters.

        Four m16 tiles in a CTA take the place of eight that do not divide n. `x A` is computed in the kernel only where
        there are adapters, none begins within a CTA's features, and an SM has room for A.

        Args:
          n: output features.
          adapters: shape of B, [rank, features], of each adapter.
          gpu: the GPU.
        """
        config = self
        if math.ceil(n / TILE) * 4 % config.m16_tiles:
            config = dataclasses.replace(config, m16_tiles=4)
        if config.computes_lora_x:
            rank = max((rank for rank, _ in adapters), default=0)
            is_able = can_fuse(n, adapters, config.tile_n) and config._fits_sm(rank, gpu)
            config = dataclasses.replace(config, computes_lora_x=is_able)
        return config

    def _fits_sm(self, rank: int, gpu: Gpu) -> bool:
        """Whether shared memory and registers suffice."""
        rank_tiles = SharedLayout(self, rank).rank_tiles
        return (
            (0 < rank <= TILE or not self.computes_lora_x)
            and self.smem_bytes(rank) <= gpu.smem_bytes
            and (self.m16_tiles + rank_tiles) * self.tile_m <= 192  # above, accumulators of several n8 tiles spill
            # Accumulators, x, multipliers, words and scales of two m16 tiles; the rest for addresses and an operand.
            and (self.m16_tiles + rank_tiles) * self.tile_m // 2
            + self.tile_m
            + (2 * self.m16_tiles if rank_tiles else 0)
            + 64
            <= min(255, 65536 // (32 * self.warps))
        )


@dataclasses.dataclass(frozen=True)
class SharedLayout:
    """Byte offsets and sizes in a CTA's shared memory.

    Attributes:
      config: the kernel's config.
      rank: the largest LoRA rank, see `SkinnyConfig.smem_bytes`.
    """

    config: SkinnyConfig
    rank: int = 0

    @property
    def rank_tiles(self) -> int:
        """Tiles of 16 ranks that a warp multiplies with x."""
        return -(-self.rank // MMA_ROWS) if self.config.computes_lora_x else 0

    @property
    def a_columns(self) -> int:
        """Ranks in a row of A in a stage: 16, 32 or 64, so that a row is a power of two; 0 without A."""
        return MMA_ROWS * 2 ** math.ceil(math.log2(self.rank_tiles)) if self.rank_tiles else 0

    @property
    def a_at(self) -> int:
        """Offset of A in a stage, behind x: 64 rows."""
        return self.config.tile_m * X_ROW_BYTES

    @property
    def words_at(self) -> int:
        """Offset of the words in a stage; the scales follow them."""
        return self.a_at + TILE * 2 * self.a_columns

    @property
    def stage_bytes(self) -> int:
        """One stage, a k-tile; a multiple of 128, so that rows of x begin at bank 0."""
        return -(-(self.words_at + self.config.m16_tiles * (WORDS_M16_BYTES + SCALES_M16_BYTES)) // 128) * 128

    @property
    def row_bytes(self) -> int:
        """One row of a warp's sums; four more floats in a row spread the rows over the banks."""
        return 4 * (self.config.tile_n + 4)

    @property
    def sum_bytes(self) -> int:
        """A warp's sums, fp32 [tile_m, tile_n]."""
        return self.config.tile_m * self.row_bytes

    @property
    def b_row_bytes(self) -> int:
        """One rank of B for a CTA's features, spread over the banks likewise."""
        return 2 * self.config.tile_n + 16

    @property
    def lora_bytes(self) -> int:
        """A LoRA term of 16 ranks for 16 features, fp32 [tile_m, features], spread over the banks likewise."""
        return self.config.tile_m * LORA_ROW_BYTES

    @property
    def warp_bytes(self) -> int:
        """A warp's own memory: its stages, and after the mainloop its sums and, behind them, its share of the LoRA
        terms that are not part of the sums."""
        config = self.config
        jobs = 0 if config.computes_lora_x else -(-config.m16_tiles * TILE // MMA_ROWS // config.warps)
        epilogue = -(-(self.sum_bytes + jobs * self.lora_bytes) // 128) * 128
        return max(config.stages * self.stage_bytes, epilogue)

    @property
    def vectors(self) -> int:
        """Vectors of four fp32 that a CTA sends."""
        return self.config.tile_m * self.config.tile_n // 4

    def arrays(self) -> dict[str, int]:
        """Bytes of each array: the warps' own memory, the sums from the other CTAs, their mbarrier, and B."""
        sizes = {"warps_s": self.config.warps * self.warp_bytes}
        if self.config.cluster > 1:
            sizes |= {"sums_from_cluster_s": (self.config.cluster - 1) * self.vectors * 16, "arrived_s": 16}
        return sizes | ({"b_s": MMA_ROWS * self.rank_tiles * self.b_row_bytes} if self.rank_tiles else {})
