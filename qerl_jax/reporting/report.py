"""`report.md`: settings, results, plots and timing of a run on one page."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.atomic import write_text
from qerl_jax.checkpoint.run_files import PLOTS_DIR, REPORT_FILE
from qerl_jax.config import Config, to_mapping
from qerl_jax.config.fields import PROMPT_LENGTH
from qerl_jax.evaluation import Evaluation
from qerl_jax.reporting import health

PACKAGES = ("qerl-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
_SHOWN = {
    "reward": "reward",
    "accuracy": "share correct",
    "entropy": "entropy, nats a token",
    "sampling/entropy": "entropy of the sampled policy, nats a token",
    "completions/mean_length": "completion length, tokens",
    "completions/clipped_ratio": "share cut off at max_completion_length",
    "frac_reward_zero_std": "share of groups with equal rewards",
    "grad_norm": "gradient norm",
    "tokens_per_second": "rollout, tokens/s",
    "step_time": "seconds a step",
}
_OF_THE_ROLLOUT = ("reward", "accuracy", "sampling/entropy")  # which AQN changes


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
      steps: rollouts done.
      reason: what stopped it, such as "SIGTERM"; empty where all steps are done.
      evaluations: results by name, "before" and "after" where present.
      phase_seconds: seconds of each phase since the last start.
      hooks: name of each function or dataset that took the place of the config's, by the argument of `train`.
    """

    steps: int
    reason: str
    evaluations: Mapping[str, Evaluation]
    phase_seconds: Mapping[str, float]
    hooks: Mapping[str, str] = dataclasses.field(default_factory=dict)


def write_report(directory: Path, config: Config, metrics: list[dict[str, Any]], ending: Ending) -> Path:
    """Write `report.md`; links to the plots are relative, so that the directory may move."""
    plots = sorted(path.name for path in (directory / PLOTS_DIR).glob("*.png"))
    path = directory / REPORT_FILE
    write_text(path, render(directory.absolute().name, config, metrics, ending, plots))
    return path


def render(name: str, config: Config, metrics: list[dict[str, Any]], ending: Ending, plots: list[str]) -> str:
    """The page as Markdown.

    Args:
      name: name of the run, used as the title.
      metrics: rows of metrics.jsonl.
      plots: file names under `plots/`.
    """
    state = f"stopped by {ending.reason} after" if ending.reason else "finished"
    lines = [
        f"# {name}",
        "",
        f"{config.model} on {', '.join(config.dataset)}: {state} step {ending.steps} of {config.num_rollouts}.",
        "",
    ]
    if ending.evaluations:
        lines += table(("evaluation", "result"), [(key, e.describe()) for key, e in ending.evaluations.items()])
    if metrics:
        tenth = max(1, len(metrics) // 10)
        first, last = (f"first {tenth} steps", f"last {tenth} steps") if tenth > 1 else ("first step", "last step")
        lines += table(("in training, mean of", first, last), _progress(metrics, tenth))
        lines += _notes(config, metrics, ending)
    lines += [f"![{Path(plot).stem}]({PLOTS_DIR}/{plot})" for plot in plots] + [""]
    lines += ["## Settings that differ from the defaults", ""]
    lines += table(("field", "value", "default"), differences(config))
    lines += ["## Time", ""]
    lines += table(("phase", "seconds", "share"), _timing(metrics, ending.phase_seconds))
    lines += ["## Versions", ""]
    return "\n".join(lines + table(("what", "version"), _versions(jax.devices())))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table."""

    def row(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join("\\n".join(cell.splitlines()).replace("|", "\\|") for cell in cells) + " |"

    return [row(head), "|" + "---|" * len(head), *map(row, rows), ""]


def _progress(metrics: list[dict[str, Any]], tenth: int) -> list[tuple[str, ...]]:
    def mean(rows: list[dict[str, Any]], key: str) -> str:
        values = [row[key] for row in rows if row.get(key) is not None]
        return f"{np.mean(values):.4g}" if values else "–"

    noise = " (noise included)" if any(row.get("aqn/sigma") for row in metrics) else ""
    return [
        (label + noise * (key in _OF_THE_ROLLOUT), mean(metrics[:tenth], key), mean(metrics[-tenth:], key))
        for key, label in _SHOWN.items()
        if any(row.get(key) is not None for row in metrics)
    ]


def _notes(config: Config, metrics: list[dict[str, Any]], ending: Ending) -> list[str]:
    """Problems that deserve attention; empty if there were none."""

    def total(key: str) -> int:
        return int(sum(row.get(key) or 0 for row in metrics))

    notes = [
        f"- {hook} was given to `train`{f': `{name}`' if name != hook else ''}." for hook, name in ending.hooks.items()
    ]
    if said := health.untrained_steps(metrics, config):
        notes.append(f"- {said}.")
    notes += [f"- At the end {sentence}." for sentence in health.warnings(metrics).values()]
    if skipped := total("skipped"):
        notes.append(f"- {skipped} updates were not finite and changed nothing; their batches are in `nonfinite/`.")
    if failed := total("completions/failed"):
        notes.append(f"- {failed} completions whose largest logit was not finite were left out.")
    return [*notes, ""] if notes else []


def differences(config: Config) -> list[tuple[str, ...]]:
    """Field, value and default of each setting that is not the default, but for those of this start alone."""
    ours, defaults = to_mapping(config), to_mapping(Config())
    return [
        (f"`{key}`", f"{value}", f"{defaults[key]}")
        for key, value in ours.items()
        if value != defaults[key]
        and key not in ("resume", "overwrite")
        and (key, value) != ("max_prompt_length", PROMPT_LENGTH)
    ]


def _timing(metrics: list[dict[str, Any]], phase_seconds: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Seconds of rollout, grading and update over all rows; of evaluation and checkpoints since the last start."""
    seconds: dict[str, float] = {}
    for row in metrics:
        for key, value in row.items():
            if key.startswith("time/") and value is not None:
                seconds[key.removeprefix("time/")] = seconds.get(key.removeprefix("time/"), 0.0) + value
    for key, value in phase_seconds.items():
        if key not in seconds:
            seconds[f"{key} (since the last start)"] = value
    whole = sum(seconds.values()) or 1.0
    return [(key, f"{value:.1f}", f"{100 * value / whole:.0f} %") for key, value in seconds.items()]


def _versions(devices: Sequence[Any]) -> list[tuple[str, ...]]:
    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a checkout on the path
            return "not installed"

    kinds = sorted({device.device_kind for device in devices})
    return [
        ("Python", platform.python_version()),
        *((name, version(name)) for name in PACKAGES),
        ("device", f"{len(devices)} × {', '.join(kinds)}"),
        ("system", platform.platform()),
    ]
