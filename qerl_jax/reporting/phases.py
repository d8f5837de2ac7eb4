"""Times of the phases of a run."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator


class Phases:
    """Times the phases of a run, one at a time.

    Args:
      clock: seconds.

    Attributes:
      totals: seconds of each phase since this object was made.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._untaken: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run a block as the phase `name`."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            self.totals[name] += seconds
            self._untaken[name] += seconds

    def take(self, *names: str) -> dict[str, float]:
        """`time/NAME` in seconds of some phases since they were last taken; 0 for one that did not run."""
        return {f"time/{name}": self._untaken.pop(name, 0.0) for name in names}
