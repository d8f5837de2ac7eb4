"""Which prompts are prefilled together: packed end to end into calls of few shapes, each of which is compiled once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a call; the last bounds what is held of them at a time
_SMALL = 512  # calls up to here have one number of rows: one shape more to compile costs more than empty rows do
_WIDTHS = (64, 256)  # of attention's rows, then doubling
_SPARSE = 4  # rows up to `_LONG` hold at most so many places a token, longer ones, whose scores are many, one
_LONG = 1024
_EFFORT = 128  # what a call costs beside its tokens, in tokens (launches, reading the weights): an estimate


@dataclasses.dataclass(frozen=True)
class Pack:
    """One prefill.

    Attributes:
      prompts: how many it takes from the queue.
      tokens: size of the one row in which they lie end to end.
      rows: prompts that it has room for.
      width: tokens of the longest that it has room for.
    """

    prompts: int
    tokens: int
    rows: int
    width: int


def pack(lengths: Sequence[int], alone: bool = False) -> list[Pack]:
    """The cheapest prefills for a queue of prompts, in its order; each is filled as far as it goes. A prompt beyond the
    largest size has one for itself.

    Args:
      lengths: tokens of each prompt, 1 or more.
      alone: each prompt has one for itself, whose shape depends on its length only.
    """
    costs, packs = [0] * (len(lengths) + 1), []
    for begin in reversed(range(len(lengths))):  # of the queue from here on: its cost, and what to begin with
        first = lengths[begin]
        if alone or first > _SIZES[-1]:
            calls = [Pack(1, _round_up(first), 1, _round_up(first))]
        else:
            calls = [_fill(lengths, begin, size) for size in _SIZES if size >= first]
        costs[begin], best = min(
            ((call.tokens + _EFFORT + costs[begin + call.prompts], call) for call in calls), key=lambda pair: pair[0]
        )
        packs.append(best)
    packs.reverse()
    chosen, begin = [], 0
    while begin < len(lengths):
        chosen.append(packs[begin])
        begin += packs[begin].prompts
    return chosen


def _fill(lengths: Sequence[int], begin: int, size: int) -> Pack:
    """A call of `size` tokens with as many prompts of the queue as it holds."""
    end, tokens, width = begin, 0, 0
    while end < len(lengths) and tokens + lengths[end] <= size:
        wider = max(width, min(_width(lengths[end]), size))
        if (end + 1 - begin) * wider > (_SPARSE if wider <= _LONG else 1) * size:
            break
        end, tokens, width = end + 1, tokens + lengths[end], wider
    count = end - begin
    sparse = _SPARSE if size <= _SMALL else next(s for s in (1, 2, _SPARSE) if count * width <= s * size)
    return Pack(count, size, sparse * size // width, width)


def _width(length: int) -> int:
    return _WIDTHS[0] if length <= _WIDTHS[0] else max(_WIDTHS[1], 1 << (length - 1).bit_length())


def _round_up(length: int) -> int:
    """The next of few sizes: four to an octave, at least 16."""
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step
