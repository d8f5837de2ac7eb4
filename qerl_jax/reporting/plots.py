"""PNG plots of a run, drawn from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.checkpoint.run_files import PLOTS_DIR

_INK, _SECOND = "#1f5fa8", "#c2571a"


def write_plots(directory: Path, metrics: list[dict[str, Any]]) -> list[Path]:
    """Draw reward, accuracy, entropy with σ over it, completion length and mismatch; a metric the run did not record
    has no plot.

    Returns the files written to `directory/plots`.
    """
    folder = directory / PLOTS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures(metrics):
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def figures(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Name and matplotlib figure of each plot of `write_plots`, which is closed when the next one is asked for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, (needed, draw) in _PLOTS.items():
        rows = [row for row in metrics if row.get(needed) is not None]
        if not rows:
            continue
        figure, axes = plt.subplots(figsize=(7, 4))
        draw(axes, rows)
        for line in (line for part in figure.axes for line in part.get_lines() if len(line.get_xdata()) < 30):
            line.set_marker(".")  # a point alone makes no line
        right = 0.97 if len(figure.axes) == 1 else 0.9
        figure.subplots_adjust(left=0.12, right=right, bottom=0.2, top=0.92)  # a layout engine draws everything twice
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
        axes.set_xlabel("step")
        axes.set_xlim(metrics[0]["step"] - 0.5, metrics[-1]["step"] + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        yield name, figure
        plt.close(figure)


def _series(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], float)


def _is_noisy(rows: list[dict[str, Any]]) -> bool:
    return any(row.get("aqn/sigma") for row in rows)


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean of each value and those before it, of a fifteenth of all; of fewer at the beginning."""
    window = max(1, len(values) // 15)
    sums = np.cumsum(np.concatenate([np.zeros(window), values]))
    return (sums[window:] - sums[:-window]) / np.minimum(np.arange(1, len(values) + 1), window)


def _with_mean(axes: Any, rows: list[dict[str, Any]], name: str, label: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Draw a metric of each step, and its moving average, which is returned with the steps."""
    steps, values = _series(rows, name)
    mean, window = _mean(values), max(1, len(values) // 15)
    axes.plot(steps, values, color=_INK, alpha=0.35, linewidth=1)
    axes.plot(steps, mean, color=_INK, label=f"{label}, mean of {window} steps" if window > 1 else label)
    return steps, mean


def _reward(axes: Any, rows: list[dict[str, Any]]) -> None:
    steps, mean = _with_mean(axes, rows, "reward", "all rewards")
    deviation = _mean(_series(rows, "reward_std")[1])
    axes.fill_between(steps, mean - deviation, mean + deviation, color=_INK, alpha=0.15, linewidth=0)
    axes.set_title("Reward, mean ± standard deviation within groups")
    axes.set_ylabel("reward")


def _accuracy(axes: Any, rows: list[dict[str, Any]]) -> None:
    _with_mean(axes, rows, "accuracy", "share correct")
    axes.set_ylim(-0.02, 1.02)
    axes.set_title("Share of correct completions in training" + (", sampled under noise" if _is_noisy(rows) else ""))
    axes.set_ylabel("accuracy")


def _entropy(axes: Any, rows: list[dict[str, Any]]) -> None:
    _with_mean(axes, rows, "entropy", "trained policy")
    noisy = _is_noisy(rows)
    steps, entropy = _series(rows, "sampling/entropy")
    axes.plot(steps, _mean(entropy), ":", color=_INK, label="sampled policy" + (", under noise" if noisy else ""))
    axes.set_ylabel("entropy (nats a token)", color=_INK)
    axes.set_title("Entropy of the policy" + (", and AQN's σ" if noisy else ""))
    if noisy:
        twin = axes.twinx()
        twin.set_yscale("log")
        twin.step(*_series(rows, "aqn/sigma"), color=_SECOND, where="post")
        twin.set_ylabel("noise σ", color=_SECOND)


def _length(axes: Any, rows: list[dict[str, Any]]) -> None:
    for name, label, line in (("max", "longest", "--"), ("min", "shortest", ":")):
        axes.plot(*_series(rows, f"completions/{name}_length"), line, color=_INK, alpha=0.6, linewidth=1, label=label)
    _with_mean(axes, rows, "completions/mean_length", "average")
    axes.set_ylim(bottom=0)
    axes.set_title("Completion length")
    axes.set_ylabel("tokens")


def _mismatch(axes: Any, rows: list[dict[str, Any]]) -> None:
    for name, label, colour in (
        ("sampling/sampling_logp_difference/max", "largest |Δ logprob|", _SECOND),
        ("sampling/sampling_logp_difference/mean", "mean |Δ logprob|", _INK),
        ("sampling/kl", "KL(sampled ‖ trainer)", "#3c8d40"),
    ):
        steps, values = _series(rows, name)
        axes.plot(steps, np.where(values > 0, values, np.nan), color=colour, label=label)  # 0 has no logarithm: a gap
    axes.set_yscale("log")
    axes.set_title("Rollout against trainer" + (", the noise between them" if _is_noisy(rows) else ""))
    axes.set_ylabel("nats")


_PLOTS: dict[str, tuple[str, Callable[[Any, list[dict[str, Any]]], None]]] = {
    "reward": ("reward", _reward),
    "accuracy": ("accuracy", _accuracy),
    "entropy": ("entropy", _entropy),
    "length": ("completions/mean_length", _length),
    "mismatch": ("sampling/sampling_logp_difference/mean", _mismatch),
}
