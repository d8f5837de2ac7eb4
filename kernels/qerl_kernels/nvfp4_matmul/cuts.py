"""Which tiles a cluster of `mosaic_gpu` has, and how its blocks share them out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many tiles there are, steps (passes of the ring) in a tile, and clusters that share the tiles."""

    token_tiles: int
    feature_tiles: int
    steps: int
    groups: int

    def tiles_of(self, group: jax.Array) -> jax.Array:
        """Number of tiles of a cluster."""
        return lax.div(self.token_tiles * self.feature_tiles - group + self.groups - 1, self.groups)

    def origin(self, group: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(token tile, feature tile) of a cluster's i-th tile: clusters at work at the same time share x and w in the
        L2."""
        index = group + i * self.groups
        if self.token_tiles == 1:
            return jnp.int32(0), index
        return plgpu.planar_snake(index, (self.token_tiles, self.feature_tiles), 1, 8)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """How a cluster's blocks share its tiles: the same on every block, so that who waits knows who sends.

    Attributes:
      passes: of all tiles of the cluster.
      steps: passes of a tile.
      cluster: blocks.
      turn: passes that a block takes together.
    """

    passes: jax.Array
    steps: int
    cluster: int
    turn: int

    def begin(self, block: jax.Array) -> jax.Array:
        """First pass, counted over the cluster's tiles, of a block; it ends where the next one begins."""
        return lax.div(block * lax.div(self.passes, jnp.int32(self.turn)), jnp.int32(self.cluster)) * self.turn

    def owner(self, tile: jax.Array) -> jax.Array:
        """The block that has a tile's first pass."""
        first = tile * self.steps
        return sum((self.begin(jnp.int32(block)) <= first).astype(jnp.int32) for block in range(self.cluster)) - 1

    def senders_before(self, tile: jax.Array, before: jax.Array | int) -> jax.Array:
        """How many blocks between a tile's owner and `before` send the owner their sums: those that have anything to do
        there. Of a sender that is its place; with `before` past the last block it is how many the owner waits for.
        """
        owner, end = self.owner(tile), (tile + 1) * self.steps
        count = jnp.int32(0)
        for block in range(1, self.cluster):
            begin = self.begin(jnp.int32(block))
            works = (begin < end) & (begin < self.begin(jnp.int32(block + 1)))
            count += ((block > owner) & (block < before) & works).astype(jnp.int32)
        return count
