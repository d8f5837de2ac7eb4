"""A pool of worker processes for grading, each of which is killed at a time limit and replaced."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pebble

from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Crashed, Reward, RewardError, TimedOut

RECYCLE_TASKS = 2_000
START_SECONDS = 120.0
"""Time in which a worker is to start and load the rewards."""
GRACE_SECONDS = 5.0
"""Extra time of a worker for the reward `code`, which keeps the time limit itself and scores what ran."""
MAX_FAILURES = 64
"""Consecutive failures after which a reward counts as broken."""
Rows = Mapping[str, Sequence[Any]]
Begun = tuple[pebble.ProcessPool, pebble.ProcessFuture]
_PR_SET_PDEATHSIG = 1


class _Process(SpawnProcess):
    """A worker. Its main module is `worker.py` in place of the trainer's."""

    _starting = threading.Lock()

    def start(self) -> None:
        main = types.ModuleType("__main__")
        main.__file__ = str(Path(__file__).with_name("worker.py"))
        with self._starting:
            trainer, sys.modules["__main__"] = sys.modules["__main__"], main
            try:
                super().start()
            finally:
                sys.modules["__main__"] = trainer

    def terminate(self) -> None:
        """Kill it and its children at once: SIGTERM waits for a call that holds the interpreter's lock."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()


class _Context(SpawnContext):
    """Makes the workers of a pool, and knows them."""

    def __init__(self) -> None:
        super().__init__()
        self._workers: weakref.WeakSet[_Process] = weakref.WeakSet()

    def Process(self, *args: Any, **kwargs: Any) -> _Process:
        """A worker, not started."""
        worker = _Process(*args, **kwargs)
        self._workers.add(worker)
        return worker

    def kill(self) -> None:
        """End all workers that have started."""
        for worker in tuple(self._workers):
            if worker.is_alive():
                worker.terminate()


class _Loaded:
    """Of a worker: its rewards by name, or why they cannot be loaded."""

    rewards: Mapping[str, Reward] = {}
    error: RewardError | None = None
    pid = 0


def _begin(names: Sequence[str], trainer: int) -> None:
    """Load the rewards in a worker.

    Signals that ask a group of processes to stop are for the trainer, which finishes its step first. On Linux the
    worker is killed when the trainer ends. What a reward prints goes to standard error; one that uses JAX must not take
    the accelerator.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != trainer:
            os._exit(1)
    os.dup2(2, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    _Loaded.pid = os.getpid()
    try:
        _Loaded.rewards = {name: functions.load_reward(name) for name in names}
    except RewardError as error:
        _Loaded.error = error


def _grade(name: str | None, rows: Rows) -> list[float | None]:
    """Values of a task in a worker; nothing for the name None. Raises RewardError."""
    if _Loaded.error is not None:
        raise _Loaded.error
    if name is None:
        return []
    try:
        return functions.call(name, _Loaded.rewards[name], rows)
    except KeyboardInterrupt as error:  # the reward's own: SIGINT is ignored here
        raise RewardError(f"reward {name!r} raised {error!r}") from error
    finally:
        if os.getpid() != _Loaded.pid:  # a process that the reward forked and that came back, or raised
            os._exit(0)


class WorkerPool:
    """Processes that grade tasks in parallel; results come in the order of the tasks.

    A task that takes longer than `timeout` seconds, or whose process dies (segmentation fault, `os._exit`, out of
    memory), fails alone, and its worker is replaced, as it is after `recycle` tasks. All processes end with `close`, or
    with this process, even if it is killed. Where no task ends within `start_seconds` and its time limit, as when all
    workers are stopped from outside, all of them are replaced, once.
    """

    def __init__(
        self,
        names: Sequence[str],
        count: int,
        timeout: float,
        recycle: int = RECYCLE_TASKS,
        start_seconds: float = START_SECONDS,
        max_failures: int = MAX_FAILURES,
    ):
        """Start the processes and load the rewards in one. Raises RewardError if that cannot be done."""
        self._names, self._count, self._timeout, self._recycle = list(names), count, timeout, recycle
        self._start_seconds, self._max_failures = start_seconds, max_failures
        self._succeeded: set[str] = set()
        self._failures: dict[str, list[type]] = {name: [] for name in names}  # since the last success
        self._pool: pebble.ProcessPool | None = None
        try:
            self._started().schedule(_grade, (None, {})).result(start_seconds)
        except TimeoutError as error:
            self.close()
            raise RewardError(f"rewards {self._names} were not loaded within {start_seconds:.0f} s") from error
        except BrokenProcessPool as error:
            self.close()
            raise RewardError(f"the worker of rewards {self._names} ended while loading") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        if self._pool is not None:
            self._pool.stop()
            self._context.kill()  # before pebble takes away the locks that one which is still starting asks for
            self._pool.join()
            self._pool = None

    def begin(self, name: str, rows: Rows) -> Begun | None:
        """Have a worker grade a task; `grade` takes the result where it is given what this returns. None: the pool
        broke.
        """
        pool, limit = self._started(), self._limit(name)
        with contextlib.suppress(RuntimeError):  # since it was looked at: an idle worker died
            return pool, pool.schedule(_grade, (name, rows), timeout=limit)
        return None

    def grade(
        self, name: str, tasks: Sequence[Rows], begun: Mapping[int, Begun | None] = MappingProxyType({})
    ) -> list[list[float | None]]:
        """Values of each task; the rows of a failed task have the value TimedOut or Crashed. `begun`: the tasks given
        to `begin` before, by number.

        Raises RewardError if the reward raises, if `max_failures` consecutive tasks fail, or if all tasks of a reward
        fail that never succeeded before. (One that did succeed may fail a whole call: a step can be a single task.)
        """
        results: dict[int, list[float | None]] = {}
        rounds = 0  # without a result
        try:
            while left := {task: rows for task, rows in enumerate(tasks) if task not in results}:
                if rounds:
                    self.close()
                if rounds == 3:
                    raise RewardError(f"reward {name!r}: the workers died or stopped, {len(left)} tasks are not graded")
                rounds += 1
                for task, outcome in self._outcomes(name, left, begun):
                    rounds = 0
                    is_failed = isinstance(outcome, type)
                    results[task] = [outcome(math.nan)] * len(tasks[task]["completions"]) if is_failed else outcome
                    self._check(name, outcome if is_failed else None, len(tasks))
        except BaseException:
            self.close()
            raise
        return [results[task] for task in range(len(tasks))]

    def _limit(self, name: str) -> float:
        return self._timeout + (GRACE_SECONDS if name == "code" else 0.0)

    def _outcomes(
        self, name: str, tasks: Mapping[int, Rows], begun: Mapping[int, Begun | None]
    ) -> Iterator[tuple[int, list[float | None] | type]]:
        """Number of each task, and its values or the type of its failure, in the order in which they end; nothing more
        once the pool is broken or stuck.
        """
        pool, running = self._started(), {}
        for task, rows in tasks.items():
            one = begun.get(task)
            if one is None or one[0] is not pool:  # else its pool has ended
                one = self.begin(name, rows)
            if one is None:
                return
            running[one[1]] = task
        pending = set(running)
        while pending:
            ended, pending = wait(pending, self._start_seconds + self._limit(name), FIRST_COMPLETED)
            if not ended:
                return
            for future in sorted(ended, key=running.__getitem__):
                with contextlib.suppress(BrokenProcessPool):
                    yield running[future], _outcome(future)

    def _check(self, name: str, failure: type | None, count: int) -> None:
        """Count a task that ended, one of `count`. Raises RewardError for a reward that counts as broken."""
        failures = self._failures[name]
        if failure is None:
            failures.clear()
            self._succeeded.add(name)
            return
        failures.append(failure)
        limit = self._max_failures if name in self._succeeded else min(self._max_failures, count)
        if len(failures) >= limit:
            late = failures.count(TimedOut)
            raise RewardError(
                f"reward {name!r} graded none of {len(failures)} tasks: {late} were stopped after reward_timeout "
                f"{self._timeout:g} s, in {len(failures) - late} the process died"
            )

    def _started(self) -> pebble.ProcessPool:
        """The pool, a new one where none works."""
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            self._context = _Context()
            begin = _begin, (self._names, os.getpid())
            self._pool = pebble.ProcessPool(self._count, self._recycle, *begin, self._context)
        return self._pool


def _outcome(future: pebble.ProcessFuture) -> list[float | None] | type:
    """Values of a task that ended, or the type of its failure. Raises BrokenProcessPool and RewardError."""
    try:
        return future.result()
    except TimeoutError:
        return TimedOut
    except (pebble.ProcessExpired, MemoryError):
        return Crashed
