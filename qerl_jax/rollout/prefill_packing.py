"""Prefill packing: prompts lie end to end in batches whose shapes come from a short list, fixed before the rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_MAX_TOKENS = 8192  # largest batch of several prompts; bounds the activations
_MIN_TOKENS = 256
_MIN_TOKENS_AT_ONCE = (
    1024  # for 8 prompts of a 7B model a smaller size saves 15 ms a rollout, and costs 3 s at the start
)
_SIZE_RATIO = 4  # between one batch size and the next: padding of some percent, one compilation each
_WIDTHS = (256, 1024, 4096)  # attention widths of shorter prompts, beside that of the longest
_SEVERAL_WIDTHS = 2048  # tokens of the smallest batch with several widths
_PADDING = 4  # attention positions per token, at most, for widths up to `_LONG`; above it, where scores are large, one
_LONG = 1024
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
        shapes would be worth their compilation.
    """
    if separate:
        return tuple(PrefillShape(size, 1, size) for size in _sizes_up_to(prompt_length, above=0))
    largest = min(_MAX_TOKENS, _power_of_two(max(prompts * prompt_length, _MIN_TOKENS)))
    sizes, smallest = [largest], _MIN_TOKENS_AT_ONCE if at_once else _MIN_TOKENS
    while sizes[0] // _SIZE_RATIO >= smallest:
        sizes.insert(0, sizes[0] // _SIZE_RATIO)
    longest = _round_up(prompt_length, 64)
    widths = [*(width for width in _WIDTHS if width < (longest / 2 if longest <= _LONG else longest)), longest]
    # Small batches have one width: a compilation costs more than their padding.
    pairs = [(size, width) for size in sizes for width in (widths if size >= _SEVERAL_WIDTHS else widths[-1:])]
    shapes = {_with_width(size, min(width, size)) for size, width in pairs}
    alone = [PrefillShape(size, 1, size) for size in _sizes_up_to(prompt_length, above=_MAX_TOKENS)]
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
        size = _round_up(size + 1, max(16, _power_of_two(size + 1) // 8))
        sizes.append(size)
    return sizes


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
