"""An experiment's results as JSON, a figure and a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reproduction.analysis import NOT_SUPPORTED, REVERSED, SUPPORTED, UNDECIDED, Result, finished_seeds
from reproduction.metrics import METRICS, WINDOW, Run
from reproduction.plan import (
    AMENDED,
    CELLS,
    FINAL,
    FIRST_ENTROPY,
    LORA_NOISES,
    MEAN_ACCURACY,
    MEAN_ENTROPY,
    NOISES,
    PASS_AT_K,
    PRIMARY,
    RANKS,
    SECONDARY,
    TRAINER_ENTROPY,
    Comparison,
)
from reproduction.runs import Job

MARKS = {PRIMARY: "*", SECONDARY: "", AMENDED: "+"}
FIGURES = {
    "pass_at_1_after": FINAL,
    "pass_at_k_after": PASS_AT_K,
    "first_entropy": FIRST_ENTROPY,
    "first_trainer_entropy": TRAINER_ENTROPY,
    "mean_entropy": MEAN_ENTROPY,
    "mean_accuracy": MEAN_ACCURACY,
}
"""Name in a row of runs.json -> metric."""
COLOURS = {SUPPORTED: "tab:green", NOT_SUPPORTED: "tab:orange", REVERSED: "tab:red", UNDECIDED: "tab:gray"}


def rows(results: Sequence[Result], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat object a comparison, with the number of its seeds; `about` is added to each."""
    found = []
    for result in results:
        row = dataclasses.asdict(result)
        found.append({**about, "seeds": len(result.differences), **row.pop("comparison"), **row})
    return found


def draw(results: Sequence[Result], path: Path) -> None:
    """A forest plot: mean difference and interval in units of the margin, coloured by verdict, a band for ±1 margin."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.34 * len(results)), layout="constrained")
    axes.axvspan(-1, 1, color="0.92")
    axes.axvline(0, color="0.5", linewidth=0.8)
    for height, result in enumerate(reversed(results)):
        scale = 1 / result.comparison.margin
        colour = COLOURS[result.verdict]
        axes.plot([result.low * scale, result.high * scale], [height, height], color=colour)
        axes.plot(result.mean * scale, height, "o", color=colour)
    labels = [f"{r.comparison.claim}{MARKS[r.comparison.family]}: {r.comparison}" for r in reversed(results)]
    axes.set_yticks(range(len(results)), labels, fontsize=8)
    axes.set_xlabel("difference over the smallest that matters, with its 95 % interval; * primary, + amended")
    handles = [plt.Line2D([], [], color=colour, marker="o", label=name) for name, colour in COLOURS.items()]
    axes.legend(handles=handles, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_curves(runs: Mapping[tuple[str, int], Run], seeds: Sequence[int], fewest: int, path: Path) -> None:
    """Accuracy (mean of `WINDOW` steps) and entropy of the sampler over the steps of each cell that has the runs of the
    first `fewest` seeds or more: mean over its seeds, and one standard error of it as a band. Cells that differ from
    `aqn` in noise, and those that differ in rank, have panels of their own beside `aqn`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = {cell: found for cell in CELLS if (found := finished_seeds(runs, [cell], seeds, fewest))}
    apart = [{*NOISES, *LORA_NOISES}, set(RANKS)]
    groups = [[cell for cell in own if cell not in set().union(*apart)]]
    groups += [[cell for cell in own if cell in {"aqn", *variants}] for variants in apart]
    groups = [group for group in groups if set(group) - {"aqn"}] or [list(own)]
    figure, panels = plt.subplots(len(groups), 2, figsize=(12, 4 * len(groups)), layout="constrained", squeeze=False)
    for group, row in zip(groups, panels, strict=True):
        colours = plt.get_cmap("tab10" if len(group) <= 10 else "tab20").colors  # tab20's are pairs of one hue
        for axes, name, window in zip(row, ("accuracy", "sampling/entropy"), (WINDOW, 1), strict=True):
            axes.set_prop_cycle(color=colours)
            for cell in group:
                columns = [runs[cell, seed].column(name) for seed in own[cell]]
                curves = np.stack([np.convolve(column, np.full(window, 1 / window), "valid") for column in columns])
                steps, mean = np.arange(window, window + curves.shape[1]), curves.mean(axis=0)
                error = curves.std(axis=0, ddof=1) / len(columns) ** 0.5
                (line,) = axes.plot(steps, mean, label=cell, linewidth=1.2)
                axes.fill_between(steps, mean - error, mean + error, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set_xlabel("step")
            axes.set_ylabel(name if window == 1 else f"{name}, mean of {window} steps")
        row[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def table(results: Sequence[Result]) -> str:
    """The comparisons as Markdown."""
    lines = [
        "| claim | comparison | means | difference (95 %) | effect | p, corrected | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        means = f"{r.treatment_mean:.4g}, {r.baseline_mean:.4g}"
        difference = f"{r.mean:+.4g} ({r.low:+.4g} to {r.high:+.4g})"
        effect = "–" if r.effect is None else f"{r.effect:+.2f}"
        cells = [f"{r.comparison.claim}{MARKS[r.comparison.family]}", str(r.comparison), means, difference, effect]
        lines.append(f"| {' | '.join(cells)} | {r.p:.2g}, {r.adjusted:.2g} | {r.verdict} |")
    return "\n".join(lines)


def incomplete(comparisons: Sequence[Comparison], results: Sequence[Result]) -> str:
    """A line that names the comparisons without a result; empty where all have one."""
    done = {result.comparison for result in results}
    left = [str(comparison) for comparison in comparisons if comparison not in done]
    return f"with too few runs for a verdict: {'; '.join(left)}" if left else ""


def run_rows(finished: Sequence[tuple[Job, Run]]) -> list[dict[str, Any]]:
    """One flat object a finished run: what its cell sets, scores before and after, entropy, accuracy, and KL of sampler
    and trainer over the steps with the largest noise (without noise: over all).
    """
    found = []
    for job, run in finished:
        sigma = run.column("aqn/sigma")
        found.append(
            {"cell": job.cell, "seed": job.seed, "learning_rate": job.config["learning_rate"]}
            | {"pass_at_1_before": run.before and run.before.accuracy}
            | {"pass_at_k_before": run.before and run.before.pass_at_k}
            | {name: float(METRICS[metric](run, run)) for name, metric in FIGURES.items()}
            | {"last_accuracy": float(run.column("accuracy")[-WINDOW:].mean())}
            | {"kl": float(run.column("sampling/kl")[sigma == sigma.max()].mean()), "sigma": float(sigma.max())}
        )
    return found


def write(found: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], path: Path) -> None:
    """`{"meta": …, "rows": […]}`."""
    path.write_text(json.dumps({"meta": meta, "rows": found}, indent=1) + "\n")
