"""Sequences of different lengths laid end to end in one row of tokens, and the way to a row each and back.

What works on single tokens (projections, norms, MLP) runs over the one row, without padding between the sequences;
attention runs over rows of `width` tokens: for prompts of some hundred tokens a few percent of the work.

Axes: N sequences, T tokens in the one row, W tokens of the longest sequence's row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["owner", "positions", "last", "to_rows", "to_one"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Ragged:
    """Where everything lies.

    Attributes:
      owner: the sequence of each token; N for filler behind the last one.
      positions: place of each token in its sequence; of filler, places that are all different.
      last: each sequence's last token in the one row.
      to_rows: for each place of a row, the token in the one row. Places behind a sequence's end repeat its last token:
        never another's, which might be NaN, and 0 · NaN would come through a mask.
      to_one: for each token, its place in the rows laid end to end.
    """

    owner: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    last: Int32[Array, " N"]
    to_rows: Int32[Array, "N W"]
    to_one: Int32[Array, " T"]

    def apart(self, x: Float[Array, "T ..."]) -> Float[Array, "N W ..."]:
        """A row for each sequence; what is in the row of an empty one means nothing."""
        return x[self.to_rows]

    def together(self, x: Float[Array, "N W ..."]) -> Float[Array, "T ..."]:
        """The inverse of `apart`; what is at the filler means nothing."""
        return x.reshape(-1, *x.shape[2:])[self.to_one]


def lay_out(lengths: Int[Array, " N"], tokens: int, width: int) -> Ragged:
    """The layout of sequences of `lengths` (0: none) in a row of `tokens`, which holds all of them; `width`: at least
    the longest.
    """
    count = lengths.shape[0]
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    order = jnp.arange(tokens)
    owner = jnp.sum(order[:, None] >= ends, axis=1, dtype=jnp.int32)
    inside = jnp.minimum(owner, count - 1)
    positions = order - starts[inside]
    last = jnp.clip(ends - 1, 0, tokens - 1)
    return Ragged(
        owner,
        positions,
        last,
        to_rows=jnp.minimum(starts[:, None] + jnp.arange(width), last[:, None]),
        to_one=inside * width + jnp.minimum(positions, width - 1),
    )
