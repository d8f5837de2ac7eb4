"""Comparison of runs: runs that differ only in `seed` form a group, with a mean and a confidence interval.

Axes: R runs of a group, S steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.config import FREE_ON_RESUME, ConfigError, load, to_mapping
from qerl_jax.io.run_files import CONFIG_FILE
from qerl_jax.reporting.metrics import EvaluationResults, read_metrics

CURVES = {
    "reward": ("reward", "Reward"),
    "accuracy": ("accuracy", "Share correct in training"),
    "entropy": ("entropy", "Entropy, nats a token"),
    "length": ("completions/mean_length", "Completion length, tokens"),
}
# 97.5 % point of Student's t for 1, 2, … degrees of freedom; beyond the table the normal one is within 5 %.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960


@dataclasses.dataclass(frozen=True)
class Mean:
    """Mean over seeds and its 95 % interval, `mean ± t · s / sqrt(R)`.

    Attributes:
      mean: mean of the values.
      half: half of the interval's width; NaN for a single run, which has none.
      count: R.
    """

    mean: float
    half: float
    count: int

    def describe(self, scale: float = 1.0, digits: int = 1) -> str:
        """`mean ± half`, both multiplied by `scale`; the mean alone where there is no interval."""
        text = f"{scale * self.mean:.{digits}f}"
        return text if math.isnan(self.half) else f"{text} ± {scale * self.half:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run directory.

    Attributes:
      directory: the run directory.
      config: config fields by name.
      metrics: rows of metrics.jsonl.
      accuracy: evaluated accuracy by name, "before" and "after" where present.
    """

    directory: Path
    config: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    accuracy: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
      name: the fields in which it differs from the other groups.
      runs: R of them, by seed.
    """

    name: str
    runs: list[Run]


def mean_interval(values: Sequence[float]) -> Mean:
    """Mean and 95 % interval by Student's t. Raises ValueError for no values."""
    if len(values) == 0:
        raise ValueError("no values to average")
    count, mean = len(values), float(np.mean(values))
    if count == 1:
        return Mean(mean, math.nan, 1)
    factor = _T975[count - 2] if count - 2 < len(_T975) else _NORMAL
    return Mean(mean, factor * float(np.std(values, ddof=1)) / math.sqrt(count), count)


def read_run(directory: Path) -> Run:
    """A run from its directory. Raises ConfigError if it holds none, or one without a finished step."""
    path = directory / CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"{directory} is no run: it holds no {CONFIG_FILE}")
    metrics = read_metrics(directory)
    if not metrics:
        raise ConfigError(f"{directory} has no finished step to compare")
    accuracy = {name: result.accuracy for name, result in EvaluationResults(directory).all().items()}
    return Run(directory, to_mapping(load(path)), metrics, accuracy)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of their first runs, named by what tells them apart.

    Raises ConfigError for two runs of one group with the same seed: one would count twice.
    """
    ignored = FREE_ON_RESUME | {"seed"}
    keys = [{name: value for name, value in run.config.items() if name not in ignored} for run in runs]
    distinct: list[dict[str, Any]] = []
    for key in keys:
        if key not in distinct:
            distinct.append(key)
    telling = [name for name in distinct[0] if any(key[name] != distinct[0][name] for key in distinct)]
    groups = []
    for key in distinct:
        members = sorted((run for run, other in zip(runs, keys, strict=True) if other == key), key=_seed)
        for one, other in itertools.pairwise(members):
            if _seed(one) == _seed(other):
                raise ConfigError(f"{one.directory} and {other.directory} are the same run: seed {_seed(one)} in both")
        name = ", ".join(f"{name} {_short(key[name])}" for name in telling)
        groups.append(Group(name or f"{len(members)} runs", members))
    return groups


def _seed(run: Run) -> int:
    return run.config["seed"]


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def summary(group: Group) -> dict[str, Mean]:
    """Evaluated accuracy before and after, and reward, accuracy, entropy and length over the last tenth of the steps:
    those that every run of the group has.
    """
    rows: dict[str, Mean] = {}
    for name in ("before", "after"):
        if all(name in run.accuracy for run in group.runs):
            rows[f"accuracy {name}"] = mean_interval([run.accuracy[name] for run in group.runs])
    for name, (key, _) in CURVES.items():
        values = [_last_tenth(run, key) for run in group.runs]
        if not any(math.isnan(value) for value in values):
            rows[f"{name}, last tenth"] = mean_interval(values)
    return rows


def _last_tenth(run: Run, key: str) -> float:
    rows = run.metrics[-max(1, len(run.metrics) // 10) :]
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(np.mean(values)) if values else math.nan


def curve(group: Group, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that every run of the group has, the mean over runs, half the width of its interval (NaN for one run)."""
    by_step = [{row["step"]: row[key] for row in run.metrics if row.get(key) is not None} for run in group.runs]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    means = [mean_interval([values[step] for values in by_step]) for step in steps]
    return np.array(steps), np.array([m.mean for m in means]), np.array([m.half for m in means])


def draw(groups: Sequence[Group], path: Path) -> None:
    """Reward, accuracy, entropy and length side by side, a line with its band for each group, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    for axis, (key, title) in zip(axes.flat, CURVES.values(), strict=True):
        for i, group in enumerate(groups):
            steps, mean, half = curve(group, key)
            axis.plot(steps, mean, color=f"C{i}", label=f"{group.name} (n = {len(group.runs)})")
            axis.fill_between(steps, mean - half, mean + half, color=f"C{i}", alpha=0.2, linewidth=0)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 1].set_ylim(0, 1)
    axes[1, 0].set_ylim(bottom=0)
    axes[1, 1].set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = max(1, 110 // (max(map(len, labels)) + 6))  # as many as fit the figure's width
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(groups)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
