"""A CTA as its warpgroups see it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
from jax import lax

from qerl_kernels.nvfp4_matmul.gemm.barriers import Barriers
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.schedule import Segments, Span, TileGrid
from qerl_kernels.nvfp4_matmul.gemm.smem import Smem
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms


class WeightOperand(Protocol):
    """How the packed weight becomes the A operand, 64 output features × 64 of the contraction for each tile:
    `operand.FORWARD` or `transposed.TRANSPOSED`."""

    name: str

    def words(self, words: jax.Array) -> jax.Array:
        """The weight's words as the kernel is given them: the same bytes."""

    def word_transforms(self) -> tuple:
        """Tiling and swizzle of the words in shared memory."""

    def place(self, along_n: Any, along_k: Any) -> tuple[Any, Any]:
        """Index of the weight's tiles, from those of the GEMM's output features and of its contraction."""

    def load(self, words_s: jax.Ref, scales_s: jax.Ref) -> tuple[jax.Array, jax.Array]:
        """Words and scales of one tile in registers."""

    def dequantize(self, words: jax.Array, scales: jax.Array) -> jax.Array:
        """The tile's values as bf16 A fragments."""

    def multiplier_row(self, first: jax.Array) -> jax.Array | int:
        """First row of the 64 multipliers of output features `first`, ...; for dx one multiplier stands for all."""

    def store(self, out_s: jax.Ref, y: jax.Array) -> None:
        """Stores y [64, tile_m] into out_s [tile_m, 64]."""


@dataclasses.dataclass(frozen=True)
class Gmem:
    """Arrays in HBM; None, or an empty tuple, where a term is absent."""

    x_g: jax.Ref
    words_g: jax.Ref
    scales_g: jax.Ref
    multiplier_g: jax.Ref
    bias_g: jax.Ref | None
    lora_x_g: jax.Ref | None
    lora_b_g: tuple[jax.Ref, ...]
    out_g: jax.Ref


@dataclasses.dataclass(frozen=True)
class Cta:
    """What producer, mainloop and epilogue of one CTA share.

    Attributes:
      config: the tuning config.
      terms: terms of the epilogue.
      operand: forward or transposed weight.
      grid: the output tiles.
      segments: this CTA's share.
      cluster_index: index of the cluster in the grid.
      rank: cluster rank of this CTA.
      gmem: arrays in HBM.
      smem: shared memory.
      barriers: mbarriers.
    """

    config: GemmConfig
    terms: Terms
    operand: WeightOperand
    grid: TileGrid
    segments: Segments
    cluster_index: jax.Array
    rank: jax.Array
    gmem: Gmem
    smem: Smem
    barriers: Barriers

    def origin(self, span: Span) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(first row, first block of 64 output features, end of its adapter's blocks) of a segment's tile."""
        m_tile, n_tile = self.grid.origin(self.cluster_index, span.tile)
        return m_tile * self.config.tile_m, *self.grid.blocks(n_tile)

    def stage(self, s: jax.Array, k_iteration: jax.Array) -> jax.Array:
        """Pipeline stage of a k-iteration of segment s."""
        return lax.rem(self.segments.pipeline_index(s, k_iteration), self.config.stages)
