"""A pool of worker processes for grading, each of which can be killed: at a time limit, after a crash, or after a
number of tasks.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Crashed, RewardError, TimedOut, from_json
from qerl_jax.rewards.worker import BOOT

RECYCLE_TASKS = 2_000
START_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""Extra time of a worker for the reward `code`, which keeps its own time limit."""
MAX_FAILURES = 64
"""Consecutive failures after which a reward counts as broken."""
Rows = Mapping[str, Sequence[Any]]


class _Worker:
    """A worker process. It is busy while `task` is set, and starting while `task` is -1. `number` is that of the last
    task it was sent, counted over the pool's life: a reply with another one is a stray.
    """

    STARTING = -1

    def __init__(self, names: Sequence[str]):
        self.connection, theirs = Pipe()
        order = {
            "path": sys.path,
            "package": str(Path(functions.__file__).parents[1]),
            "descriptor": theirs.fileno(),
            "rewards": list(names),
            "parent": os.getpid(),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of a reward goes to stderr
            env=os.environ | {"JAX_PLATFORMS": "cpu"},  # a reward that uses JAX must not take the accelerator
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C goes to the trainer, which finishes its step first
        )
        theirs.close()
        self.done = 0
        self.task: int | None = self.STARTING
        self.number = self.STARTING
        self.deadline = time.monotonic() + START_SECONDS

    def stop(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


class WorkerPool:
    """Processes that grade tasks in parallel; results come in the order of the tasks.

    A task that takes longer than `timeout` seconds, or whose process dies (segmentation fault, `os._exit`, out of
    memory), fails alone, and its worker is replaced. A worker is also replaced after `recycle` tasks. All processes end
    with `close`, with this object, or with this process, even if it is killed.
    """

    def __init__(self, names: Sequence[str], count: int, timeout: float, recycle: int = RECYCLE_TASKS):
        """Start the processes and wait until they have loaded the rewards. Raises RewardError if they cannot."""
        self._names, self._timeout, self._recycle = list(names), timeout, recycle
        self._numbers = itertools.count()
        self._succeeded: set[str] = set()
        self._failures: dict[str, list[type]] = {name: [] for name in names}  # since the last success
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        self._workers += [_Worker(names) for _ in range(count)]
        with self._closed_on_error():
            while any(worker.task == _Worker.STARTING for worker in self._workers):
                self._step()

    def close(self) -> None:
        """End all processes."""
        self._finalizer()

    def grade(self, name: str, tasks: Sequence[Rows]) -> list[list[float | None]]:
        """Values of each task; the rows of a failed task have the value TimedOut or Crashed.

        Raises RewardError if the reward raises, if `MAX_FAILURES` consecutive tasks fail, or if all tasks of a reward
        fail that never succeeded before. (One that did succeed may fail a whole call: a step can be a single task.)
        """
        results: dict[int, list[float | None]] = {}
        waiting = collections.deque(range(len(tasks)))
        with self._closed_on_error():
            while len(results) < len(tasks):
                for worker in [worker for worker in self._workers if worker.task is None][: len(waiting)]:
                    self._send(worker, waiting, name, tasks)
                for task, outcome in self._step().items():
                    if isinstance(outcome, type):
                        self._failures[name].append(outcome)
                        results[task] = [outcome(math.nan)] * len(tasks[task]["completions"])
                    else:
                        self._failures[name].clear()
                        self._succeeded.add(name)
                        results[task] = outcome
                self._check_failures(name, len(tasks))
        return [results[task] for task in range(len(tasks))]

    def _send(self, worker: _Worker, waiting: collections.deque[int], name: str, tasks: Sequence[Rows]) -> None:
        task = waiting.popleft()
        try:
            worker.number = next(self._numbers)
            worker.connection.send((worker.number, name, tasks[task]))
        except OSError:  # it died while idle: the task has not started
            waiting.appendleft(task)
            self._replace(worker)
            return
        limit = self._timeout + (GRACE_SECONDS if name == "code" else 0.0)
        worker.task, worker.deadline = task, time.monotonic() + limit

    def _step(self) -> dict[int, Any]:
        """Wait for the next reply or deadline. Returns the values of each ended task, or the type of its failure."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        left = min(worker.deadline for worker in busy.values()) - time.monotonic()
        outcomes: dict[int, Any] = {}
        for connection in wait(list(busy), max(left, 0.0)):
            worker = busy[connection]
            outcome = self._receive(worker)
            if outcome is None:
                continue  # a stray reply; the worker is still busy
            del busy[connection]
            if worker.task != _Worker.STARTING:
                outcomes[worker.task] = outcome
            worker.task, worker.done = None, worker.done + 1
            if outcome is Crashed or worker.done > self._recycle:
                self._replace(worker)
        for worker in busy.values():
            if worker.deadline <= time.monotonic():
                if worker.task == _Worker.STARTING:
                    raise RewardError(f"rewards {self._names} were not loaded within {START_SECONDS:.0f} s")
                outcomes[worker.task] = TimedOut
                self._replace(worker)
        return outcomes

    def _receive(self, worker: _Worker) -> list[float | None] | type | None:
        """The values of the worker's task (none while it starts), Crashed, or None for a reply to another task, such as
        comes from a reward that forks.
        """
        try:
            number, kind, content = json.loads(worker.connection.recv_bytes())
            if number != worker.number:
                return None
            if kind == "values":
                return [from_json(value) for value in content]
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            if worker.task == _Worker.STARTING:
                code = worker.process.wait()
                raise RewardError(f"the worker of rewards {self._names} ended with {code} while loading") from error
            return Crashed
        if kind == "error":
            raise RewardError(content)
        return []

    def _check_failures(self, name: str, count: int) -> None:
        failures = self._failures[name]
        if len(failures) >= (MAX_FAILURES if name in self._succeeded else min(MAX_FAILURES, count)):
            late = failures.count(TimedOut)
            raise RewardError(
                f"reward {name!r} graded none of {len(failures)} tasks: {late} were stopped after reward_timeout "
                f"{self._timeout:g} s, in {len(failures) - late} the process died"
            )

    def _replace(self, worker: _Worker) -> None:
        worker.stop()
        self._workers[self._workers.index(worker)] = _Worker(self._names)

    @contextlib.contextmanager
    def _closed_on_error(self):
        try:
            yield
        except BaseException:
            self.close()
            raise
