"""GRPO and its relatives as one sum of weighted token losses.

`loss = Σ_t weight_t · token_loss_t`: the five variants differ in the weights (`token_weights`) and, for CISPO, in the
token loss. The weights come from the whole batch, so the parts of an accumulated gradient add up to it exactly. A
masked row has no gradient, but under `grpo` and `dr_grpo` it counts in the mean over rows, as in QeRL and TRL.

Sources: GRPO arXiv 2402.03300 eq. 3; DAPO 2503.14476 eq. 8; Dr. GRPO 2503.20783; CISPO 2506.13585 eq. 4; GSPO
2507.18071; two-sided clipping INTELLECT-2 2505.07291; names and formulas as in TRL's `GRPOTrainer`.

Axes: B sequences, T tokens (the predicted ones: column t of a batch's mask is column t − 1 here).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from qerl_jax.config import Config

_MEASURED = (
    "loss",
    "tokens",
    "trained_tokens",
    "entropy",
    "kl",
    "grad_norm",
    "skipped",
    "clip_ratio/region_mean",
)  # by the update itself


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


@runtime_checkable
class TokenLoss(Protocol):
    """The loss of each token as a pure function: what `grpo_step` takes as `token_loss`.

    It sees some rows of the batch at a time, so a row's losses must not depend on other rows. Outside of the mask the
    arrays are 0, and losses and metrics do not count. Around it `grpo_step` multiplies by the importance weight, adds
    `beta` times the KL penalty, averages as `loss_type` says, and differentiates in `logp` and `entropy`.

    A function that also has an argument `entropy` gets the policy's entropy at each token, with its gradient. One whose
    losses are 0 where the advantage is 0 may say so by an attribute `vanishes_with_advantage = True`, which a subclass
    does not inherit: such rows are then left out of the passes, and of the metrics.

    Args:
      logp: f32[B, T], log-probabilities under the policy being trained.
      old_logp: f32[B, T], those of the noise-free policy at rollout time.
      behaviour_logp: f32[B, T], those of the distribution sampled from.
      reference_logp: f32[B, T], those of the model's checkpoint; None where `beta` is 0 and they were not asked for.
      advantages: f32[B].
      mask: bool[B, T], tokens in the loss.

    Returns the losses, f32[B, T], and metrics by name, f32[B, T] each: `grpo_step` reports their mean over the tokens
    in the loss, or the extreme where the name ends in "/min" or "/max".
    """

    def __call__(
        self,
        logp: Array,
        old_logp: Array,
        behaviour_logp: Array,
        reference_logp: Array | None,
        advantages: Array,
        mask: Array,
    ) -> tuple[Array, dict[str, Array]]: ...


@dataclasses.dataclass(frozen=True)
class ClippedLoss:
    """`−min(min(r, delta) · A, clip(r, 1 − ε, 1 + ε_high) · A)`, the token loss of grpo, bnpo, dapo and dr_grpo.

    The ratio r is `exp(logp − old_logp)`, or at level "sequence" (GSPO) exp of its mean over the sequence.
    """

    vanishes_with_advantage: ClassVar[bool] = True
    epsilon: float
    upper_clip: float
    delta: float | None
    importance_sampling_level: str

    def __call__(
        self,
        logp: Float32[Array, "B T"],
        old_logp: Float32[Array, "B T"],
        behaviour_logp: Float32[Array, "B T"],
        reference_logp: Float32[Array, "B T"] | None,
        advantages: Float32[Array, " B"],
        mask: Bool[Array, "B T"],
    ) -> tuple[Float32[Array, "B T"], dict[str, Float32[Array, "B T"]]]:
        """As `TokenLoss`; the metrics are 1 where the clip stops the gradient."""
        ratio, advantage = policy_ratio(logp, old_logp, mask, self.importance_sampling_level), advantages[:, None]
        unclipped = ratio if self.delta is None else jnp.minimum(ratio, self.delta)
        is_low, is_high = ratio < 1 - self.epsilon, ratio > 1 + self.upper_clip
        # Not `jnp.clip`, which at a bound, as the ratio 1 of ε = 0, passes half of the gradient on.
        clipped = jnp.where(is_low, 1 - self.epsilon, jnp.where(is_high, 1 + self.upper_clip, ratio))
        metrics = _clip_metrics(is_low & (advantage < 0), is_high & (advantage > 0))
        return -jnp.minimum(unclipped * advantage, clipped * advantage), metrics


@dataclasses.dataclass(frozen=True)
class CispoLoss:
    """`−stop_gradient(min(r, cap)) · A · logp`, CISPO's token loss; r as in `ClippedLoss`."""

    vanishes_with_advantage: ClassVar[bool] = True
    cap: float
    importance_sampling_level: str

    def __call__(
        self,
        logp: Float32[Array, "B T"],
        old_logp: Float32[Array, "B T"],
        behaviour_logp: Float32[Array, "B T"],
        reference_logp: Float32[Array, "B T"] | None,
        advantages: Float32[Array, " B"],
        mask: Bool[Array, "B T"],
    ) -> tuple[Float32[Array, "B T"], dict[str, Float32[Array, "B T"]]]:
        """As `TokenLoss`; the metrics are 1 where the cap binds."""
        ratio = policy_ratio(logp, old_logp, mask, self.importance_sampling_level)
        loss = -jax.lax.stop_gradient(jnp.minimum(ratio, self.cap)) * advantages[:, None] * logp
        return loss, _clip_metrics(jnp.zeros_like(mask), ratio > self.cap)


def _clip_metrics(low: Array, high: Array) -> dict[str, Array]:
    return {f"clip_ratio/{side}_mean": flag.astype(jnp.float32) for side, flag in (("low", low), ("high", high))}


def policy_ratio(
    logp: Float32[Array, "B T"], old_logp: Float32[Array, "B T"], mask: Bool[Array, "B T"], level: str
) -> Float32[Array, "B T"]:
    """`exp(logp − old_logp)` of each token, or at level "sequence" exp of the mean over the tokens of its sequence."""
    log_ratio = jnp.where(mask, logp - old_logp, 0)
    if level == "sequence":
        mean = log_ratio.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
        log_ratio = jnp.broadcast_to(mean, mask.shape)
    return jnp.exp(log_ratio)


def built_in_loss(config: Config) -> TokenLoss:
    """The token loss of `loss_type`, with the settings of the config. Equal settings give equal functions, for which
    nothing is compiled again.
    """
    if config.loss_type == "cispo":
        return CispoLoss(config.upper_clip, config.importance_sampling_level)
    return ClippedLoss(config.epsilon, config.upper_clip, config.delta, config.importance_sampling_level)


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """A token loss and what `token_losses` does around it. Hashable: static under jit.

    Attributes:
      token_loss: the token loss.
      beta: coefficient of the KL penalty.
      importance_sampling_mode, importance_sampling_cap, importance_sampling_floor: as in `Config`.
    """

    token_loss: TokenLoss
    beta: float
    importance_sampling_mode: str
    importance_sampling_cap: float | None
    importance_sampling_floor: float | None

    @classmethod
    def of(cls, config: Config, token_loss: TokenLoss | None = None) -> LossSettings:
        """Those of a config; `token_loss` in place of its built-in one. Raises ValueError for one without a hash."""
        try:
            hash(token_loss)
        except TypeError as error:
            raise ValueError(
                f"token_loss {token_loss!r} has no hash, by which its programs are found: make it a function, or a "
                "frozen dataclass whose fields are numbers and no arrays"
            ) from error
        names = [field.name for field in dataclasses.fields(cls)[1:]]
        return cls(token_loss or built_in_loss(config), *(getattr(config, name) for name in names))

    @property
    def vanishes_with_advantage(self) -> bool:
        """Whether a row of advantage 0 has loss and gradient 0: a built-in loss (or one that says so), no penalty."""
        said = vars(type(self.token_loss)) | getattr(self.token_loss, "__dict__", {})  # a subclass may add a term
        return self.beta == 0 and said.get("vanishes_with_advantage") is True  # no property, no slot's descriptor

    @property
    def uses_entropy(self) -> bool:
        """Whether the token loss has an argument `entropy`."""
        return "entropy" in inspect.signature(self.token_loss).parameters


def token_losses(
    logprobs: Float32[Array, "B T"],
    old_logprobs: Float32[Array, "B T"],
    behaviour: Float32[Array, "B T"],
    reference: Float32[Array, "B T"] | None,
    advantages: Float32[Array, " B"],
    mask: Bool[Array, "B T"],
    settings: LossSettings,
    entropy: Float32[Array, "B T"] | None = None,
) -> tuple[Float32[Array, "B T"], dict[str, Float32[Array, "B T"]]]:
    """Loss of each token, and what there is to report of it: `token_loss · importance weight + β · k3`.

    Args:
      logprobs: log-probabilities under the policy being trained.
      old_logprobs: those of the noise-free policy at rollout time.
      behaviour: those of the distribution sampled from.
      reference: those of the model's checkpoint, where anything reads them.
      advantages: one a sequence.
      mask: tokens in the loss.
      settings: static.
      entropy: that of the policy being trained, for a token loss that asks for it.

    Raises ValueError for a token loss whose results have another shape, or metrics that have the name of another.
    """
    arrays = (logprobs, old_logprobs, behaviour, reference, entropy)
    logp, old_logp, behaviour_logp, reference_logp, entropy = (
        None if array is None else jnp.where(mask, array, 0) for array in arrays
    )
    more = {"entropy": entropy} if settings.uses_entropy else {}
    losses, values = settings.token_loss(logp, old_logp, behaviour_logp, reference_logp, advantages, mask, **more)
    _check_results(losses, values, mask.shape)

    mismatch = jax.lax.stop_gradient(old_logp - behaviour_logp)
    importance = _importance_ratio(mismatch, settings.importance_sampling_mode)
    if settings.importance_sampling_cap is not None:
        losses = losses * _importance_weight(importance, settings)
    values = {**values, "sampling/mismatch": mismatch, "sampling/importance": importance}
    if settings.beta > 0:
        difference = reference_logp - logp
        values["kl"] = jnp.exp(difference) - difference - 1
        losses = losses + settings.beta * values["kl"]
    return jnp.where(mask, losses, 0), {name: jnp.where(mask, value, 0) for name, value in values.items()}


def _check_results(losses: Any, values: Any, shape: tuple[int, ...]) -> None:
    for name, array in {"losses": losses, **values}.items():
        if jnp.shape(array) != shape:
            raise ValueError(f"token_loss returned {name} of shape {jnp.shape(array)}, expected {shape}: one a token")
    if taken := sorted(name for name in values if name in _MEASURED or name.startswith("sampling/")):
        raise ValueError(f"token_loss returned a metric {taken[0]!r}, which grpo_step reports itself: rename it")


def _importance_ratio(mismatch: Float32[Array, "B T"], mode: str) -> Float32[Array, "B T"]:
    """`π_old / π_behaviour` of each token, or of the whole sequence."""
    if mode.startswith("sequence"):
        mismatch = jnp.broadcast_to(mismatch.sum(axis=1, keepdims=True), mismatch.shape)
    return jnp.exp(mismatch)


def _importance_weight(ratio: Float32[Array, "B T"], settings: LossSettings) -> Float32[Array, "B T"]:
    """The ratio, clipped to [floor, cap] or 0 outside of it (TRL's `vllm_importance_sampling_mode`)."""
    low, high = settings.importance_sampling_floor or 0.0, settings.importance_sampling_cap
    if settings.importance_sampling_mode.endswith("truncate"):
        return jnp.clip(ratio, low, high)
    return jnp.where((ratio < low) | (ratio > high), 0, ratio)  # a ratio that is no number stays none
