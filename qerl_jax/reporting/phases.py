"""Phases of a run: their times, and a heartbeat.

`heartbeat.json` names the current step and phase and the time of its start, for an external watcher.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from qerl_jax.atomic import write_json
from qerl_jax.checkpoint.run_files import HEARTBEAT_FILE
from qerl_jax.reporting.console import say


class Phases:
    """Times the phases of a run, one at a time.

    Args:
      directory: the run's output_dir; None: no heartbeat.
      console: console that reports a heartbeat that cannot be written.
      clock: seconds.

    Attributes:
      step: step in progress, from 1; 0 before the first.
      totals: seconds of each phase since this object was made.
    """

    def __init__(self, directory: Path | None, console: Console, clock: Callable[[], float] = time.perf_counter):
        self._directory, self._console, self._clock = directory, console, clock
        self._untaken: Counter[str] = Counter()
        self.step = 0
        self.totals: Counter[str] = Counter()
        self._warned = False

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run a block as the phase `name`."""
        self.beat(name)
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            self.totals[name] += seconds
            self._untaken[name] += seconds

    def beat(self, name: str) -> None:
        """Write the heartbeat: `name` begins now. A failure to write is reported once and does not end the run."""
        if self._directory is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        beat = {"time": now, "pid": os.getpid(), "step": self.step, "phase": name}
        try:
            write_json(self._directory / HEARTBEAT_FILE, beat, sync=False)  # three a step: no wait for the disk
        except OSError as error:
            if not self._warned:
                self._warned = True
                say(self._console, f"{error}; the run continues")

    def take(self, *names: str) -> dict[str, float]:
        """`time/NAME` in seconds of some phases since they were last taken; 0 for one that did not run."""
        return {f"time/{name}": self._untaken.pop(name, 0.0) for name in names}
