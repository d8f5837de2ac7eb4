"""The analysis plan of `docs/claims.md` as data: cells, metrics and comparisons, each fixed before any run of its own.

A cell is a setting that is run with every seed. A comparison takes the difference of a metric between two cells seed by
seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

NO_NOISE = {"sigma_start": 0.0, "sigma_end": 0.0}
SIGMA = {"sigma_start": 1e-2, "sigma_end": 5e-4}  # the paper's table 4
NVFP4 = {"weight_format": "nvfp4"}
AQN = {**NVFP4, **SIGMA}

CALIBRATED = "calibrated"
"""In place of a cell's model: the common one in calibrated NVFP4, which is made in the directory of the runs."""

NOISES: Mapping[str, Mapping[str, Any]] = {
    "aqn-constant": {**NVFP4, "sigma_start": 1e-2, "sigma_end": 1e-2},
    "aqn-linear": {**AQN, "noise_schedule": "linear"},
    "aqn-cosine": {**AQN, "noise_schedule": "cosine"},
    "aqn-logarithmic": {**AQN, "noise_schedule": "logarithmic"},
    "aqn-sigma0.3": {**NVFP4, "sigma_start": 3e-3, "sigma_end": 1.5e-4},
    "aqn-sigma3": {**NVFP4, "sigma_start": 3e-2, "sigma_end": 1.5e-3},
    "aqn-sigma10": {**NVFP4, "sigma_start": 1e-1, "sigma_end": 5e-3},
    "aqn-stages5": {**AQN, "num_stages": 5},
    "aqn-stages20": {**AQN, "num_stages": 20},
}
LORA_SIGMA = 1.6
"""σ of noise on the adapters over that on the norms at which both make the same KL of clean and noisy policy, by
`tools/compare_noise.py` on policy-30m.
"""


def _lora_noise(factor: float) -> Mapping[str, Any]:
    """Noise on the adapters, its σ a multiple of the one of equal KL."""
    sigmas = {name: round(LORA_SIGMA * factor * sigma, 9) for name, sigma in SIGMA.items()}
    return {**NVFP4, **sigmas, "noise_target": "lora"}


LORA_NOISES: Mapping[str, Mapping[str, Any]] = {
    "lora-noise": _lora_noise(1),
    "lora-noise-sigma0.3": _lora_noise(0.3),
    "lora-noise-sigma3": _lora_noise(3),
}
RANKS: Mapping[str, Mapping[str, Any]] = {f"aqn-rank{rank}": {**AQN, "lora_rank": rank} for rank in (8, 16, 64)}
CELLS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"weight_format": "bf16", **NO_NOISE},
    "nf4": {"weight_format": "nf4", **NO_NOISE},
    "mxfp4": {"weight_format": "mxfp4", **NO_NOISE},
    "nvfp4": {**NVFP4, **NO_NOISE},
    "aqn": AQN,
    **NOISES,
    "bf16-rate3": {"weight_format": "bf16", **NO_NOISE, "learning_rate": 3.0},
    "bf16-rate10": {"weight_format": "bf16", **NO_NOISE, "learning_rate": 10.0},
    "aqn-rate3": {**AQN, "learning_rate": 3.0},
    "aqn-rate10": {**AQN, "learning_rate": 10.0},
    **RANKS,
    "aqn-uncorrected": {**AQN, "importance_sampling_cap": None},
    "nvfp4-calibrated": {**NO_NOISE, "model": CALIBRATED},
    "full": {"weight_format": "full", **NO_NOISE, "learning_rate": 0.1},
    **LORA_NOISES,
}
"""Fields of the config in which a cell differs from the settings common to all; `learning_rate` is a multiple of the
common one.
"""

COMMON: Mapping[str, Any] = {
    "max_steps": 150,
    "batch_size": 256,
    "num_generations": 16,
    "num_iterations": 1,
    "max_prompt_length": 256,
    "max_completion_length": 320,
    "lora_rank": 32,
    "learning_rate": 1e-4,
    "num_stages": 10,
    "noise_schedule": "exponential",
    "importance_sampling_cap": 2.0,
    "eval_samples": 500,
    "eval_num_generations": 8,
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_batch_size": 512,
}
"""Settings of every run on the dataset word_problems; `--set` of `tools/reproduce.py` changes them for all cells."""

FIRST_ENTROPY, TRAINER_ENTROPY, MEAN_ENTROPY = "first entropy", "first entropy of the trainer", "mean entropy"
MEAN_ACCURACY, STEPS = "mean accuracy", "steps to half-way"
FINAL, PASS_AT_K = "final pass@1", "final pass@k"
SEEDS = 8
PRIMARY, SECONDARY, AMENDED = "primary", "secondary", "amended"
PILOT_SEED, PILOT_RATES = 100, (3e-5, 1e-4, 3e-4, 1e-3)
FITNESS_DATASETS = ("word_problems:2-6", "word_problems:2-7", "word_problems:3-5", "word_problems:3-6")
FITNESS_SEEDS, FITNESS_STEPS = (101, 102, 103), 100
FITNESS_GAIN, FITNESS_ENTROPY = 0.01, 0.2
"""A dataset is fit where BF16 runs of all steps end this much higher than runs of `FITNESS_STEPS`, in pass@1, and start
with this entropy, in nats a token.
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A difference `treatment − baseline` of a metric.

    Attributes:
      claim: number of the claim, as in `docs/claims.md`.
      treatment, baseline: cells.
      metric: key of `metrics.METRICS`.
      direction: 1: the claim says that the difference is above 0; -1: below; 0: that it is small.
      margin: the smallest difference that matters.
      family: p-values are corrected within it: PRIMARY, the paper's main claims; SECONDARY, the others; AMENDED, what
        was added to the plan when results of the first two families were known.
    """

    claim: int
    treatment: str
    baseline: str
    metric: str
    direction: int
    margin: float
    family: str = SECONDARY

    def __str__(self) -> str:
        return f"{self.metric}: {self.treatment} − {self.baseline}"


COMPARISONS: tuple[Comparison, ...] = (
    # 1: quantization raises the entropy of the policy
    Comparison(1, "nvfp4", "bf16", FIRST_ENTROPY, 1, 0.01, PRIMARY),
    *(Comparison(1, cell, "bf16", FIRST_ENTROPY, 1, 0.01) for cell in ("mxfp4", "nf4")),
    *(Comparison(1, cell, "bf16", TRAINER_ENTROPY, 1, 0.01) for cell in ("nvfp4", "mxfp4", "nf4")),
    # 2: it stays higher, and noise raises it further
    Comparison(2, "nvfp4", "bf16", MEAN_ENTROPY, 1, 0.01, PRIMARY),
    Comparison(2, "aqn", "nvfp4", MEAN_ENTROPY, 1, 0.01, PRIMARY),
    # 3: rewards grow faster
    Comparison(3, "aqn", "bf16", MEAN_ACCURACY, 1, 0.01, PRIMARY),
    Comparison(3, "nvfp4", "bf16", MEAN_ACCURACY, 1, 0.01),
    Comparison(3, "aqn", "nvfp4", MEAN_ACCURACY, 1, 0.01),
    *(Comparison(3, cell, "bf16", STEPS, -1, 5) for cell in ("nvfp4", "aqn")),
    # 4: and end higher
    Comparison(4, "nvfp4", "bf16", FINAL, 1, 0.01, PRIMARY),
    Comparison(4, "aqn", "bf16", FINAL, 1, 0.01, PRIMARY),
    Comparison(4, "aqn", "nvfp4", FINAL, 1, 0.01, PRIMARY),
    *(Comparison(4, "nvfp4", other, FINAL, 1, 0.01) for other in ("nf4", "mxfp4")),
    Comparison(4, "aqn", "bf16", PASS_AT_K, 1, 0.01),
    # 5: the noise decays, exponentially, from the published scale and in the published number of stages
    *(Comparison(5, "aqn", other, FINAL, 1, 0.01) for other in NOISES),
    # 6: larger learning rates
    *(Comparison(6, f"aqn-{rate}", f"bf16-{rate}", FINAL, 1, 0.01) for rate in ("rate3", "rate10")),
    # 7: the rank of the adapters matters little
    *(Comparison(7, cell, "aqn", FINAL, 0, 0.02) for cell in RANKS),
    # 8: the importance weight, which the release lacks
    Comparison(8, "aqn", "aqn-uncorrected", FINAL, 1, 0.01),
    # added on 2026-11-23, before any run of their cells: calibration, and full fine-tuning, which the paper says is met
    Comparison(1, "nvfp4-calibrated", "bf16", FIRST_ENTROPY, 1, 0.01, AMENDED),
    Comparison(4, "nvfp4-calibrated", "nvfp4", FINAL, 1, 0.01, AMENDED),
    Comparison(4, "aqn", "full", FINAL, 0, 0.02, AMENDED),
    # added on the same day, before any run of its cells or result of the family: noise on the adapters instead
    *(Comparison(5, "aqn", other, FINAL, 1, 0.01, AMENDED) for other in LORA_NOISES),
)


def config_of(cell: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell's runs, without seed and directory."""
    own = dict(CELLS[cell])
    if "learning_rate" in own:
        own["learning_rate"] *= common["learning_rate"]
    return {**common, **own}


def cells_of(comparisons: list[Comparison]) -> list[str]:
    """The cells that comparisons need, in the order of CELLS."""
    needed = {cell for comparison in comparisons for cell in (comparison.treatment, comparison.baseline)}
    return [cell for cell in CELLS if cell in needed]
