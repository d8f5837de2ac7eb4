"""Loading rewards by name; slow or untrusted ones are graded in worker processes.

A task in a worker costs 0.5 ms on top of its grading (1,000 tasks on two shared cores: 0.5 s). The built-in rewards
that stay in the trainer take 0.2 to 54 ms for 1,000 completions of 2,000 characters, `math_verify` 6 s
(`tools/results/notes/rewards.md`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from qerl_jax.messages import Given
from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Reward, RewardError, TimedOut
from qerl_jax.rewards.pool import Rows, WorkerPool

IN_WORKERS = ("math_verify", "code")
"""Built-in rewards without a bound on their time: graded in workers, one completion a task. The other built-in rewards
are linear-time searches, cheaper than a worker's round trip."""
log = logging.getLogger("qerl_jax")


class Rewards(dict[str, Reward]):
    """Rewards by name, and the worker pool of some of them. As a context manager it closes the pool."""

    pool: WorkerPool | None = None

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.close()


def check_rewards(names: Sequence[str], workers: int, timeout: float, allow_code_execution: bool = False) -> None:
    """Raise RewardError for everything `load_rewards` refuses before it runs code: limits out of range, unknown names,
    built-in rewards whose package or system feature is missing, and "code" without `allow_code_execution`.
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
        if name in functions.BUILT_IN or isinstance(name, Given):
            functions.load_reward(name)
        else:
            functions.reward_file(name)


def load_rewards(
    names: Sequence[str],
    workers: int,
    timeout: float,
    warn: Callable[[str], None] = log.warning,
    allow_code_execution: bool = False,
) -> Rewards:
    """Rewards by name, ready to be called.

    Args:
      names: as in `functions.load_reward`. "file.py:function" and those of `IN_WORKERS` are graded in workers; a task
        of a function of the user's has all completions of one prompt.
      workers: number of processes; 0 grades everything in this process, without a time limit.
      timeout: time limit of a worker's task in seconds.
      warn: called once with a message when a task reaches the time limit.
      allow_code_execution: permit the reward "code".

    Raises RewardError as `check_rewards` does, and for a file whose function cannot be loaded.
    """
    check_rewards(names, workers, timeout, allow_code_execution)
    outside = [name for name in names if name in IN_WORKERS or name not in functions.BUILT_IN]
    rewards = Rewards()
    in_files = [name for name in outside if not isinstance(name, Given)]
    if workers and in_files:
        rewards.pool = WorkerPool(in_files, workers, timeout)
    for name in names:
        if name not in outside:
            rewards[name] = functions.load_reward(name)
        elif rewards.pool is None or isinstance(name, Given):
            rewards[name] = _TaskwiseReward(name, _grade_here(name), warn)
        else:
            rewards[name] = _TaskwiseReward(name, rewards.pool.grade, warn)
    return rewards


def _grade_here(name: str) -> Callable[[str, list[Rows]], list[list[float | None]]]:
    reward = functions.load_reward(name)
    return lambda name, tasks: [functions.call(name, reward, task) for task in tasks]


def _as_messages(task: dict[str, Any]) -> dict[str, Any]:
    """The rows of a prompt as TRL passes them: completions are lists of messages where the prompt is one."""
    if not isinstance(task["prompts"][0], list):
        return task
    return task | {"completions": [[{"role": "assistant", "content": text}] for text in task["completions"]]}


class _TaskwiseReward:
    """A reward over all rows that grades them in tasks: one row each, or the rows of one prompt."""

    def __init__(self, name: str, grade: Callable, warn: Callable[[str], None]):
        self._name, self._grade, self._warn = name, grade, warn
        self._has_warned = False

    def __call__(self, **rows: Sequence[Any]) -> list[float | None]:
        count = len(rows["completions"])
        if self._name in functions.BUILT_IN:
            indices = [[i] for i in range(count)]
        else:
            prompt = rows.get("prompt_index", rows["prompts"])
            indices = [list(task) for _, task in groupby(range(count), key=lambda i: prompt[i])]
        tasks = [{name: [column[i] for i in chosen] for name, column in rows.items()} for chosen in indices]
        if self._name not in functions.BUILT_IN:
            tasks = [_as_messages(task) for task in tasks]
        values = [value for task in self._grade(self._name, tasks) for value in task]
        late = sum(isinstance(value, TimedOut) for value in values)
        if late and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"reward {self._name!r}: {late} of {count} completions met the time limit (reward_timeout). From here "
                "on a repetition of this run may end differently: what is late depends on the machine."
            )
        return values
