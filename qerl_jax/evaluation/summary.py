"""What an evaluation found: the items of its problems, and the figures over all of them.

Axes: P problems, n completions of each.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.evaluation.grading import CORRECT, CRASH, NO_GOLD, TIMEOUT, UNREADABLE
from qerl_jax.evaluation.statistics import Estimate, estimates, ks, pass_at_k, sampling_error
from qerl_jax.rewards import functions
from qerl_jax.types import FinishReason


@dataclasses.dataclass(frozen=True)
class Item:
    """One problem with its n completions: a line of the records.

    Attributes:
      id: the problem's place in its dataset.
      prompt: the question.
      gold: the gold answer.
      completions: texts, without the final EOS.
      answers: the answer extracted from each, None where it states none or where none are extracted.
      verdicts: one for each, as in `Grader.verdicts`.
      lengths: tokens of each, EOS included.
      finish: why each ended: "eos", "length" or "failed".
      majority: index of a completion with the answer that most give; None without a vote.
      tied: whether as many gave another answer.
    """

    id: int
    prompt: str
    gold: str
    completions: list[str]
    answers: list[str | None]
    verdicts: list[str]
    lengths: list[int]
    finish: list[str]
    majority: int | None
    tied: bool

    @property
    def is_graded(self) -> bool:
        """Whether the gold answer could be read: some completion has a verdict."""
        return any(verdict != NO_GOLD for verdict in self.verdicts)

    @property
    def correct(self) -> int:
        """Number of correct completions."""
        return self.verdicts.count(CORRECT)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. Problems whose gold answer cannot be read count in `ungraded` alone.

    Attributes:
      accuracy: share of correct completions: pass@1, which over n > 1 completions a problem is avg@n.
      low, high: 95 % interval of it, that of its estimate.
      pass_at_k: share of problems with at least one correct completion among `generations`.
      format: share of completions with think and answer blocks.
      truncated: share of completions cut off at the token limit.
      mean_length: tokens of a completion.
      problems, generations: how many problems were graded, and completions of each.
      failed: completions whose largest logit was not finite; they count as wrong.
      maj_at_k: share of problems whose most frequent answer is correct; None where no answers are extracted.
      ties: problems with several most frequent answers, of which the one given first counts.
      unreadable: share of completions that state no answer.
      ungradable: completions whose grading met the time limit or crashed; they count as wrong.
      ungraded: ids of the problems whose gold answer cannot be read.
      sampling_error: standard error of `accuracy` over other completions of the same problems
        (`statistics.sampling_error`); None with one completion of each.
      estimates: figures by name (avg@n or pass@1, pass@k, maj@n), each with its 95 % interval over problems.
    """

    accuracy: float
    low: float
    high: float
    pass_at_k: float
    format: float
    truncated: float
    mean_length: float
    problems: int
    generations: int
    failed: int = 0
    maj_at_k: float | None = None
    ties: int = 0
    unreadable: float = 0.0
    ungradable: int = 0
    ungraded: tuple[int, ...] = ()
    sampling_error: float | None = None
    estimates: Mapping[str, Estimate] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Evaluation:
        """The inverse of `dataclasses.asdict` through JSON. Raises TypeError for an unknown or a missing field."""
        lists = {"ungraded": tuple(fields.get("ungraded", ()))}
        lists["estimates"] = {name: Estimate(*values) for name, values in fields.get("estimates", {}).items()}
        return cls(**{**fields, **lists})

    def describe(self) -> str:
        """One line for people."""
        name = mean_name(self.generations)
        failed = f", {self.failed} completions whose largest logit was not finite" if self.failed else ""
        ungraded = f", {len(self.ungraded)} more have an unreadable gold answer" if self.ungraded else ""
        return f"{name} {_percent(self.accuracy, self.low, self.high, f', {self.problems} problems{failed}{ungraded}')}"

    def table(self) -> list[str]:
        """Lines for people: every estimate, then what else was counted."""
        completions = "1 completion" if self.generations == 1 else f"{self.generations} completions"
        lines = [f"{self.problems} problems, {completions} of each; intervals: over problems"]
        lines += [f"{name} {_percent(*estimate)}" for name, estimate in self.estimates.items()]
        if self.sampling_error is not None:
            name, points = mean_name(self.generations), 100 * self.sampling_error
            lines.append(f"{name} with other samples on the same problems: standard error {points:.1f} points")
        lines.append(
            f"format {100 * self.format:.1f} %, truncated {100 * self.truncated:.1f} %, "
            f"no answer {100 * self.unreadable:.1f} %, mean length {self.mean_length:.1f} tokens"
        )
        if self.ties:
            lines.append(f"{self.ties} votes were ties: the answer given first counts")
        if self.failed:
            lines.append(f"{self.failed} completions whose largest logit was not finite count as wrong")
        if self.ungradable:
            lines.append(f"{self.ungradable} completions whose grading met reward_timeout or crashed count as wrong")
        if self.ungraded:
            ids = ", ".join(map(str, self.ungraded))
            lines.append(f"{len(self.ungraded)} problems are left out: their gold answers cannot be read (ids {ids})")
        return lines

    def metrics(self) -> dict[str, float]:
        """`eval/…`, for the curves of a run."""
        names = ["accuracy", "pass_at_k", "format", "truncated", "mean_length"]
        names += ["maj_at_k"] if self.maj_at_k is not None and self.generations > 1 else []
        return {f"eval/{name}": getattr(self, name) for name in names}


def mean_name(n: int) -> str:
    """The usual name of the mean over n completions a problem."""
    return "pass@1" if n == 1 else f"avg@{n}"


def _percent(value: float, low: float, high: float, more: str = "") -> str:
    return f"{100 * value:.1f} % (95 % interval {100 * low:.1f}–{100 * high:.1f}{more})"


def summarize(items: Sequence[Item], votes: bool = True) -> Evaluation:
    """The figures over items, all with the same number of completions; `votes`: answers were extracted.

    Raises ValueError if no item's gold answer could be read.
    """
    graded = [item for item in items if item.is_graded]
    if not graded:
        raise ValueError(f"none of {len(items)} gold answers can be read; the first is {items[0].gold!r}")
    n = len(graded[0].completions)
    correct = np.array([[verdict == CORRECT for verdict in item.verdicts] for item in graded], np.float64)
    values = {mean_name(n): correct.mean(axis=1).tolist()}
    for k in ks(n)[1:]:
        values[f"pass@{k}"] = [pass_at_k(n, item.correct, k) for item in graded]
    if votes and n > 1:
        values[f"maj@{n}"] = [is_majority_correct(item) for item in graded]
    verdicts = Counter(verdict for item in graded for verdict in item.verdicts)
    finish = Counter(reason for item in graded for reason in item.finish)
    total, found = correct.size, estimates(values)
    accuracy, low, high = found[mean_name(n)]
    return Evaluation(
        accuracy=accuracy,
        low=low,
        high=high,
        pass_at_k=float((correct.max(axis=1) > 0).mean()),
        format=float(np.mean([functions.soft_format(completions=item.completions) for item in graded])),
        truncated=finish[_name(FinishReason.LENGTH)] / total,
        mean_length=float(np.mean([item.lengths for item in graded])),
        problems=len(graded),
        generations=n,
        failed=finish[_name(FinishReason.FAILED)],
        maj_at_k=float(np.mean([is_majority_correct(item) for item in graded])) if votes else None,
        ties=sum(item.tied for item in graded),
        unreadable=verdicts[UNREADABLE] / total,
        ungradable=verdicts[TIMEOUT] + verdicts[CRASH],
        ungraded=tuple(item.id for item in items if not item.is_graded),
        sampling_error=sampling_error(correct),
        estimates=found,
    )


def is_majority_correct(item: Item) -> float:
    """1 where the answer that most completions give is correct, else 0."""
    return float(item.majority is not None and item.verdicts[item.majority] == CORRECT)


def _name(reason: FinishReason) -> str:
    return reason.name.lower()
