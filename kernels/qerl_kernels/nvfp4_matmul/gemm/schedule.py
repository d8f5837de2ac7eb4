"""The schedule: persistent clusters over output tiles, and Stream-K among the CTAs of one cluster.

Each cluster walks over its tiles, which are whole: no tile is shared by two clusters, and no workspace in HBM is
needed. Laid end to end, the k-iterations of a cluster's tiles (a k-iteration is one use of a pipeline stage) are cut
into `ctas` equal runs, one for each CTA, so that all CTAs finish together even where the tiles do not divide evenly. A
run may begin or end within a tile; a CTA's part of one tile is a segment. The CTA with a tile's first k-iteration owns
the tile: it adds the sums of the CTAs that continue it, which come through distributed shared memory, in a fixed order,
so that the result is deterministic. With clusters of one CTA this is a plain persistent kernel over whole tiles.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """The output tiles, the k-iterations (pipeline stages) of each, and the clusters that share the tiles."""

    m_tiles: int
    n_tiles: int
    k_iterations: int
    clusters: int

    def tile_count(self, cluster_index: jax.Array) -> jax.Array:
        """Number of tiles of a cluster."""
        return lax.div(self.m_tiles * self.n_tiles - cluster_index + self.clusters - 1, self.clusters)

    def origin(self, cluster_index: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(m tile, n tile) of a cluster's i-th tile. Clusters at work at the same time share x and w in the L2."""
        index = cluster_index + i * self.clusters
        if self.m_tiles == 1:
            return jnp.int32(0), index
        return plgpu.planar_snake(index, (self.m_tiles, self.n_tiles), 1, 8)


@dataclasses.dataclass(frozen=True)
class StreamK:
    """How the CTAs of a cluster share its tiles. It is the same on every CTA, so that owner and senders agree.

    Attributes:
      total_k_iterations: k-iterations of all tiles of the cluster.
      k_iterations: k-iterations of a tile.
      ctas: CTAs of the cluster.
      unroll: k-iterations that a CTA takes together.
    """

    total_k_iterations: jax.Array
    k_iterations: int
    ctas: int
    unroll: int

    def begin(self, rank: jax.Array) -> jax.Array:
        """First k-iteration of a CTA, counted over the cluster's tiles; it ends where the next CTA begins."""
        total = lax.div(self.total_k_iterations, jnp.int32(self.unroll))
        return lax.div(rank * total, jnp.int32(self.ctas)) * self.unroll

    def owner(self, tile: jax.Array) -> jax.Array:
        """Cluster rank of the CTA with a tile's first k-iteration."""
        first = tile * self.k_iterations
        return sum((self.begin(jnp.int32(rank)) <= first).astype(jnp.int32) for rank in range(self.ctas)) - 1

    def senders_before(self, tile: jax.Array, before: jax.Array | int) -> jax.Array:
        """How many CTAs between a tile's owner and cluster rank `before` send their sums to the owner: those with any
        k-iteration of the tile. For a sender's own rank this is its place among the senders; for a rank past the last
        it is the number that the owner waits for."""
        owner, end = self.owner(tile), (tile + 1) * self.k_iterations
        count = jnp.int32(0)
        for rank in range(1, self.ctas):
            begin = self.begin(jnp.int32(rank))
            works = (begin < end) & (begin < self.begin(jnp.int32(rank + 1)))
            count += ((rank > owner) & (rank < before) & works).astype(jnp.int32)
        return count


@dataclasses.dataclass(frozen=True)
class Span:
    """One segment: the k-iterations k_begin ... k_end - 1 of a tile.

    Attributes:
      tile: the tile, counted over the cluster's tiles.
      k_begin: first k-iteration, counted over the cluster's tiles.
      k_end: k-iteration past the last.
      k_iterations: k-iterations of a tile.
    """

    tile: jax.Array
    k_begin: jax.Array
    k_end: jax.Array
    k_iterations: int

    @property
    def is_owner(self) -> jax.Array:
        """Whether the CTA of this segment owns the tile: it has the tile's first k-iteration."""
        return self.k_begin == self.tile * self.k_iterations


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of one CTA, 0 ... count - 1. It owns the tile of each, except that of segment 0 where its run starts
    within a tile.

    Attributes:
      k_iterations: k-iterations of a tile.
      begin: first k-iteration of the run, counted over the cluster's tiles.
      end: the k-iteration past the run.
      first_tile: tile of segment 0, counted over the cluster's tiles.
      count: number of segments.
      starts_within: 1 where segment 0 continues a tile of another CTA.
      has_lora: whether every owned tile uses one more pipeline stage, at its end, for its LoRA input.
    """

    k_iterations: int
    begin: jax.Array
    end: jax.Array
    first_tile: jax.Array
    count: jax.Array
    starts_within: jax.Array
    has_lora: bool

    @classmethod
    def of(cls, stream_k: StreamK, rank: jax.Array, has_lora: bool) -> Segments:
        """The segments of the CTA of this cluster rank."""
        k_iterations = stream_k.k_iterations
        begin, end = stream_k.begin(rank), stream_k.begin(rank + 1)
        first_tile = lax.div(begin, k_iterations)
        count = jnp.where(end > begin, lax.div(end - 1, k_iterations) - first_tile + 1, 0)
        starts_within = (begin > first_tile * k_iterations).astype(jnp.int32)
        return cls(k_iterations, begin, end, first_tile, count, starts_within, has_lora)

    def span(self, s: jax.Array) -> Span:
        """The part of a tile that segment s is."""
        tile = self.first_tile + s
        k_begin = jnp.maximum(self.begin, tile * self.k_iterations)
        return Span(tile, k_begin, jnp.minimum(self.end, (tile + 1) * self.k_iterations), self.k_iterations)

    def owned_before(self, s: jax.Array) -> jax.Array:
        """Number of owned tiles before segment s."""
        return jnp.maximum(s - self.starts_within, 0)

    def pipeline_index(self, s: jax.Array, k_iteration: jax.Array) -> jax.Array:
        """Index of a k-iteration of segment s among all uses of the pipeline by this CTA. With LoRA every owned tile
        has one more use, at its end: its index is that of `Span.k_end`."""
        return k_iteration - self.begin + (self.owned_before(s) if self.has_lora else 0)
