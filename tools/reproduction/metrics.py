"""Figures of finished runs: metrics.jsonl and evaluation.json of a run directory to numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from reproduction import plan

from qerl_jax.evaluation.summary import Evaluation
from qerl_jax.reporting.metrics import EvaluationResults, read_metrics

WINDOW = 10
"""Steps over which training accuracy is averaged for `steps to half-way`."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: rows of its metrics, and the evaluations of the policy before and after training."""

    rows: list[dict[str, Any]]
    before: Evaluation | None
    after: Evaluation

    def column(self, name: str) -> np.ndarray:
        """A metric at every step."""
        return np.array([row[name] for row in self.rows], np.float64)


def read_finished(directory: Path, steps: int) -> Run | None:
    """The run in a directory; None where it has not reached its last step and evaluation."""
    rows, evaluations = read_metrics(directory), EvaluationResults(directory)
    before, after = evaluations.get("before"), evaluations.get("after")
    return Run(rows, before, after) if after is not None and len(rows) == steps else None


def steps_to_halfway(run: Run, reference: Run) -> float:
    """First step at which the mean accuracy of the last 10 steps reaches the middle between the first and the last 10
    steps of the reference; one more than all steps where it never does.
    """
    goal = reference.column("accuracy")
    goal = (goal[:WINDOW].mean() + goal[-WINDOW:].mean()) / 2
    accuracy = run.column("accuracy")
    means = np.convolve(accuracy, np.full(WINDOW, 1 / WINDOW), "valid")
    reached = np.flatnonzero(means >= goal)
    return float(reached[0] + WINDOW if len(reached) else len(accuracy) + 1)


METRICS: Mapping[str, Callable[[Run, Run], float]] = {
    plan.FIRST_ENTROPY: lambda run, _: run.column("sampling/entropy")[0],
    plan.TRAINER_ENTROPY: lambda run, _: run.column("entropy")[0],
    plan.MEAN_ENTROPY: lambda run, _: run.column("sampling/entropy").mean(),
    plan.MEAN_ACCURACY: lambda run, _: run.column("accuracy").mean(),
    plan.STEPS: steps_to_halfway,
    plan.FINAL: lambda run, _: run.after.accuracy,
    plan.PASS_AT_K: lambda run, _: run.after.pass_at_k,
}
"""Metric -> its value, from a run and the run of the comparison's baseline with the same seed."""
