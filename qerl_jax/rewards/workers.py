"""Rewards graded in processes that can be killed: by a time limit, by a crash, after a number of tasks.

The way to a worker and back costs 0.1 ms a task (1,000 tasks on two cores: 0.1 s); the built-in rewards that stay in
the trainer take 0.2 to 54 ms for 1,000 completions of 2,000 characters, `math_verify` 6 s (`tools/results/LOG.md`).
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Crashed, Reward, RewardError, TimedOut
from qerl_jax.rewards.worker import BOOT

ALONE = ("math_verify", "code")
"""Built-in rewards that are graded in workers, one completion at a time: both can take any time. The others are
searches in linear time, cheaper than the way there."""
RECYCLE_TASKS = 2_000
START_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""Longer than its own limit that a worker may take: `code` counts its time itself."""
GIVE_UP = 64
"""Failures in a row after which a reward counts as one that does not answer any more."""
log = logging.getLogger("qerl_jax")
Rows = Mapping[str, Sequence[Any]]


class Rewards(dict[str, Reward]):
    """Rewards by name, and the workers that grade some of them; a context that ends the workers."""

    workers: Workers | None = None

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers."""
        if self.workers is not None:
            self.workers.close()


def check_rewards(names: Sequence[str], workers: int, timeout: float, allow_code_execution: bool = False) -> None:
    """Raise RewardError for what `load_rewards` refuses before it runs anything: limits out of range, unknown names,
    built-in rewards whose packages or system features are not there, and "code" without `allow_code_execution`.
    """
    if workers < 0:
        raise RewardError(f"reward_workers must be at least 0, got {workers}")
    if not timeout > 0:
        raise RewardError(f"reward_timeout must be above 0, got {timeout}")
    if "code" in names and not allow_code_execution:
        raise RewardError(
            "reward 'code' runs programs that the policy wrote: refused without allow_code_execution "
            "(--allow-code-execution)"
        )
    for name in names:
        if name in functions.BUILT_IN:
            functions.load_reward(name)
        else:
            functions.reward_file(name)


def load_rewards(
    names: Sequence[str],
    workers: int,
    timeout: float,
    say: Callable[[str], None] = log.warning,
    allow_code_execution: bool = False,
) -> Rewards:
    """Rewards by name, ready to be called.

    Args:
      names: as `functions.load_reward` takes them. "file.py:function" and those of `ALONE` go to workers, the function
        of a file with all completions of one prompt at a time.
      workers: processes; 0 grades everything in this one, without a time limit.
      timeout: seconds after which a worker's task fails.
      say: is told, once, that a time limit struck.
      allow_code_execution: without it "code" is refused.

    Raises RewardError as `check_rewards` does, and for a file whose function cannot be loaded.
    """
    check_rewards(names, workers, timeout, allow_code_execution)
    outside = [name for name in names if name in ALONE or name not in functions.BUILT_IN]
    rewards = Rewards()
    if workers and outside:
        rewards.workers = Workers(outside, workers, timeout)
    for name in names:
        if name not in outside:
            rewards[name] = functions.load_reward(name)
        elif rewards.workers is None:
            rewards[name] = _InParts(name, _here(name), say)
        else:
            rewards[name] = _InParts(name, rewards.workers.grade, say)
    return rewards


def _here(name: str) -> Callable[[str, list[Rows]], list[list[float | None]]]:
    reward = functions.load_reward(name)
    return lambda name, tasks: [functions.call(name, reward, task) for task in tasks]


class _InParts:
    """A reward as a function over all rows, which grades them in tasks of one row or one prompt's rows."""

    def __init__(self, name: str, grade: Callable, say: Callable[[str], None]):
        self._name, self._grade, self._say = name, grade, say
        self._said = False

    def __call__(self, **rows: Sequence[Any]) -> list[float | None]:
        count = len(rows["completions"])
        if self._name in functions.BUILT_IN:
            parts = [[i] for i in range(count)]
        else:
            parts = [list(part) for _, part in groupby(range(count), key=lambda i: rows["prompts"][i])]
        tasks = [{name: [column[i] for i in part] for name, column in rows.items()} for part in parts]
        values = [value for task in self._grade(self._name, tasks) for value in task]
        late = sum(isinstance(value, TimedOut) for value in values)
        if late and not self._said:
            self._said = True
            self._say(
                f"reward {self._name!r}: {late} of {count} completions met the time limit (reward_timeout). From here "
                "on a repetition of this run may end differently: what is late depends on the machine."
            )
        return values


class _Worker:
    """One process and what it is doing. It is busy while `task` is set, starting while `task` is -1."""

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
            stdout=2,  # what a reward prints goes where messages go
            env=os.environ | {"JAX_PLATFORMS": "cpu"},  # a reward that does use JAX must not take the accelerator
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the trainer, which finishes its step first
        )
        theirs.close()
        self.done = 0
        self.task: int | None = self.STARTING
        self.deadline = time.monotonic() + START_SECONDS

    def stop(self) -> None:
        """Kill it, and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


class Workers:
    """Processes that grade tasks side by side; results come in the order of the tasks.

    A task that takes longer than `timeout` seconds, or whose process dies (a segmentation fault, `os._exit`, no
    memory), fails alone, and its worker is replaced; so is a worker after `recycle` tasks. Everything ends with
    `close`, with this object, or with this process, however that ends.
    """

    def __init__(self, names: Sequence[str], count: int, timeout: float, recycle: int = RECYCLE_TASKS):
        """Starts the processes and waits until they have loaded the rewards. Raises RewardError if they cannot."""
        self._names, self._timeout, self._recycle = list(names), timeout, recycle
        self._answered: set[str] = set()
        self._failures: dict[str, list[type]] = {name: [] for name in names}  # since the last answer
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        self._workers += [_Worker(names) for _ in range(count)]
        with self._closed_on_error():
            while any(worker.task == _Worker.STARTING for worker in self._workers):
                self._step()

    def close(self) -> None:
        """Ends all processes."""
        self._finalizer()

    def grade(self, name: str, tasks: Sequence[Rows]) -> list[list[float | None]]:
        """Values of each task, whose rows have values of TimedOut or Crashed where it failed.

        Raises RewardError if the reward raises, if `GIVE_UP` tasks in a row fail, or if all do and it never answered
        before. (One that did may fail a whole call: a step can be a single task.)
        """
        results: dict[int, list[float | None]] = {}
        waiting = collections.deque(range(len(tasks)))
        with self._closed_on_error():
            while len(results) < len(tasks):
                for worker in [worker for worker in self._workers if worker.task is None][: len(waiting)]:
                    self._hand_over(worker, waiting, name, tasks)
                for task, outcome in self._step().items():
                    if isinstance(outcome, type):
                        self._failures[name].append(outcome)
                        results[task] = [outcome(math.nan)] * len(tasks[task]["completions"])
                    else:
                        self._failures[name].clear()
                        self._answered.add(name)
                        results[task] = outcome
                self._check_alive(name, len(tasks))
        return [results[task] for task in range(len(tasks))]

    def _hand_over(self, worker: _Worker, waiting: collections.deque[int], name: str, tasks: Sequence[Rows]) -> None:
        task = waiting.popleft()
        try:
            worker.connection.send((name, tasks[task]))
        except OSError:  # it died while it had nothing to do: the task has not begun
            waiting.appendleft(task)
            self._replace(worker)
            return
        limit = self._timeout + (GRACE_SECONDS if name == "code" else 0.0)
        worker.task, worker.deadline = task, time.monotonic() + limit

    def _step(self) -> dict[int, Any]:
        """Wait for the next reply or deadline. Returns, by task, its values, or the type of its failure."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        left = min(worker.deadline for worker in busy.values()) - time.monotonic()
        outcomes: dict[int, Any] = {}
        for connection in wait(list(busy), max(left, 0.0)):
            worker = busy.pop(connection)
            outcome = self._receive(worker)
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

    def _receive(self, worker: _Worker) -> Any:
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError) as error:
            if worker.task == _Worker.STARTING:
                code = worker.process.wait()
                raise RewardError(f"the worker of rewards {self._names} ended with {code} while loading") from error
            return Crashed
        if kind == "error":
            raise RewardError(content)
        return content

    def _check_alive(self, name: str, count: int) -> None:
        failures = self._failures[name]
        if len(failures) >= (GIVE_UP if name in self._answered else min(GIVE_UP, count)):
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
