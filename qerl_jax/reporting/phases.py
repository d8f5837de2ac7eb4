"""Phases of a run: their times, a heartbeat, and a watchdog that dumps all stacks when one takes too long.

An external watcher needs two files: `heartbeat.json` names the current step and phase and the time of its start, and
`stacks.txt` holds the stack of every thread at the time when a phase passed the limit.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from qerl_jax.io.files import naming, write_json
from qerl_jax.io.run_files import HEARTBEAT_FILE, STACKS_FILE


class Phases:
    """Times and watches the phases of a run, one at a time.

    A Python thread writes the stacks from `sys._current_frames`. `faulthandler` would also catch a native call that
    never releases the interpreter lock, but it reads frames and threads while they change, which crashed runs. Only
    the age of the heartbeat shows such a call. The run continues either way; when the overdue phase ends, a line says
    how long it took.

    Args:
      directory: the run's output_dir.
      limit: seconds after which a phase is overdue; None: never.
      console: console that reports an overdue phase.

    Attributes:
      step: step in progress, from 1; 0 before the first.
      totals: seconds of each phase since this object was made.
      overdue: phases that passed the limit.
    """

    def __init__(self, directory: Path, limit: float | None, console: Console):
        self._directory, self._limit, self._console = directory, limit, console
        self._untaken: Counter[str] = Counter()
        self.step = 0
        self.totals: Counter[str] = Counter()
        self.overdue = 0
        self._warned = False

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run a block as the phase `name`."""
        self.beat(name)
        began = time.perf_counter()
        try:
            with self._watched(name):
                yield
        finally:
            seconds = time.perf_counter() - began
            self.totals[name] += seconds
            self._untaken[name] += seconds
            if self._limit is not None and seconds > self._limit:
                self._console.print(f"step {self.step}: {name} took {seconds:.1f} s", markup=False)

    def beat(self, name: str) -> None:
        """Write the heartbeat: `name` begins now. A failure to write is reported once and does not end the run."""
        beat = {"time": _now(), "pid": os.getpid(), "step": self.step, "phase": name}
        with self._told_once():
            write_json(self._directory / HEARTBEAT_FILE, beat)

    def take(self, *names: str) -> dict[str, float]:
        """`time/NAME` in seconds of some phases since they were last taken; 0 for one that did not run."""
        return {f"time/{name}": self._untaken.pop(name, 0.0) for name in names}

    @contextlib.contextmanager
    def _told_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._console.print(f"{error}; the run continues", soft_wrap=True, markup=False)

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        if self._limit is None:
            yield
            return
        timer = threading.Timer(self._limit, self._dump, [f"step {self.step}: {name}"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _dump(self, what: str) -> None:
        self.overdue += 1
        path = self._directory / STACKS_FILE
        with self._told_once(), naming(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{_now()} {what} is running longer than watchdog_seconds {self._limit:g}. Every thread:\n\n")
            file.write(_stacks() + "\n")
        self._console.print(
            f"{what} is running longer than watchdog_seconds {self._limit:g}; every thread's stack is in {path}",
            soft_wrap=True,
            markup=False,
        )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _stacks() -> str:
    """Every thread's stack, the newest call last; the thread that asks left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )
