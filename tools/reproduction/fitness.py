"""The choice of the dataset by BF16 runs alone: on which of some do runs of 150 steps end higher than runs of 100?

Both have the whole learning-rate schedule, which decays to 0 at the end of a run. Within one run the last third has 7 %
of the sum of its learning rates, so that accuracy over its steps says little of the room that the problems leave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reproduction.metrics import Run
from reproduction.plan import FITNESS_DATASETS, FITNESS_ENTROPY, FITNESS_GAIN, FITNESS_SEEDS, FITNESS_STEPS, config_of
from reproduction.runs import Job


@dataclasses.dataclass(frozen=True)
class Fitness:
    """Means over the seeds of one dataset.

    Attributes:
      dataset: its name.
      before, short, long: pass@1 before training, after `FITNESS_STEPS` and after all steps.
      gains: `long − short` of each seed.
      entropy: the sampler's, in the first step, in nats a token.
    """

    dataset: str
    before: float
    short: float
    long: float
    gains: tuple[float, ...]
    entropy: float

    @property
    def gain(self) -> float:
        """The mean gain."""
        return float(np.mean(self.gains))

    @property
    def is_fit(self) -> bool:
        """Whether a run still improves after `FITNESS_STEPS`, by the smallest difference that matters or more."""
        return self.gain >= FITNESS_GAIN and self.entropy >= FITNESS_ENTROPY


def fitness_jobs(common: Mapping[str, Any], out: Path) -> list[Job]:
    """BF16 runs of both lengths on each dataset, all of a seed before the next seed. Raises ValueError where the
    common length is not the longer one.
    """
    if common["max_steps"] <= FITNESS_STEPS:
        raise ValueError(f"max_steps {common['max_steps']} is not above the {FITNESS_STEPS} of the shorter runs")
    jobs = []
    for seed in FITNESS_SEEDS:
        for dataset in FITNESS_DATASETS:
            for steps in (FITNESS_STEPS, common["max_steps"]):
                directory = out / f"fitness-{dataset.replace(':', '-')}-{steps}-{seed}"
                own = {"dataset": dataset, "eval_dataset": dataset, "max_steps": steps}
                config = config_of("bf16", {**common, **own}) | {"seed": seed, "output_dir": str(directory)}
                jobs.append(Job("bf16", seed, directory, config))
    return jobs


def fitness_of(finished: Sequence[tuple[Job, Run]]) -> list[Fitness]:
    """The figures of each dataset all of whose runs are there."""
    found = []
    for dataset in FITNESS_DATASETS:
        own = [(job, run) for job, run in finished if job.config["dataset"] == dataset]
        short, long = (
            {job.seed: run for job, run in own if (job.config["max_steps"] == FITNESS_STEPS) == is_short}
            for is_short in (True, False)
        )
        if set(short) == set(long) == set(FITNESS_SEEDS):
            found.append(_fitness(dataset, [(short[seed], long[seed]) for seed in FITNESS_SEEDS]))
    return found


def _fitness(dataset: str, pairs: Sequence[tuple[Run, Run]]) -> Fitness:
    return Fitness(
        dataset,
        float(np.mean([long.before.accuracy for _, long in pairs])),
        *(float(np.mean([pair[i].after.accuracy for pair in pairs])) for i in (0, 1)),
        tuple(long.after.accuracy - short.after.accuracy for short, long in pairs),
        float(np.mean([long.column("sampling/entropy")[0] for _, long in pairs])),
    )


def chosen(found: Sequence[Fitness]) -> Fitness | None:
    """The fit dataset with the largest mean gain; None where none is fit."""
    return max((one for one in found if one.is_fit), key=lambda one: one.gain, default=None)


def table(found: Sequence[Fitness]) -> str:
    """The figures as Markdown."""
    lines = ["| dataset | pass@1 before | after the shorter run | after the longer | gain | first entropy | fit |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in found:
        scores = " | ".join(f"{100 * value:.1f} %" for value in (one.before, one.short, one.long))
        each = ", ".join(f"{100 * gain:+.1f}" for gain in one.gains)
        gain = f"{100 * one.gain:+.2f} ({each})"
        lines.append(f"| {one.dataset} | {scores} | {gain} | {one.entropy:.3f} | {'yes' if one.is_fit else 'no'} |")
    return "\n".join(lines)
