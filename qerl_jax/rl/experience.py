"""The scored rollout of a step, and the replacement of groups without a learning signal (dynamic sampling, DAPO,
arXiv 2503.14476 §3.2).

Axes: B completions = P prompts · G group, row = p · G + g.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32

from qerl_jax.parallel import Replicas
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
      sampled: tokens sampled in all rounds.
      resampled: groups replaced.
      resampling_rounds: rounds after the first.
      perturbed: layer norms that the noise changed.
    """

    problems: list[Any]
    rollout: Rollout
    completions: list[str]
    rewards: Float32[np.ndarray, " B"]
    reward_parts: dict[str, Float32[np.ndarray, " B"]]
    drawn: int
    sampled: int
    resampled: int = 0
    resampling_rounds: int = 0
    perturbed: int = 0


def equal_groups(rewards: np.ndarray, num_generations: int) -> Bool[np.ndarray, " P"]:
    """True for groups without a learning signal: all valid (not NaN) rewards are equal, or fewer than two are valid."""
    grouped = np.asarray(rewards, np.float32).reshape(-1, num_generations)
    valid = ~np.isnan(grouped)
    low = np.where(valid, grouped, np.inf).min(axis=1)
    high = np.where(valid, grouped, -np.inf).max(axis=1)
    return low >= high


def refill_size(equal: Bool[np.ndarray, " P"], drawn: int) -> int:
    """Prompts of the next round of dynamic sampling: as many as replace the `equal` groups if as large a share of them
    teaches as of the `drawn` ones, of which all that taught were kept. P is halved as often as that allows, like most
    slots of a rollout (`RolloutShapes.slot_counts`): fewer rows in as many slots take as long.
    """
    size, lacking = len(equal), int(equal.sum())
    useful = size - lacking
    while size > 1 and -(-size // 2) * useful >= lacking * drawn:
        size = -(-size // 2)
    return size


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
    both = jax.device_get((old.rollout, fresh.rollout))
    rollout = jax.tree.map(lambda into, values: jax.device_put(put(into, values)), *both)
    return Experience(
        problems=problems,
        rollout=rollout.replace(prompt_index=old.rollout.prompt_index),
        completions=completions,
        rewards=put(old.rewards, fresh.rewards),
        reward_parts={name: put(values, fresh.reward_parts[name]) for name, values in old.reward_parts.items()},
        drawn=old.drawn + fresh.drawn,
        sampled=old.sampled + fresh.sampled,
        resampled=old.resampled + len(sources),
        resampling_rounds=old.resampling_rounds + 1,
    )


def gather_experience(replicas: Replicas, own: Experience | None, problems: Sequence[Any], pad: int) -> Experience:
    """The experience of all replicas, the same on each, in the order of one process.

    Args:
      replicas: those that share a rollout.
      own: this one's groups, with the `prompt_index` of all; None: it has none.
      problems: all P.
      pad: the token behind a row's.

    Raises ReplicaError where another replica failed.
    """
    shares = [share for share in replicas.gather(own and _to_send(own)) if share is not None]
    rollouts, rewards, parts, texts, [width, *_] = zip(*shares, strict=True)
    order = np.argsort(np.concatenate([rollout.prompt_index for rollout in rollouts]), kind="stable")

    def join(*arrays: np.ndarray) -> np.ndarray:
        if arrays[0].ndim == 2:
            fill = pad if arrays[0].dtype.kind == "i" else 0
            arrays = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=fill) for a in arrays]
        return np.concatenate(arrays)[order]

    completions = [text for share in texts for text in share]
    return Experience(
        problems=list(problems),
        sampled=sum(int((rollout.lengths - rollout.prompt_lengths).sum()) for rollout in rollouts),
        rollout=jax.tree.map(lambda *arrays: jax.device_put(join(*arrays)), *rollouts),
        completions=[completions[row] for row in order],
        rewards=join(*rewards),
        reward_parts={name: join(*(share[name] for share in parts)) for name in parts[0]},
        drawn=len(problems),
    )


def _to_send(own: Experience) -> tuple[Rollout, np.ndarray, dict[str, np.ndarray], list[str], int]:
    """What other replicas do not know: rollout, without the columns that no row fills, rewards, their parts and texts;
    and the rollout's width.
    """
    rollout = jax.device_get(own.rollout)
    longest, width = rollout.lengths.max(), rollout.tokens.shape[1]
    rollout = jax.tree.map(lambda array: array[:, :longest] if array.ndim == 2 else array, rollout)
    return rollout, own.rewards, own.reward_parts, own.completions, width


def _rows(groups: np.ndarray, num_generations: int) -> np.ndarray:
    return (groups[:, None] * num_generations + np.arange(num_generations)).reshape(-1)
