"""Metrics of an update, summed over its micro-batches on the device.

Axes: S sequences, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

Sums = dict[str, Float32[Array, ""]]


def empty_sums(names: Iterable[str]) -> Sums:
    """Sums and extremes over no token."""
    return {name: jnp.float32(_pick(name, -jnp.inf, jnp.inf, 0.0)) for name in names}


def token_sums(
    loss: Float32[Array, ""],
    mask: Bool[Array, "S C"],
    entropy: Float32[Array, "S C"],
    values: dict[str, Float32[Array, "S C"]],
) -> Sums:
    """Sums and extremes over the masked tokens of a micro-batch. No gradient.

    Args:
      loss: the micro-batch's share of the loss.
      mask: tokens in the loss.
      entropy: the policy's entropy at each token.
      values: from `token_losses`.
    """
    values = dict(values)
    importance, mismatch = values.pop("sampling/importance"), values.pop("sampling/mismatch")
    values |= {
        "trained_tokens": jnp.ones_like(entropy),
        "entropy": entropy,
        "sampling/sampling_logp_difference/mean": jnp.abs(mismatch),
        "sampling/sampling_logp_difference/max": jnp.abs(mismatch),
        "sampling/kl": jnp.expm1(mismatch) - mismatch,
        "sampling/token_mult_prob_error": jnp.exp(jnp.abs(mismatch)),
        "sampling/importance_sampling_ratio/mean": importance,
        "sampling/importance_sampling_ratio/min": importance,
        "sampling/importance_sampling_ratio/max": importance,
    }

    def over_tokens(name: str, value: Array) -> Array:
        if not name.endswith(("/max", "/min")):
            return jnp.sum(jnp.where(mask, value, 0))
        extreme, others = (jnp.max, -jnp.inf) if name.endswith("/max") else (jnp.min, jnp.inf)
        is_nan = jnp.any(mask & jnp.isnan(value))  # which the extreme of a large array loses on a CPU
        return jnp.where(is_nan, jnp.nan, extreme(jnp.where(mask, value, others)))

    sums = {"loss": loss} | {name: over_tokens(name, value) for name, value in values.items()}
    return jax.tree.map(jax.lax.stop_gradient, sums)


def add_sums(first: Sums, second: Sums) -> Sums:
    """The first sums with those over a micro-batch's tokens added."""
    return first | {
        name: _pick(name, jnp.maximum, jnp.minimum, jnp.add)(first[name], value) for name, value in second.items()
    }


def mean_metrics(sums: Sums) -> dict[str, Float32[Array, ""]]:
    """Metrics of a batch under TRL's names. Means and extremes are over the trained tokens, NaN without any; clip
    ratios over all tokens in the loss, because no clip stops the gradient of a row that has none.
    """
    trained, tokens = sums["trained_tokens"], jnp.maximum(sums["tokens"], 1)
    metrics = {}
    for name, value in sums.items():
        if name in ("loss", "tokens", "trained_tokens"):
            metrics[name] = value
        elif name.startswith("clip_ratio/"):
            metrics[name] = value / tokens
        else:
            metrics[name] = jnp.where(trained > 0, value / _pick(name, 1, 1, trained), jnp.nan)
    sides = [metrics[name] for name in ("clip_ratio/low_mean", "clip_ratio/high_mean") if name in metrics]
    if len(sides) == 2:
        metrics["clip_ratio/region_mean"] = sum(sides)
    return metrics


def over_updates(updates: list[dict[str, Float32[Array, ""]]]) -> dict[str, Float32[Array, ""]]:
    """Metrics of several updates as one: means, extremes where the name says so, `skipped` summed."""

    def combined(name: str) -> Array:
        values = jnp.stack([metrics[name] for metrics in updates])
        return values.sum() if name == "skipped" else _pick(name, jnp.max, jnp.min, jnp.mean)(values)

    return {name: combined(name) for name in updates[0]}


def _pick(name: str, largest, smallest, otherwise):
    return largest if name.endswith("/max") else smallest if name.endswith("/min") else otherwise
