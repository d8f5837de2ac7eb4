"""Metrics and completion columns of a step, under TRL's names.

Axes: B sequences, P prompts, G group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32

from qerl_jax.rewards.outcomes import FLAGS
from qerl_jax.rl.adamw import AdamW, learning_rate_at
from qerl_jax.rl.experience import Experience, equal_groups
from qerl_jax.types import FinishReason, TrainState


def step_metrics(
    experience: Experience,
    update: Mapping[str, Array],
    num_generations: int,
    timing: Mapping[str, float],
    verdict: str | None,
) -> dict[str, float]:
    """Metrics of a step: those of the update, and of its completions and rewards.

    `accuracy` is the share of completions to which the reward `verdict` gives 1, of those to which it gives a value;
    NaN where it gives none, and no metric where no reward says what is right (None).
    `reward_std` is the mean over groups of the standard deviation within each; lengths are in tokens, times in seconds.
    `sampling/entropy` is the mean entropy of the sampled policy (under noise) over all completion tokens, in nats.
    `rewards/NAME/FLAG_rate` is the share of completions in which no answer could be read (`parse_failure`), that met a
    time limit (`timeout`), or whose grading process died (`crash`).
    """
    rollout = experience.rollout
    ends, starts, finish, entropies, update = jax.device_get(
        (rollout.lengths, rollout.prompt_lengths, rollout.finish, rollout.entropies, dict(update))
    )
    lengths, clipped = ends - starts, finish == FinishReason.LENGTH
    ended = lengths[~clipped]
    grouped = experience.rewards.reshape(-1, num_generations)
    metrics = {name: float(value) for name, value in update.items()}
    metrics |= {
        "reward": _mean(experience.rewards),
        "reward_std": _mean([_deviation(group) for group in grouped]),
        "frac_reward_zero_std": float(equal_groups(experience.rewards, num_generations).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.mean()),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else 0.0,
        "completions/min_terminated_length": float(ended.min()) if len(ended) else 0.0,
        "completions/max_terminated_length": float(ended.max()) if len(ended) else 0.0,
        "completions/failed": float((finish == FinishReason.FAILED).sum()),
        "tokens_per_second": experience.sampled / timing["time/rollout"],
        "step_time": sum(timing.values()),
        "dynamic_sampling/refilled_groups": float(experience.resampled),
        "dynamic_sampling/rounds": float(experience.resampling_rounds),
        **timing,
    }
    if verdict is not None:
        metrics["accuracy"] = _mean(_known(experience.reward_parts[verdict]) == 1)
    if entropies is not None:
        metrics["sampling/entropy"] = float(entropies.sum() / max(lengths.sum(), 1))
    for name, values in experience.reward_parts.items():
        reward, _, flag = name.rpartition("/")
        if reward and flag in FLAGS:
            metrics[f"rewards/{name}_rate"] = _mean(values)
        else:
            metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = _mean(values), _deviation(values)
    return metrics


def run_metrics(
    experience: Experience, state: TrainState, skipped: float, sigma: float, tokens: int, problems: int
) -> dict[str, float]:
    """Progress of a run after a step: noise, learning rate (that of the step's first update), tokens, epochs.

    Args:
      experience: scored rollout of the step.
      state: state after the step.
      skipped: updates of the step that were not finite; the schedule does not count them.
      sigma: standard deviation of the noise.
      tokens: tokens seen before the step.
      problems: size of the dataset.
    """
    config, rate = state.config, {}
    updates = AdamW.count(state.opt_state) if isinstance(state.optimizer, AdamW) else None
    updates, cursor, lengths = jax.device_get((updates, state.cursor, experience.rollout.lengths))
    if updates is not None:  # an optimizer of the user's has a rate of its own, or none
        before = int(updates) - (config.num_iterations - int(skipped))
        rate["learning_rate"] = float(learning_rate_at(state.optimizer, before))
    return {
        **rate,
        "aqn/sigma": sigma,
        "aqn/norms": experience.perturbed,
        "num_tokens": tokens + int(lengths.sum()),
        "epoch": int(cursor) / problems,
    }


def _known(values: Sequence[float] | np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[~np.isnan(values)]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    known = _known(values)
    return float(known.mean()) if known.size else math.nan


def _deviation(values: Sequence[float] | np.ndarray) -> float:
    known = _known(values)
    return float(known.std(ddof=1)) if known.size > 1 else 0.0


def completion_columns(
    experience: Experience, advantages: Float32[Array, " B"], order: str | None = None
) -> dict[str, list[Any]]:
    """Columns of the step's completions file, a row for each completion. `order`: the dataset's column that
    `data_order` names.
    """
    rollout = experience.rollout
    index, ends, starts, finish, advantages = jax.device_get(
        (rollout.prompt_index, rollout.lengths, rollout.prompt_lengths, rollout.finish, advantages)
    )
    rows = [experience.problems[p].problem for p in index]
    return {
        "problem_id": [problem.id for problem in rows],
        "prompt": [problem.prompt for problem in rows],
        "completion": experience.completions,
        "answer": [problem.answer for problem in rows],
        **({} if order is None else {f"data_order/{order}": [problem.extra[order] for problem in rows]}),
        "reward": experience.rewards.tolist(),
        **{f"rewards/{name}": values.tolist() for name, values in experience.reward_parts.items()},
        "advantage": advantages.tolist(),
        "length": (ends - starts).tolist(),
        "finish": [FinishReason(int(value)).name.lower() for value in finish],
    }
