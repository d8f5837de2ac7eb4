"""Group-relative advantages (GRPO, arXiv 2402.03300, §4.1) and the batch they make of a rollout.

Axes: B sequences, G group.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from qerl_jax.programs import ALIKE, program
from qerl_jax.types import Batch, FinishReason, Rollout

_EPSILON = 1e-4  # as in TRL and QeRL


def group_advantages(
    rewards: Float32[Array, " B"], num_generations: int, scale_rewards: str = "group"
) -> Float32[Array, " B"]:
    """`(r − mean_group) / (std + 1e-4)`, std with Bessel's correction over the group, over the batch, or no division.

    A NaN reward means that nothing could score the row: it gets advantage 0 and counts in no mean or deviation. Equal
    rewards give exactly 0.

    Args:
      rewards: row = p · G + g.
      num_generations: G.
      scale_rewards: "group", "batch" or "none".

    Raises ValueError if B is not a multiple of G, or for an unknown scale.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    if rewards.shape[0] % num_generations:
        raise ValueError(f"{rewards.shape[0]} rewards are not a multiple of num_generations {num_generations}")
    return _advantages(rewards, num_generations, scale_rewards)


@program(static_argnums=(1, 2), compiler_options=ALIKE)
def _advantages(rewards: Float32[Array, " B"], num_generations: int, scale_rewards: str) -> Float32[Array, " B"]:
    grouped = rewards.reshape(-1, num_generations)
    valid = ~jnp.isnan(grouped)
    count = valid.sum(axis=1, keepdims=True)
    filled = jnp.where(valid, grouped, 0)
    centred = jnp.where(valid, filled - filled.sum(axis=1, keepdims=True) / jnp.maximum(count, 1), 0)
    high, low = (jnp.where(valid, grouped, fill) for fill in (-jnp.inf, jnp.inf))
    centred = jnp.where(
        high.max(axis=1, keepdims=True) > low.min(axis=1, keepdims=True), centred, 0
    )  # rounding of the mean aside
    match scale_rewards:
        case "group":
            deviation = jnp.sqrt((centred**2).sum(axis=1, keepdims=True) / jnp.maximum(count - 1, 1))
        case "batch":
            mean = filled.sum() / jnp.maximum(count.sum(), 1)
            deviation = jnp.sqrt((jnp.where(valid, filled - mean, 0) ** 2).sum() / jnp.maximum(count.sum() - 1, 1))
        case "none":
            return centred.reshape(-1)
        case _:
            raise ValueError(f"scale_rewards {scale_rewards!r} is none of group, batch and none")
    return (centred / (deviation + _EPSILON)).reshape(-1)


@program(static_argnames="mask_truncated_completions")
def make_batch(
    rollout: Rollout,
    advantages: Float32[Array, " B"],
    rewards: Float32[Array, " B"] | None = None,
    mask_truncated_completions: bool = False,
) -> Batch:
    """A rollout with its advantages and the tokens that enter the loss: the completion, its EOS included.

    Rows leave the loss whole if their reward is NaN, their rollout failed, or they were truncated under
    `mask_truncated_completions`. The tokens of failed rows give way to those of one that did not fail: what broke them
    would break the trainer's pass over them, too, and 0 · NaN is NaN in a gradient that all rows share.
    """
    rows = rollout.finish != FinishReason.FAILED
    tokens = jnp.where(rows[:, None], rollout.tokens, rollout.tokens[jnp.argmax(rows)])
    if rewards is not None:
        rows &= ~jnp.isnan(jnp.asarray(rewards))
    if mask_truncated_completions:
        rows &= rollout.finish != FinishReason.LENGTH
    return Batch(
        tokens,
        rollout.logprobs,
        rollout.prompt_lengths,
        rollout.lengths,
        rollout.finish,
        rollout.prompt_index,
        advantages=jnp.asarray(advantages, jnp.float32),
        loss_mask=rollout.completion_mask & rows[:, None],
    )
