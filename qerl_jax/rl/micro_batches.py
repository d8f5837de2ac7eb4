"""Sequences of a batch packed end to end into micro-batches of a fixed number of tokens, each prompt once.

A sequence is a prefix, its prompt, and a suffix, its completion. A micro-batch holds a prefix once for all its
sequences with that prompt, as GRPO's groups have it: to the layers the tokens of a prompt are the same in each of them,
and their gradients add up. First come the prefixes, then the suffixes, those of a prefix side by side.

The host assigns sequences to micro-batches (it knows tokens and lengths after the rollout); everything else happens on
the device, in shapes that depend on the limits alone.

Axes: B sequences of the batch, M micro-batches, P prefixes of a micro-batch, S its suffixes, G = P + S segments, T its
tokens, L tokens of a padded sequence, C completion tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from qerl_jax.buckets import power_of_two
from qerl_jax.models.packed_sequences import segments

_PREFIXES, _SUFFIXES = 32, 128  # that a layout has room for, at least: arrays of integers


@dataclasses.dataclass(frozen=True)
class PackShape:
    """Shape of micro-batches, the same for a whole run. Hashable: static under jit.

    On a GPU the memory and time of attention grow with the product of segments and the longest one's tokens, whatever
    the others have. So a micro-batch holds either many short segments or few of any length.

    Attributes:
      tokens: T, at least `longest`.
      prefixes: P, most different prompts in it.
      suffixes: S, most sequences in it.
      longest: most tokens of one sequence.
      longest_prefix: most tokens of a prefix.
      longest_suffix: most tokens of a suffix.
      short: most tokens of a short segment; None: all are short.
      suffixes_beside_long: most sequences where a segment is not short; None: S.
      has_half: whether the last micro-batches may have half the tokens (`half`).
    """

    tokens: int
    prefixes: int
    suffixes: int
    longest: int
    longest_prefix: int
    longest_suffix: int
    short: int | None = None
    suffixes_beside_long: int | None = None
    has_half: bool = False

    def __post_init__(self):
        if self.tokens < self.longest:
            raise ValueError(f"a micro-batch of {self.tokens} tokens cannot hold a sequence of {self.longest}")

    @property
    def longest_segment(self) -> int:
        """Most tokens of a segment."""
        return max(self.longest_prefix, self.longest_suffix)

    def most_suffixes(self, segment: int) -> int:
        """Most sequences of a micro-batch whose longest segment has so many tokens."""
        return self.suffixes if self.short is None or segment <= self.short else self.suffixes_beside_long

    def holding(self, segment: int) -> PackShape:
        """The shape of a whole micro-batch whose longest segment has so many tokens: of two, unless all are short."""
        if self.short is None:
            return self.wholes()
        longest = self.short if segment <= self.short else self.longest_segment
        prefix, suffix = min(self.longest_prefix, longest), min(self.longest_suffix, longest)
        return dataclasses.replace(
            self.wholes(),
            suffixes=self.most_suffixes(segment),
            longest=min(self.longest, prefix + suffix),
            longest_prefix=prefix,
            longest_suffix=suffix,
            short=None,
            suffixes_beside_long=None,
        )

    def wholes(self) -> PackShape:
        """The shape of whole micro-batches alone."""
        return dataclasses.replace(self, has_half=False)

    def half(self) -> PackShape | None:
        """The shape of half the tokens, all of short segments; None: there is none.

        It holds as many sequences as T tokens do, because the last ones are the shortest. What attention computes for
        empty segments is mostly less, too: it grows with tokens and prefixes.
        """
        if not self.has_half:
            return None
        short = self.holding(1)
        return dataclasses.replace(short, tokens=self.tokens // 2, prefixes=self.prefixes // 2 + 1)

    def roomy(self) -> PackShape:
        """The shape with so much room for prefixes and suffixes that other groups have the same."""
        prefixes, suffixes = max(_PREFIXES, power_of_two(self.prefixes)), max(_SUFFIXES, power_of_two(self.suffixes))
        return dataclasses.replace(self, prefixes=prefixes, suffixes=suffixes)

    def kinds(self) -> list[PackShape]:
        """All shapes that `holding` and `half` give, the half last."""
        wholes = dict.fromkeys((self.holding(1), self.holding(self.longest_segment)))
        return [*wholes, *filter(None, [self.half()])]


class Assignment(NamedTuple):
    """The sequences of a micro-batch, or with a leading axis M of all.

    Attributes:
      rows: the sequence of each suffix, -1 for none; those of one prefix are neighbours.
      prefix_of: the prefix of each suffix.
    """

    rows: Int32[np.ndarray, "*M S"]
    prefix_of: Int32[np.ndarray, "*M S"]

    def micro_batches(self) -> list[Assignment]:
        """That of each micro-batch."""
        return [Assignment(*some) for some in zip(*self, strict=True)]

    def with_room(self, suffixes: int) -> Assignment:
        """That of one micro-batch, with room for so many sequences."""
        more = (0, suffixes - len(self.rows))
        return Assignment(np.pad(self.rows, more, constant_values=-1), np.pad(self.prefix_of, more))


def prompts_of(tokens: Int[np.ndarray, "B L"], prompt_lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """A number for each row's prompt, equal where all tokens of the prompts are."""
    numbers: dict[bytes, int] = {}
    prompts = (np.ascontiguousarray(row[:length]).tobytes() for row, length in zip(tokens, prompt_lengths, strict=True))
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], int)


def assign(
    lengths: Int[np.ndarray, " B"],
    prompt_lengths: Int[np.ndarray, " B"],
    prompts: Int[np.ndarray, " B"],
    shape: PackShape,
) -> Assignment:
    """Sequences of each micro-batch: groups of one prompt by decreasing size, a group's sequences by decreasing length,
    each into the first micro-batch that has its prefix and room, else the first with room for both. There is room for
    `tokens`, and for as many sequences as `PackShape.most_suffixes` of the longest segment.

    Sequences of length 0 are left out. There is at least one micro-batch.

    Args:
      lengths: tokens of each sequence.
      prompt_lengths: tokens of its prompt.
      prompts: its prompt, as `prompts_of` numbers them.
      shape: shape of every micro-batch.

    Raises:
      ValueError: a sequence, or a part of one, is longer than the shape announces.
    """
    suffixes = np.maximum(lengths - prompt_lengths, 0)
    _check(lengths, prompt_lengths, suffixes, shape)
    totals = np.bincount(prompts, lengths) if lengths.size else lengths
    bins = [_Bin(shape)]
    for row in np.lexsort((-lengths, prompts, -totals[prompts])):
        if lengths[row] == 0:
            continue
        prompt, prefix, suffix = int(prompts[row]), int(prompt_lengths[row]), int(suffixes[row])
        sharing = (some for some in bins if prompt in some.groups and some.fits(0, suffix))
        others = (some for some in bins if len(some.groups) < shape.prefixes and some.fits(prefix, suffix))
        some = next(itertools.chain(sharing, others), None)
        if some is None:
            bins.append(some := _Bin(shape))
        some.add(int(row), prompt, 0 if prompt in some.groups else prefix, suffix)
    return _table([list(some.groups.values()) for some in bins], shape)


class MicroBatch(NamedTuple):
    """The sequences of a micro-batch.

    Attributes:
      assignment: which.
      kind: its shape, of `PackShape.kinds`.
    """

    assignment: Assignment
    kind: PackShape


def divide(
    lengths: Int[np.ndarray, " B"],
    prompt_lengths: Int[np.ndarray, " B"],
    prompts: Int[np.ndarray, " B"],
    shape: PackShape,
    replicas: int = 1,
) -> list[MicroBatch]:
    """The micro-batches that `assign` fills, dealt to so many replicas in rounds. Where the sequences of the last round
    fit as many halves as there are replicas, or fewer, it consists of those.

    Args and raises as `assign`.
    """
    longest = np.maximum(prompt_lengths, lengths - prompt_lengths)

    def filled(lengths: np.ndarray, shape: PackShape) -> list[MicroBatch]:
        found = []
        for some in assign(lengths, prompt_lengths, prompts, shape).micro_batches():
            if (used := some.rows[some.rows >= 0]).size:
                found.append(MicroBatch(some, shape.holding(int(longest[used].max()))))
        return found

    found, half = filled(lengths, shape), shape.half()
    before = max(0, len(found) - 1) // replicas * replicas
    last = found[before:]
    if half and all(some.kind == shape.holding(1) for some in last):
        rows = [some.assignment.rows for some in last]
        halves = filled(np.where(np.isin(np.arange(lengths.size), rows), lengths, 0), half)
        last = halves if len(halves) <= replicas else last
    return found[:before] + last


class _Bin:
    """A micro-batch: its sequences by prompt, their tokens, and the longest segment's."""

    def __init__(self, shape: PackShape):
        self.shape = shape
        self.groups: dict[int, list[int]] = {}
        self.tokens, self.suffixes, self.longest = 0, 0, 0

    def fits(self, prefix: int, suffix: int) -> bool:
        most = self.shape.most_suffixes(max(self.longest, prefix, suffix))
        return self.suffixes < most and self.tokens + prefix + suffix <= self.shape.tokens

    def add(self, row: int, prompt: int, prefix: int, suffix: int) -> None:
        self.groups.setdefault(prompt, []).append(row)
        self.tokens += prefix + suffix
        self.suffixes += 1
        self.longest = max(self.longest, prefix, suffix)


def _check(lengths: np.ndarray, prefixes: np.ndarray, suffixes: np.ndarray, shape: PackShape) -> None:
    used = lengths > 0
    for what, found, most in (
        ("a sequence", lengths, shape.longest),
        ("a prompt", prefixes, shape.longest_prefix),
        ("a completion", suffixes, shape.longest_suffix),
    ):
        if used.any() and found[used].max() > most:
            raise ValueError(f"{what} of {found[used].max()} tokens, at most {most} were announced")


def _table(bins: list[list[list[int]]], shape: PackShape) -> Assignment:
    """From the sequences of each prefix of each micro-batch."""
    rows = np.full((len(bins), shape.suffixes), -1, np.int32)
    prefix_of = np.zeros_like(rows)
    for i, groups in enumerate(bins):
        some = [(row, prefix) for prefix, group in enumerate(groups) for row in group]
        for s, (row, prefix) in enumerate(some):
            rows[i, s], prefix_of[i, s] = row, prefix
    return Assignment(rows, prefix_of)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Where the sequences of a micro-batch lie. Segments are its prefixes, then its suffixes.

    Attributes:
      rows: the sequence of each suffix; B for an empty one.
      prefix_of: the prefix of each suffix.
      row_of: a sequence that each segment's tokens belong to.
      starts: each segment's first token.
      lengths: its tokens, 0 for an empty one.
      segment_ids: the segment of each token; P + S on the filler behind the last one.
      places: each token's place in its segment; distinct values on the filler.
      positions: its position in its sequence.
      real: False on the filler.
    """

    rows: Int32[Array, " S"]
    prefix_of: Int32[Array, " S"]
    row_of: Int32[Array, " G"]
    starts: Int32[Array, " G"]
    lengths: Int32[Array, " G"]
    segment_ids: Int32[Array, " T"]
    places: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    real: Bool[Array, " T"]

    @property
    def prefixes(self) -> int:
        """P."""
        return self.starts.shape[0] - self.rows.shape[0]


def pack(
    assignment: Assignment,
    lengths: Int32[Array, " B"],
    prompt_lengths: Int32[Array, " B"],
    tokens: int,
    prefixes: int,
) -> Packed:
    """The layout of a micro-batch with room for so many tokens and prefixes, from the sequences assigned to it."""
    rows, prefix_of = map(jnp.asarray, assignment)
    used = rows >= 0
    row = jnp.maximum(rows, 0)
    has = used & (prefix_of == jnp.arange(prefixes)[:, None])  # [P, S]
    first = row[jnp.argmax(has, axis=1)]
    prefix = jnp.where(has.any(axis=1), prompt_lengths[first], 0)
    suffix = jnp.where(used, jnp.maximum(lengths[row] - prompt_lengths[row], 0), 0)
    own = jnp.concatenate([prefix, suffix])
    starts, _, segment_ids, inside, places = segments(own, tokens)
    before = jnp.concatenate([jnp.zeros_like(prefix), prefix[prefix_of]])
    return Packed(
        rows=jnp.where(used, rows, lengths.shape[0]),
        prefix_of=prefix_of,
        row_of=jnp.concatenate([first, row]),
        starts=starts,
        lengths=own,
        segment_ids=segment_ids,
        places=places,
        positions=places + before[inside],
        real=segment_ids < own.shape[0],
    )


def packed_tokens(tokens: Int32[Array, "B L"], packed: Packed) -> Int32[Array, " T"]:
    """Token ids of a micro-batch; 0 on the filler."""
    row = packed.row_of[jnp.minimum(packed.segment_ids, packed.row_of.shape[0] - 1)]
    column = jnp.clip(packed.positions, 0, tokens.shape[1] - 1)
    return jnp.where(packed.real, tokens[row, column], 0)


def predictors(packed: Packed, completion: int) -> Int32[Array, "S C"]:
    """Place of the token that predicts token c of each completion, for c = 0 the prompt's last one; meaningless where
    there is none.
    """
    within = packed.starts[packed.prefixes :, None] + jnp.arange(completion) - 1
    places = within.at[:, 0].set(last_of_prompts(packed)[packed.prefix_of])
    return jnp.clip(places, 0, packed.real.shape[0] - 1)


def last_of_prompts(packed: Packed) -> Int32[Array, " P"]:
    """Place of each prefix's last token; before its start where it is empty."""
    return (packed.starts + packed.lengths - 1)[: packed.prefixes]
