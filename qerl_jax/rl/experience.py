"""The scored rollout of a step, and the replacement of groups without a learning signal (dynamic sampling, DAPO,
arXiv 2503.14476 §3.2).

Axes: B completions = P prompts · G group, row = p · G + g.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32

from qerl_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class Experience:
    """P scored groups.

    Attributes:
      problems: P problems with their prompts.
      rollout: their completions.
      completions: B texts.
      rewards: weighted sum of the rewards of each row; NaN where no reward applies, or grading failed.
      reward_parts: values of each reward and its flags by name, [B].
      drawn: problems taken from the data stream, in all rounds.
      resampled: groups replaced.
      resampling_rounds: rounds after the first.
      perturbed: layer norms, or A and B matrices of the adapters, that the noise changed.
    """

    problems: list[Any]
    rollout: Rollout
    completions: list[str]
    rewards: Float32[np.ndarray, " B"]
    reward_parts: dict[str, Float32[np.ndarray, " B"]]
    drawn: int
    resampled: int = 0
    resampling_rounds: int = 0
    perturbed: int = 0


def equal_groups(rewards: np.ndarray, num_generations: int) -> Bool[np.ndarray, " P"]:
    """True for groups without a learning signal: all valid (not NaN) rewards are equal, or fewer than two are valid."""
    grouped = np.asarray(rewards, np.float32).reshape(-1, num_generations)
    valid = ~np.isnan(grouped)
    low = np.where(valid, grouped, np.inf).min(axis=1)
    high = np.where(valid, grouped, -np.inf).max(axis=1)
    return (low >= high) | (valid.sum(axis=1) < 2)


def replace_equal_groups(old: Experience, fresh: Experience, num_generations: int) -> Experience:
    """`old` with its equal groups replaced, in order, by as many unequal groups of `fresh` as there are."""
    targets = np.flatnonzero(equal_groups(old.rewards, num_generations))
    sources = np.flatnonzero(~equal_groups(fresh.rewards, num_generations))[: len(targets)]
    targets = targets[: len(sources)]
    problems, completions = list(old.problems), list(old.completions)
    for target, source in zip(targets, sources, strict=True):
        problems[target] = fresh.problems[source]
    to, of = _rows(targets, num_generations), _rows(sources, num_generations)
    for target, source in zip(to, of, strict=True):
        completions[target] = fresh.completions[source]

    def put(into: np.ndarray, values: np.ndarray) -> np.ndarray:
        into = into.copy()
        into[to] = values[of]
        return into

    # On the host: on the device each number of groups would be a program of its own.
    rollout = jax.tree.map(lambda a, b: jax.device_put(put(np.asarray(a), np.asarray(b))), old.rollout, fresh.rollout)
    return Experience(
        problems=problems,
        rollout=rollout.replace(prompt_index=old.rollout.prompt_index),
        completions=completions,
        rewards=put(old.rewards, fresh.rewards),
        reward_parts={name: put(values, fresh.reward_parts[name]) for name, values in old.reward_parts.items()},
        drawn=old.drawn + fresh.drawn,
        resampled=old.resampled + len(sources),
        resampling_rounds=old.resampling_rounds + 1,
    )


def _rows(groups: np.ndarray, num_generations: int) -> np.ndarray:
    return (groups[:, None] * num_generations + np.arange(num_generations)).reshape(-1)
