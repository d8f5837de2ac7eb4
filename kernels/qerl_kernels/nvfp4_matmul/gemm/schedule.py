"""The schedule: persistent clusters over output tiles, and the CTAs of a cluster over its tiles.

Each cluster walks over its tiles: no tile is shared by two clusters, and no workspace in HBM is needed. Each of its
CTAs takes equally many whole tiles. All CTAs take part in each tile that is left over: every CTA sums a run of the
tile's k-iterations (one is one use of a pipeline stage), and finishes the sums of some of its rows
(`GemmConfig.parts`), which the others send it through distributed shared memory. So all CTAs finish together even where
the tiles do not divide evenly; what crosses CTAs is less than a tile for each; and sums are added in a fixed order, so
that the result is deterministic. With clusters of one CTA this is a plain persistent kernel over whole tiles.

A CTA's part in one tile is a segment: first its whole tiles, then its runs of shared ones.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """The output tiles, the k-iterations (pipeline stages) of each, and the clusters that share the tiles.

    Attributes:
      m_tiles: tiles along m.
      widths: blocks of 64 output features of each adapter, or of all; a tile belongs to one of them.
      tile_blocks: blocks of a tile; the last tile of an adapter may have fewer.
      k_iterations: k-iterations of a tile.
      clusters: clusters of the grid.
    """

    m_tiles: int
    widths: tuple[int, ...]
    tile_blocks: int
    k_iterations: int
    clusters: int

    @property
    def n_tiles(self) -> int:
        """Tiles along n."""
        return sum(-(-width // self.tile_blocks) for width in self.widths)

    def tile_count(self, cluster_index: jax.Array) -> jax.Array:
        """Number of tiles of a cluster."""
        return lax.div(self.m_tiles * self.n_tiles - cluster_index + self.clusters - 1, self.clusters)

    def origin(self, cluster_index: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(m tile, n tile) of a cluster's i-th tile. Clusters at work at the same time share x and w in the L2."""
        index = cluster_index + i * self.clusters
        if self.m_tiles == 1:
            return jnp.int32(0), index
        return plgpu.planar_snake(index, (self.m_tiles, self.n_tiles), 1, 8)

    def blocks(self, n_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(first block of a tile, end of the blocks of its adapter)."""
        first, end, tiles = n_tile * self.tile_blocks, jnp.int32(self.widths[0]), 0
        for width, after in zip(self.widths, self.widths[1:], strict=False):
            tiles += -(-width // self.tile_blocks)
            is_behind = (n_tile >= tiles).astype(jnp.int32)
            first, end = first - is_behind * (-width % self.tile_blocks), end + is_behind * after
        return first, end


@dataclasses.dataclass(frozen=True)
class Span:
    """One segment: the k-iterations k_begin ... k_end - 1 of a tile.

    Attributes:
      tile: the tile, counted over the cluster's tiles.
      k_begin: first k-iteration.
      k_end: k-iteration past the last.
      is_whole: whether these are all of the tile, which no other CTA shares.
    """

    tile: jax.Array
    k_begin: jax.Array
    k_end: jax.Array
    is_whole: jax.Array


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of one CTA, 0 ... count - 1.

    Attributes:
      tiles: tiles of the cluster.
      k_iterations: k-iterations of a tile, a multiple of `unroll` and no fewer than `ctas` · `unroll`.
      ctas: CTAs of the cluster.
      unroll: k-iterations that a CTA takes together.
      rank: cluster rank of the CTA.
      has_lora: whether every segment uses one more pipeline stage, at its end, for its LoRA input.
    """

    tiles: jax.Array
    k_iterations: int
    ctas: int
    unroll: int
    rank: jax.Array
    has_lora: bool

    @property
    def whole(self) -> jax.Array:
        """Number of the CTA's whole tiles."""
        return lax.div(self.tiles, jnp.int32(self.ctas))

    @property
    def count(self) -> jax.Array:
        """Number of segments, the same for all CTAs of the cluster."""
        return self.tiles - self.whole * (self.ctas - 1)

    def _cut(self, rank: jax.Array) -> jax.Array:
        """First k-iteration of a CTA in a shared tile; it ends where the next CTA begins."""
        return lax.div(rank * (self.k_iterations // self.unroll), jnp.int32(self.ctas)) * self.unroll

    def span(self, s: jax.Array) -> Span:
        """The part of a tile that segment s is."""
        if self.ctas == 1:
            return Span(s, jnp.int32(0), jnp.int32(self.k_iterations), jnp.bool_(True))
        is_whole = s < self.whole
        return Span(
            tile=jnp.where(is_whole, s * self.ctas + self.rank, s + self.whole * (self.ctas - 1)),
            k_begin=jnp.where(is_whole, 0, self._cut(self.rank)),
            k_end=jnp.where(is_whole, self.k_iterations, self._cut(self.rank + 1)),
            is_whole=is_whole,
        )

    def pipeline_index(self, s: jax.Array, k_iteration: jax.Array) -> jax.Array:
        """Index of a k-iteration of segment s among all uses of the pipeline by this CTA. With LoRA every segment has
        one more use, at its end: its index is that of `Span.k_end`."""
        if self.ctas == 1:
            return s * (self.k_iterations + self.has_lora) + k_iteration
        begin, end = self._cut(self.rank), self._cut(self.rank + 1)
        whole = jnp.minimum(s, self.whole)
        before = whole * self.k_iterations + (s - whole) * (end - begin) + s * self.has_lora
        return before + k_iteration - jnp.where(s < self.whole, 0, begin)
