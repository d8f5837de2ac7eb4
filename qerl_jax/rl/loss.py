"""GRPO and its relatives as one sum of weighted token losses.

`loss = Σ_t weight_t · token_loss_t`: the five variants differ in the weights (`token_weights`) and, for CISPO, in the
token loss. The weights come from the whole batch, so the parts of an accumulated gradient add up to it exactly. A
masked row has no gradient, but under `grpo` and `dr_grpo` it counts in the mean over rows, as in QeRL and TRL.

Sources: GRPO arXiv 2402.03300 eq. 3; DAPO 2503.14476 eq. 8; Dr. GRPO 2503.20783; CISPO 2506.13585 eq. 4; GSPO
2507.18071; two-sided clipping INTELLECT-2 2505.07291; names and formulas as in TRL's `GRPOTrainer`.

Axes: B sequences, T tokens (the predicted ones: column t of a batch's mask is column t − 1 here).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


@runtime_checkable
class LossConfig(Protocol):
    """What the loss reads; `qerl_jax.config.Config` has it."""

    loss_type: str
    importance_sampling_level: str
    epsilon: float
    upper_clip: float
    delta: float | None
    beta: float
    importance_sampling_cap: float | None
    max_completion_length: int


def token_weights(mask: Bool[Array, "B T"], loss_type: str, max_completion_length: int) -> Float32[Array, "B T"]:
    """Weight of each token's loss; a batch without any token gets zeros.

      grpo                1 / (B · tokens of the row)
      bnpo, dapo, cispo   1 / tokens of the batch
      dr_grpo             1 / (B · max_completion_length)

    B counts rows without a token, too (QeRL: `GRPOTrainer._compute_loss`). bnpo and dapo differ in TRL by the size of
    the batch they normalize over; here it is the whole batch for both.
    """
    rows = mask.shape[0]
    mask = mask.astype(jnp.float32)
    tokens = mask.sum(axis=1, keepdims=True)
    match loss_type:
        case "grpo":
            return mask / (rows * jnp.maximum(tokens, 1))
        case "bnpo" | "dapo" | "cispo":
            return mask / jnp.maximum(tokens.sum(), 1)
        case "dr_grpo":
            return mask / (rows * max_completion_length)
    raise ValueError(f"unknown loss_type {loss_type!r}")


def token_losses(
    logprobs: Float32[Array, "B T"],
    old_logprobs: Float32[Array, "B T"],
    behaviour: Float32[Array, "B T"],
    reference: Float32[Array, "B T"] | None,
    advantages: Float32[Array, " B"],
    mask: Bool[Array, "B T"],
    config: LossConfig,
) -> tuple[Float32[Array, "B T"], dict[str, Float32[Array, "B T"]]]:
    """Loss of each token, and what there is to report of it.

      ratio r = exp(logp − old_logp), or exp of its mean over the sequence
      clipped   −min(min(r, delta) · A, clip(r, 1 − ε, 1 + ε_high) · A)
      cispo     −stop_gradient(min(r, ε_high)) · A · logp
      times the truncated importance weight min(exp(old_logp − behaviour), cap), plus β · k3

    Args:
      logprobs: log-probabilities under the policy being trained.
      old_logprobs: those of the noise-free policy at rollout time.
      behaviour: those of the distribution sampled from.
      reference: those of the adapter-free policy; None where beta is 0.
      advantages: one a sequence.
      mask: tokens in the loss.
      config: names as in `Config`.
    """
    log_ratio = jnp.where(mask, logprobs - old_logprobs, 0)
    if config.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    ratio = jnp.exp(log_ratio)
    advantage = advantages[:, None]
    if config.loss_type == "cispo":
        loss = -jax.lax.stop_gradient(jnp.minimum(ratio, config.upper_clip)) * advantage * logprobs
    else:
        unclipped = ratio if config.delta is None else jnp.minimum(ratio, config.delta)
        clipped = jnp.clip(ratio, 1 - config.epsilon, 1 + config.upper_clip)
        loss = -jnp.minimum(unclipped * advantage, clipped * advantage)
    loss = jnp.broadcast_to(loss, mask.shape)

    mismatch = jax.lax.stop_gradient(jnp.where(mask, old_logprobs - behaviour, 0))
    importance = jnp.exp(mismatch)
    if config.importance_sampling_cap is not None:
        loss = loss * jnp.minimum(importance, config.importance_sampling_cap)
    values = {"mismatch": mismatch, "importance": importance, **_clip_flags(ratio, advantage, mask, config)}
    if reference is not None:
        difference = jnp.where(mask, reference - logprobs, 0)
        values["kl"] = jnp.exp(difference) - difference - 1
        loss = loss + config.beta * values["kl"]
    return jnp.where(mask, loss, 0), values


def _clip_flags(ratio: Array, advantage: Array, mask: Array, config: LossConfig) -> dict[str, Float32[Array, "B T"]]:
    """1 where the clip stops the gradient: below for negative advantages, above for positive ones (for CISPO, wherever
    the cap binds).
    """
    if config.loss_type == "cispo":
        low, high = jnp.zeros_like(ratio, bool), ratio > config.upper_clip
    else:
        low = (ratio < 1 - config.epsilon) & (advantage < 0)
        high = (ratio > 1 + config.upper_clip) & (advantage > 0)
    return {
        name: jnp.where(mask, flag, False).astype(jnp.float32)
        for name, flag in (("clip_low", low), ("clip_high", high))
    }
