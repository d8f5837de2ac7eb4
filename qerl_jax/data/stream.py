"""Data order as a pure function of (seed, cursor): resuming needs no other state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
_WHICH_SET = (0, 0, 1)  # words of the seed sequence after the seed; the orders within sets have two


def at_cursor(items: Sequence[T], seed: int | None, cursor: int, count: int, stream: int = 0) -> list[T]:
    """The `count` items that follow the first `cursor` of a run: each epoch is a permutation that depends on (seed,
    epoch, stream) alone; without a seed, all items in their order.
    """
    if seed is None:
        return [items[place % len(items)] for place in range(cursor, cursor + count)]
    epochs = range(cursor // len(items), (cursor + count - 1) // len(items) + 1)
    order = np.concatenate([np.random.default_rng([seed, epoch, stream]).permutation(len(items)) for epoch in epochs])
    start = cursor - epochs[0] * len(items)
    return [items[index] for index in order[start : start + count]]


@dataclasses.dataclass(frozen=True)
class ProblemStream(Generic[T]):
    """Endless items of one or several sets.

    Without weights the sets are concatenated. With weights, each draw takes set s with probability
    `weights[s] / sum(weights)`, and the next item in that set's own order: no item repeats before its set is exhausted.

    Attributes:
      sets: items of each set, in the order of their source.
      weights: of the sets.
      seed: seed of the order and of the draws among sets.
      shuffled: whether the order is a permutation by the seed, new in each epoch.
      key: sorts what is not shuffled, smallest first, equal ones in the order of the source; None: that order.
    """

    sets: tuple[Sequence[T], ...]
    weights: tuple[float, ...] | None
    seed: int
    shuffled: bool = True
    key: Callable[[T], Any] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @functools.cached_property
    def _ordered(self) -> list[list[T]]:
        """The sets, of which one is made without weights, each in the order of an epoch that is not shuffled."""
        whole = [[item for items in self.sets for item in items]] if self.weights is None else map(list, self.sets)
        return [sorted(items, key=self.key) if self.key else items for items in whole]

    def at(self, cursor: int, count: int) -> list[T]:
        """The `count` items that follow the first `cursor` of a run."""
        seed = self.seed if self.shuffled else None
        if self.weights is None:
            return at_cursor(self._ordered[0], seed, cursor, count)
        borders = np.cumsum(self.weights)[:-1] / np.sum(self.weights)
        # Drawn from the start, so that a draw depends on its position alone: a longer array begins with a shorter one.
        draws = np.random.default_rng([self.seed, *_WHICH_SET]).random(cursor + count)
        which = np.searchsorted(borders, draws, side="right")
        mixed = {}
        for s, items in enumerate(self._ordered):
            places = np.flatnonzero(which[cursor:] == s)
            if len(places):
                before = int(np.count_nonzero(which[:cursor] == s))
                mixed |= dict(zip(places, at_cursor(items, seed, before, len(places), s + 1), strict=True))
        return [mixed[place] for place in range(count)]
