"""One step's experience: prompts, completions, rewards; with dynamic sampling, groups that teach nothing replaced.

Axes: B sequences, P prompts, G group (row = p · G + g).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array

from qerl_jax import keys
from qerl_jax.types import Rollout

Score = Callable[[list, Rollout], tuple[list[float], dict[str, list[float]]]]
"""(one item a prompt, their rollout) -> total reward of each row, and each reward's own values."""


@dataclasses.dataclass
class Experience:
    """What a step learns from.

    Attributes:
      items: the P problems.
      rollout: their completions.
      rewards: total of each row, NaN where nothing could score it.
      reward_parts: each reward's values by name.
      drawn: problems taken from the stream.
      refilled: groups replaced.
      rounds: refill rounds made.
    """

    items: list
    rollout: Rollout
    rewards: np.ndarray
    reward_parts: dict[str, np.ndarray]
    drawn: int
    refilled: int = 0
    rounds: int = 0


def collect(
    draw: Callable[[int, int], list],
    roll: Callable[[list, Array], Rollout],
    score: Score,
    key: Array,
    num_prompts: int,
    num_generations: int,
    refill_rounds: int,
) -> Experience:
    """Roll out and score `num_prompts` groups; then up to `refill_rounds` times put fresh groups in the place of equal
    ones.

    Args:
      draw: (offset, count) -> that many items of the stream, the offset counted from this step's start.
      roll: items and a key to a rollout; always called with `num_prompts` items, so that it has one trace.
      score: see `Score`.
      key: of this step; round r uses `keys.for_round(key, r)`.
      refill_rounds: 0 keeps every group (no dynamic sampling).
    """
    experience = _round(draw, roll, score, key, 0, num_prompts, 0)
    for refill_round in range(1, refill_rounds + 1):
        stale = np.flatnonzero(equal_groups(experience.rewards, num_generations))
        if len(stale) == 0:
            break
        fresh = _round(draw, roll, score, key, refill_round, num_prompts, experience.drawn)
        useful = np.flatnonzero(~equal_groups(fresh.rewards, num_generations))[: len(stale)]
        experience = _replace_groups(experience, fresh, stale[: len(useful)], useful, num_generations)
        experience.drawn, experience.rounds = experience.drawn + num_prompts, refill_round
        experience.refilled += len(useful)
    return experience


def _round(draw, roll, score, key, refill_round: int, num_prompts: int, offset: int) -> Experience:
    items = draw(offset, num_prompts)
    rollout = roll(items, keys.for_round(key, refill_round))
    rewards, parts = score(items, rollout)
    return Experience(
        items,
        rollout,
        np.asarray(rewards, np.float32),
        {k: np.asarray(v, np.float32) for k, v in parts.items()},
        num_prompts,
    )


def equal_groups(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """bool[P]: groups that teach nothing, because their valid rewards are all equal or fewer than two are valid."""
    grouped = np.asarray(rewards, np.float32).reshape(-1, num_generations)
    valid = ~np.isnan(grouped)
    low = np.where(valid, grouped, np.inf).min(axis=1)
    high = np.where(valid, grouped, -np.inf).max(axis=1)
    return (low >= high) | (valid.sum(axis=1) < 2)


def _replace_groups(
    old: Experience, fresh: Experience, slots: np.ndarray, sources: np.ndarray, group: int
) -> Experience:
    def rows(groups: np.ndarray) -> np.ndarray:
        return (groups[:, None] * group + np.arange(group)).reshape(-1)

    to, of = rows(slots), rows(sources)

    def put(into: np.ndarray, values: np.ndarray) -> np.ndarray:
        into = into.copy()
        into[to] = values[of]
        return into

    rollout = jax.tree.map(lambda a, b: a.at[to].set(b[of]), old.rollout, fresh.rollout)
    items = list(old.items)
    for slot, source in zip(slots, sources, strict=True):
        items[slot] = fresh.items[source]
    return dataclasses.replace(
        old,
        items=items,
        rollout=rollout.replace(prompt_index=old.rollout.prompt_index),
        rewards=put(old.rewards, fresh.rewards),
        reward_parts={name: put(values, fresh.reward_parts[name]) for name, values in old.reward_parts.items()},
    )
