"""Draws whole steps as stacked bars: rollout, grading and update, NVFP4 beside BF16 where both were timed.

    python tools/plot_steps.py [--results tools/results/nvidia-h200] [--out tools/results/nvidia-h200/steps.png]

Reads the `step` rows of update.json (`tools/bench_step.py`) and recipe.json (`tools/bench_recipe.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results" / "nvidia-h200"
COLOURS = {"rollout": "#4c78a8", "grading": "#bab0ab", "update": "#f58518"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS / "steps.png")
    args = parser.parse_args()
    bars = of_update(args.results / "update.json") | of_recipe(args.results / "recipe.json")
    draw(bars, args.out)


def of_update(path: Path) -> dict[str, dict[str, float]]:
    """Bar name -> seconds of each phase, one update a step."""
    bars = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["phase"] == "step" and "rollout_seconds" in row:
            name = (
                f"{row['model'].upper()} {row['format'].upper()}, {row['batch']} × "
                f"({row['prompt_len']} + {row['completion_len']})"
            )
            bars[name] = {"rollout": row["rollout_seconds"], "update": row["seconds"] - row["rollout_seconds"]}
    return dict(sorted(bars.items()))


def of_recipe(path: Path) -> dict[str, dict[str, float]]:
    """Bar name -> seconds of each phase of a recipe's step."""
    bars: dict[str, dict[str, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["phase"] in COLOURS:
            bars.setdefault(f"recipe {row['recipe']}", {})[row["phase"]] = row["seconds"]
    return dict(sorted(bars.items()))


def draw(bars: dict[str, dict[str, float]], path: Path) -> None:
    """One horizontal bar for each step."""
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(bars) + 1.2), layout="constrained")
    names, starts = list(bars)[::-1], [0.0] * len(bars)
    for phase, colour in COLOURS.items():
        widths = [bars[name].get(phase, 0.0) for name in names]
        axes.barh(names, widths, left=starts, color=colour, label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, (name, end) in enumerate(zip(names, starts, strict=True)):
        share = bars[name]["update"] / end
        axes.text(end, place, f" {end:.1f} s, update {share:.0%}", va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * max(starts))
    axes.set_xlabel("seconds a step, NVIDIA H200")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
