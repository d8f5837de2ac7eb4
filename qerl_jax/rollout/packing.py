"""Prefill packing: prompts lie end to end in batches of few shapes, each of which is compiled once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a batch; the last one bounds the activations
_SMALL = 512  # up to here one capacity for each width: an extra shape costs more compile time than padding costs
_WIDTHS = (64, 256)  # attention widths; then doubling
_PADDING = 4  # attention positions per token, at most, for widths up to `_LONG`; above it, where scores are large, one
_LONG = 1024
_CALL_COST = 128  # estimated fixed cost of a prefill (launches, reading the weights), in tokens


@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Shape of one prefill, and how many prompts it takes.

    Attributes:
      prompts: prompts taken from the queue.
      tokens: packed tokens, padding included.
      capacity: largest number of prompts.
      width: largest prompt length.
    """

    prompts: int
    tokens: int
    capacity: int
    width: int


def pack_prompts(lengths: Sequence[int], separate: bool = False) -> list[PrefillBatch]:
    """The cheapest sequence of prefills for a queue of prompts, in order. A prompt longer than the largest size gets a
    batch of its own.

    Args:
      lengths: tokens of each prompt, 1 or more.
      separate: one batch for each prompt, whose shape depends on that prompt's length only.
    """
    costs, first_batches = [0] * (len(lengths) + 1), []
    for begin in reversed(range(len(lengths))):  # dynamic programming over the rest of the queue
        first = lengths[begin]
        if separate or first > _SIZES[-1]:
            batches = [PrefillBatch(1, _round_up(first), 1, _round_up(first))]
        else:
            batches = [_fill(lengths, begin, size) for size in _SIZES if size >= first]
        costs[begin], best = min(
            ((batch.tokens + _CALL_COST + costs[begin + batch.prompts], batch) for batch in batches),
            key=lambda pair: pair[0],
        )
        first_batches.append(best)
    first_batches.reverse()
    chosen, begin = [], 0
    while begin < len(lengths):
        chosen.append(first_batches[begin])
        begin += first_batches[begin].prompts
    return chosen


def _fill(lengths: Sequence[int], begin: int, size: int) -> PrefillBatch:
    """A batch of `size` tokens with as many prompts of the queue as fit."""
    end, tokens, width = begin, 0, 0
    while end < len(lengths) and tokens + lengths[end] <= size:
        wider = max(width, min(_width(lengths[end]), size))
        if (end + 1 - begin) * wider > (_PADDING if wider <= _LONG else 1) * size:
            break
        end, tokens, width = end + 1, tokens + lengths[end], wider
    count = end - begin
    padding = _PADDING if size <= _SMALL else next(p for p in (1, 2, _PADDING) if count * width <= p * size)
    return PrefillBatch(count, size, padding * size // width, width)


def _width(length: int) -> int:
    return _WIDTHS[0] if length <= _WIDTHS[0] else max(_WIDTHS[1], 1 << (length - 1).bit_length())


def _round_up(length: int) -> int:
    """The next of four sizes per octave, at least 16."""
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step
