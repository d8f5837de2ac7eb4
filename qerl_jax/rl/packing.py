"""Sequences of a batch packed end to end into micro-batches of a fixed number of tokens.

The host assigns sequences to micro-batches (it knows the lengths after the rollout); everything else happens on the
device, in shapes that depend on the limits alone.

Axes: B sequences of the batch, M micro-batches, S segments of a micro-batch, T its tokens, C completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from qerl_jax.models.packed_sequences import PackedLayout, packed_layout


@dataclasses.dataclass(frozen=True)
class PackShape:
    """Shape of a micro-batch, the same for a whole run. Hashable: static under jit.

    Attributes:
      tokens: T, at least `longest`.
      segments: S, most sequences in it.
      longest: most tokens of one sequence.
    """

    tokens: int
    segments: int
    longest: int

    def __post_init__(self):
        if self.tokens < self.longest:
            raise ValueError(f"a micro-batch of {self.tokens} tokens cannot hold a sequence of {self.longest}")


def assign(lengths: Int[np.ndarray, " B"], shape: PackShape) -> Int32[np.ndarray, "M S"]:
    """Sequences of each micro-batch by first-fit decreasing; -1 where a segment is empty.

    Sequences of length 0 are left out. There is at least one micro-batch.

    Args:
      lengths: tokens of each sequence.
      shape: shape of every micro-batch.

    Raises:
      ValueError: a sequence is longer than `shape.longest`.
    """
    if lengths.size and lengths.max() > shape.longest:
        raise ValueError(f"a sequence of {lengths.max()} tokens, at most {shape.longest} were announced")
    bins: list[list[int]] = [[]]
    free = [shape.tokens]
    for row in np.argsort(-lengths, kind="stable"):
        if lengths[row] == 0:
            break
        for i, some in enumerate(bins):
            if free[i] >= lengths[row] and len(some) < shape.segments:
                break
        else:
            i = len(bins)
            bins.append([])
            free.append(shape.tokens)
        bins[i].append(int(row))
        free[i] -= int(lengths[row])
    return _table(bins, shape.segments)


def assign_any(count: int, shape: PackShape) -> Int32[np.ndarray, "M S"]:
    """Sequences of each micro-batch where no length is known: as many as fit at their longest."""
    each = max(1, min(shape.segments, shape.tokens // shape.longest))
    return _table([list(range(start, min(start + each, count))) for start in range(0, count, each)], shape.segments)


def _table(bins: list[list[int]], segments: int) -> Int32[np.ndarray, "M S"]:
    rows = np.full((len(bins), segments), -1, np.int32)
    for row, some in zip(rows, bins, strict=True):
        row[: len(some)] = some
    return rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "lengths", "starts", "prompt_lengths", "layout", "real"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """Where the sequences of a micro-batch lie.

    Attributes:
      rows: the sequence of each segment; B for an empty one.
      lengths: its tokens, 0 for an empty one.
      starts: its first token's place.
      prompt_lengths: tokens of its prompt.
      layout: segment and position of each token, and the way to a padded row for each segment and back.
      real: False on the filler behind the last segment.
    """

    rows: Int32[Array, " S"]
    lengths: Int32[Array, " S"]
    starts: Int32[Array, " S"]
    prompt_lengths: Int32[Array, " S"]
    layout: PackedLayout
    real: Bool[Array, " T"]


def pack(
    rows: Int32[Array, " S"], lengths: Int32[Array, " B"], prompt_lengths: Int32[Array, " B"], shape: PackShape
) -> Packed:
    """The layout of a micro-batch from the sequences assigned to it (-1: an empty segment)."""
    used = rows >= 0
    inside = jnp.maximum(rows, 0)
    own = jnp.where(used, lengths[inside], 0)
    layout = packed_layout(own, shape.tokens, shape.longest)
    return Packed(
        rows=jnp.where(used, rows, lengths.shape[0]),
        lengths=own,
        starts=jnp.cumsum(own) - own,
        prompt_lengths=jnp.where(used, prompt_lengths[inside], 0),
        layout=layout,
        real=layout.segment_ids < rows.shape[0],
    )


def packed_tokens(tokens: Int32[Array, "B L"], packed: Packed) -> Int32[Array, " T"]:
    """Token ids of a micro-batch; 0 on the filler."""
    segment = jnp.minimum(packed.layout.segment_ids, packed.rows.shape[0] - 1)
    row = jnp.minimum(packed.rows[segment], tokens.shape[0] - 1)
    column = jnp.clip(packed.layout.positions, 0, tokens.shape[1] - 1)
    return jnp.where(packed.real, tokens[row, column], 0)


def predictors(packed: Packed, completion: int) -> Int32[Array, "S C"]:
    """Place of the token that predicts token c of each completion; meaningless where there is none."""
    places = (packed.starts + packed.prompt_lengths - 1)[:, None] + jnp.arange(completion)
    return jnp.clip(places, 0, packed.real.shape[0] - 1)
