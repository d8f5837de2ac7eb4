"""Loading rewards by name; slow or untrusted ones are graded in worker processes.

A task in a worker costs 0.5 ms on top of its grading (1,000 tasks on two shared cores: 0.5 s). The built-in rewards
that stay in the trainer take 0.2 to 54 ms for 1,000 completions of 2,000 characters, `math_verify` 6 s
(`tools/results/notes/rewards.md`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from qerl_jax.messages import Given
from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import STORED_ANSWER, Reward, RewardError, TimedOut
from qerl_jax.rewards.pool import Rows, WorkerPool

IN_WORKERS = ("math_verify", "code")
"""Built-in rewards without a bound on their time: graded in workers. The other built-in rewards are linear-time
searches, cheaper than a worker's round trip."""
log = logging.getLogger("qerl_jax")


class Rewards(dict[str, Reward]):
    """Rewards by name, and the worker pool of some of them. As a context manager it closes the pool."""

    pool: WorkerPool | None = None

    def begin(self, rows: Rows, whole: bool) -> None:
        """Have rewards begin with rows (`functions.as_rows`). The next call takes the values where it has the same rows
        among others.

        A reward begins if it grades in tasks and cannot hold up this process: those in workers, and the built-in ones
        but for `IN_WORKERS`. A function given as an object is called in order, by `score` alone.

        Args:
          rows: with the columns `outcomes.GIVEN_COLUMNS`.
          whole: True: all rows of each of some prompts, in order, for the rewards that see them together; False: any
            rows, for the built-in rewards, whose values each depend on one row alone.
        """
        for reward in self.values():
            if isinstance(reward, _TaskwiseReward):
                reward.begin(rows, whole)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.close()


def check_rewards(names: Sequence[str], allow_code_execution: bool = False) -> None:
    """Raise RewardError for everything `load_rewards` refuses before it runs code: unknown names, built-in rewards
    whose package or system feature is missing, and "code" without `allow_code_execution`.
    """
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
      names: as in `functions.load_reward`. "file.py:function" and those of `IN_WORKERS` are graded in workers. A task
        is one completion; for a function of the user's it is all completions of one prompt.
      workers: number of processes; 0 grades everything in this process, without a time limit.
      timeout: time limit of a worker's task in seconds.
      warn: called once with a message when a task reaches the time limit.
      allow_code_execution: permit the reward "code".

    Raises RewardError as `check_rewards` does, and for a file whose function cannot be loaded.
    """
    check_rewards(names, allow_code_execution)
    outside = [name for name in names if name in IN_WORKERS or name not in functions.BUILT_IN]
    rewards = Rewards()
    in_files = [name for name in outside if not isinstance(name, Given)]
    if workers and in_files:
        rewards.pool = WorkerPool(in_files, workers, timeout)
    for name in names:
        is_here = name not in in_files or rewards.pool is None
        grader = _Here(functions.load_reward(name)) if is_here else rewards.pool
        rewards[name] = _TaskwiseReward(name, grader, name not in outside or not is_here, warn)
    return rewards


class _Here:
    """Grades tasks in this process, as a `WorkerPool` does in others."""

    def __init__(self, reward: Reward):
        self._reward = reward

    def begin(self, name: str, rows: Rows) -> list[float | None]:
        return functions.call(name, self._reward, rows)

    def grade(self, name: str, tasks: Sequence[Rows], begun: Mapping[int, Any]) -> list[list[float | None]]:
        return [begun[i] if i in begun else self.begin(name, rows) for i, rows in enumerate(tasks)]


def _as_in_trl(task: dict[str, Any]) -> dict[str, Any]:
    """The rows of a prompt as TRL passes them: completions are lists of messages where the prompt is one, the answer is
    the dataset's own where `reward_columns` asks for it.
    """
    if STORED_ANSWER in task:
        task["answer"] = task.pop(STORED_ANSWER)
    if isinstance(task["prompts"][0], list):
        task["completions"] = [[{"role": "assistant", "content": text}] for text in task["completions"]]
    return task


def _place(task: Rows) -> tuple[int, int]:
    """Prompt of a task and tokens of its first completion: few tasks share both."""
    return task["prompt_index"][0], task["completion_lengths"][0]


class _TaskwiseReward:
    """A reward over all rows that grades them in tasks: one row each, or the rows of one prompt."""

    def __init__(self, name: str, grader: WorkerPool | _Here, begins: bool, warn: Callable[[str], None]):
        self._name, self._grader, self._begins, self._warn = name, grader, begins, warn
        self._has_warned, self._is_rowwise = False, name in functions.BUILT_IN
        self._begun: dict[tuple[int, int], list[tuple[Rows, Any]]] = {}  # by `_place`: tasks and what the grader has

    def begin(self, rows: Rows, whole: bool) -> None:
        if self._begins and whole != self._is_rowwise:
            for task in self._tasks(rows):
                self._begun.setdefault(_place(task), []).append((task, self._grader.begin(self._name, task)))

    def _tasks(self, rows: Rows) -> list[Rows]:
        count = len(rows["completions"])
        if self._is_rowwise:
            indices = [[i] for i in range(count)]
        else:
            prompt = rows.get("prompt_index", rows["prompts"])
            indices = [list(task) for _, task in groupby(range(count), key=lambda i: prompt[i])]
        tasks = [{name: [column[i] for i in chosen] for name, column in rows.items()} for chosen in indices]
        return tasks if self._is_rowwise else [_as_in_trl(task) for task in tasks]

    def __call__(self, **rows: Sequence[Any]) -> list[float | None]:
        count, tasks, begun = len(rows["completions"]), self._tasks(rows), {}
        for i, task in enumerate(tasks if self._begun else ()):
            waiting = self._begun.get(_place(task), [])
            if same := [one for one in waiting if one[0] == task]:
                begun[i] = same[0][1]
                waiting.remove(same[0])
        self._begun = {}
        values = [value for task in self._grader.grade(self._name, tasks, begun) for value in task]
        late = sum(isinstance(value, TimedOut) for value in values)
        if late and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"reward {self._name!r}: {late} of {count} completions met the time limit (reward_timeout). From here "
                "on a repetition of this run may end differently: what is late depends on the machine."
            )
        return values
