"""Packed sequences: sequences of different lengths end to end on one token axis, without padding between them.

Projections, norms and the MLP run over the packed tokens; attention runs over padded rows of `width` tokens. For
prompts of some hundred tokens attention is a few percent of the work.

Axes: N sequences, T packed tokens, W width of a padded row.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


class Segments(NamedTuple):
    """Sequences end to end on a token axis: of each its first token and the token behind its last one; of each token
    its sequence (N for the padding behind the last), the same with the padding counted to the last, and its place in
    the sequence (distinct values for the padding).
    """

    starts: Int32[Array, " N"]
    ends: Int32[Array, " N"]
    ids: Int32[Array, " T"]
    inside: Int32[Array, " T"]
    places: Int32[Array, " T"]


def segments(lengths: Int[Array, " N"], tokens: int) -> Segments:
    """Where sequences of these lengths lie, 0 for an empty one; `tokens` is T, at least their sum."""
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    order = jnp.arange(tokens)
    ids = jnp.sum(order[:, None] >= ends, axis=1, dtype=jnp.int32)
    inside = jnp.minimum(ids, lengths.shape[0] - 1)
    return Segments(starts, ends, ids, inside, order - starts[inside])


def last_tokens(ends: Int[Array, " N"], tokens: int) -> Int32[Array, " N"]:
    """Place of each sequence's last token among `tokens`; any place where the sequence is empty."""
    return jnp.clip(ends - 1, 0, tokens - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Places of packed sequences on the token axis.

    Attributes:
      segment_ids: the sequence of each token; N for the padding behind the last sequence.
      positions: place of each token in its sequence; distinct values for the padding.
      unpack_index: the packed token at each place of a padded row. Places past a sequence's end repeat its last token:
        another sequence's token might be NaN, and 0 · NaN would pass the attention mask.
      pack_index: the place of each packed token in the flattened padded rows.
    """

    segment_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    unpack_index: Int32[Array, "N W"]
    pack_index: Int32[Array, " T"]

    def unpack(self, x: Float[Array, "T ..."]) -> Float[Array, "N W ..."]:
        """One padded row for each sequence; the row of an empty sequence is arbitrary."""
        return x[self.unpack_index]

    def pack(self, x: Float[Array, "N W ..."]) -> Float[Array, "T ..."]:
        """The inverse of `unpack`; the values of padding tokens are arbitrary."""
        return x.reshape(-1, *x.shape[2:])[self.pack_index]


def packed_layout(lengths: Int[Array, " N"], tokens: int, width: int) -> PackedLayout:
    """The layout of sequences packed in their order.

    Args:
      lengths: tokens of each sequence; 0 for an empty one.
      tokens: size of the packed axis T, at least the sum of the lengths.
      width: tokens of a padded row W, at least the longest sequence.
    """
    starts, ends, ids, inside, places = segments(lengths, tokens)
    last = last_tokens(ends, tokens)
    return PackedLayout(
        ids,
        places,
        unpack_index=jnp.minimum(starts[:, None] + jnp.arange(width), last[:, None]),
        pack_index=inside * width + jnp.minimum(places, width - 1),
    )
