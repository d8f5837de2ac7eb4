"""Result of an evaluation, its interval, and where a run keeps it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from qerl_jax.io.files import write_json
from qerl_jax.io.safetensors import CheckpointError, read_json

EVALUATION_FILE = "evaluation.json"
_Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      accuracy: share of correct completions: pass@1, which over k > 1 completions a problem is avg@k.
      low, high: 95 % interval of it (`interval`).
      pass_at_k: share of problems with at least one correct completion among `generations`.
      format: share of completions with think and answer blocks.
      truncated: share of completions cut off at the token limit.
      mean_length: tokens of a completion.
      problems, generations: how many problems, and completions of each.
      failed: completions that ended because a logit was not a number; they count as wrong.
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

    def describe(self) -> str:
        """One line for people."""
        name = "pass@1" if self.generations == 1 else f"avg@{self.generations}"
        interval = f"{100 * self.low:.1f}–{100 * self.high:.1f}"
        failed = f", {self.failed} completions had a logit that was not a number" if self.failed else ""
        return f"{name} {100 * self.accuracy:.1f} % (95 % interval {interval}, {self.problems} problems{failed})"

    def metrics(self) -> dict[str, float]:
        """`eval/…`, for the curves of a run."""
        names = ("accuracy", "pass_at_k", "format", "truncated", "mean_length")
        return {f"eval/{name}": getattr(self, name) for name in names}


def interval(correct: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of `correct[problems, k]`.

    k = 1: Wilson's score interval. k > 1: normal approximation over the problems' means, because completions of one
    problem are not independent.
    """
    count, k = correct.shape
    mean = float(correct.mean())
    if k == 1:
        centre = (mean + _Z95**2 / (2 * count)) / (1 + _Z95**2 / count)
        half = _Z95 / (1 + _Z95**2 / count) * math.sqrt(mean * (1 - mean) / count + _Z95**2 / (4 * count**2))
    else:
        centre, half = mean, _Z95 * float(correct.mean(axis=1).std(ddof=1)) / math.sqrt(count) if count > 1 else 1.0
    return max(0.0, centre - half), min(1.0, centre + half)


class Results:
    """Evaluation results of a run by name ("before", "after"), kept across a resume.

    Raises CheckpointError for a file that holds something else.
    """

    def __init__(self, directory: Path):
        self._path = directory / EVALUATION_FILE
        self._values: dict[str, Evaluation] = {}
        try:
            for name, fields in (read_json(self._path) if self._path.exists() else {}).items():
                self._values[name] = Evaluation(**fields)
        except TypeError as error:
            raise CheckpointError(
                f"{self._path}: {name!r} is not the result of an evaluation ({error}); delete the file to evaluate anew"
            ) from error

    def get(self, name: str) -> Evaluation | None:
        """The result, or None if there is none yet."""
        return self._values.get(name)

    def all(self) -> dict[str, Evaluation]:
        """Every result by name, in the order in which they came."""
        return dict(self._values)

    def put(self, name: str, result: Evaluation) -> None:
        """Keep a result."""
        self._values[name] = result
        write_json(self._path, {name: dataclasses.asdict(value) for name, value in self._values.items()})
