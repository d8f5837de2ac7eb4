"""Prefill packing: prompts lie end to end in batches whose shapes come from a short list, fixed before the rollout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from qerl_jax.buckets import bucket, power_of_two, round_up

# Sizes of a batch of several prompts, the same in all runs: padding of some percent, one compilation each. The largest
# bounds the activations. For 8 prompts of a 7B model the smallest saves 15 ms a rollout, and costs 3 s at the start.
_SIZES = (512, 2048, 8192)
_WIDTHS = (256, 1024, 4096)  # attention widths of shorter prompts, beside that of the longest
_SEVERAL_WIDTHS = 2048  # tokens of the smallest batch with several widths
_PADDING = 4  # attention positions per token, at most, for widths up to `_LONG`; above it, where scores are large, one
_LONG = 1024
_WIDTH_MULTIPLE = 64  # tokens of cuDNN's tiles
_CALL_COST = 128  # estimated fixed cost of a prefill (launches, reading the weights), in tokens


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Shape of a prefill, compiled once.

    Attributes:
      tokens: packed tokens, padding included.
      capacity: largest number of prompts.
      width: largest prompt length.
    """

    tokens: int
    capacity: int
    width: int


@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """One prefill.

    Attributes:
      prompts: number of prompts taken from the queue.
      shape: shape of the call.
    """

    prompts: int
    shape: PrefillShape


def prefill_shapes(
    prompts: int, prompt_length: int, separate: bool = False, at_once: bool = False
) -> tuple[PrefillShape, ...]:
    """All shapes that the prefills of a rollout may have, smallest first.

    There are at most three for prompts of up to 512 tokens, five for up to 1024 and nine for up to 8192.

    Args:
      prompts: prompts of the rollout, P.
      prompt_length: longest prompt, tokens.
      separate: one prompt a batch; more shapes, so that a batch's shape depends on its prompt's length only.
      at_once: all prompts are prefilled before the first decode step. No single prompt is, later, for which small
        shapes would be worth their compilation; and the largest shape has room for half of what all may have, since
        most are shorter than the longest.
    """
    if separate:
        return tuple(PrefillShape(size, 1, size) for size in _sizes_up_to(prompt_length, above=0))
    longest = round_up(bucket(prompt_length), _WIDTH_MULTIPLE)
    total = prompts * prompt_length
    largest = power_of_two(total)
    if at_once:
        largest = max(largest // 2, _SIZES[1], power_of_two(prompt_length))
    sizes = [_SIZES[0]]
    for smaller, size in itertools.pairwise(_SIZES):  # a larger one in place of four, or for a longer prompt
        if 4 * smaller <= total or smaller < prompt_length:
            sizes.append(min(size, largest))
    sizes = sizes[at_once:] or sizes
    widths = [*(width for width in _WIDTHS if width < (longest / 2 if longest <= _LONG else longest)), longest]
    # Small batches have one width: a compilation costs more than their padding.
    pairs = [(size, width) for size in sizes for width in (widths if size >= _SEVERAL_WIDTHS else widths[-1:])]
    shapes = {_with_width(size, min(width, size)) for size, width in pairs}
    alone = [PrefillShape(size, 1, size) for size in _sizes_up_to(prompt_length, above=_SIZES[-1])]
    return tuple(sorted(shapes, key=lambda shape: (shape.tokens, shape.width))) + tuple(alone)


def pack_prompts(lengths: Sequence[int], shapes: Sequence[PrefillShape]) -> list[PrefillBatch]:
    """The cheapest sequence of prefills for a queue of prompts, in order.

    Args:
      lengths: tokens of each prompt, 1 or more.
      shapes: shapes to choose from; one of them holds the longest prompt.
    """
    costs, first_batches = [0] * (len(lengths) + 1), []
    for begin in reversed(range(len(lengths))):  # dynamic programming over the rest of the queue
        batches = [PrefillBatch(count, shape) for shape in shapes if (count := _count(lengths, begin, shape))]
        costs[begin], best = min(
            ((batch.shape.tokens + _CALL_COST + costs[begin + batch.prompts], batch) for batch in batches),
            key=lambda pair: pair[0],
        )
        first_batches.append(best)
    first_batches.reverse()
    chosen, begin = [], 0
    while begin < len(lengths):
        chosen.append(first_batches[begin])
        begin += first_batches[begin].prompts
    return chosen


def _count(lengths: Sequence[int], begin: int, shape: PrefillShape) -> int:
    """Number of prompts, from `begin` on, that fit a shape."""
    end, tokens = begin, 0
    while end < len(lengths) and end - begin < shape.capacity and lengths[end] <= shape.width:
        tokens += lengths[end]
        if tokens > shape.tokens:
            break
        end += 1
    return end - begin


def _with_width(tokens: int, width: int) -> PrefillShape:
    return PrefillShape(tokens, (_PADDING if width <= _LONG else 1) * tokens // width, width)


def _sizes_up_to(length: int, above: int) -> list[int]:
    """Sizes beyond `above`, four to an octave, of which the last one holds `length` tokens."""
    sizes, size = [], above
    while size < length:
        size = round_up(size + 1, max(16, power_of_two(size + 1) // 8))
        sizes.append(size)
    return sizes
