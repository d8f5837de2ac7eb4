"""PNG plots of a run, drawn from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Callable
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = directory / PLOTS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (needed, draw) in _PLOTS.items():
        rows = [row for row in metrics if row.get(needed) is not None]
        if not rows:
            continue
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        draw(axes, rows)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def _series(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs], float)


def _reward(axes: Any, rows: list[dict[str, Any]]) -> None:
    steps, mean = _series(rows, "reward")
    _, deviation = _series(rows, "reward_std")
    axes.plot(steps, mean, color=_INK)
    axes.fill_between(steps, mean - deviation, mean + deviation, color=_INK, alpha=0.2, linewidth=0)
    axes.set_title("Reward, mean ± standard deviation within groups")
    axes.set_ylabel("reward")


def _accuracy(axes: Any, rows: list[dict[str, Any]]) -> None:
    steps, mean = _series(rows, "accuracy")
    axes.plot(steps, mean, color=_INK, alpha=0.35, label="each step")
    window = max(1, len(mean) // 15)
    smooth = np.convolve(mean, np.ones(window) / window, mode="valid")
    axes.plot(steps[window - 1 :], smooth, color=_INK, label=f"mean of {window} steps")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    axes.set_title("Share of correct completions in training (sampled under noise)")
    axes.set_ylabel("accuracy")


def _entropy(axes: Any, rows: list[dict[str, Any]]) -> None:
    steps, entropy = _series(rows, "entropy")
    axes.plot(steps, entropy, color=_INK, label="trained policy")
    axes.plot(*_series(rows, "sampling/entropy"), ":", color=_INK, label="sampled policy, under noise")
    axes.legend()
    axes.set_ylabel("entropy (nats a token)", color=_INK)
    sigma_steps, sigma = _series(rows, "aqn/sigma")
    twin = axes.twinx()
    twin.step(sigma_steps, sigma, color=_SECOND, where="post")
    if (sigma > 0).any():
        twin.set_yscale("log")
    twin.set_ylabel("noise σ", color=_SECOND)
    axes.set_title("Entropy of the policy, and AQN's σ")


def _length(axes: Any, rows: list[dict[str, Any]]) -> None:
    for name, label, line in (("max", "longest", "--"), ("mean", "mean", "-"), ("min", "shortest", ":")):
        steps, values = _series(rows, f"completions/{name}_length")
        axes.plot(steps, values, line, color=_INK, alpha=1 if name == "mean" else 0.6, label=label)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.set_title("Completion length")
    axes.set_ylabel("tokens")


def _mismatch(axes: Any, rows: list[dict[str, Any]]) -> None:
    for name, label, colour in (
        ("sampling/sampling_logp_difference/max", "largest |Δ logprob|", _SECOND),
        ("sampling/sampling_logp_difference/mean", "mean |Δ logprob|", _INK),
        ("sampling/kl", "KL(sampled ‖ trainer)", "#3c8d40"),
    ):
        steps, values = _series(rows, name)
        axes.plot(steps, np.maximum(values, 1e-12), color=colour, label=label)
    axes.set_yscale("log")
    axes.legend()
    axes.set_title("Rollout against trainer (with noise on: the noise's own KL)")
    axes.set_ylabel("nats")


_PLOTS: dict[str, tuple[str, Callable[[Any, list[dict[str, Any]]], None]]] = {
    "reward": ("reward", _reward),
    "accuracy": ("accuracy", _accuracy),
    "entropy": ("entropy", _entropy),
    "length": ("completions/mean_length", _length),
    "mismatch": ("sampling/sampling_logp_difference/mean", _mismatch),
}
