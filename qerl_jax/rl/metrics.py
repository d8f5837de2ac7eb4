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
    importance, mismatch = values.pop("importance"), values.pop("mismatch")
    values |= {
        "tokens": jnp.ones_like(entropy),
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
        if name.endswith("/max"):
            return jnp.max(jnp.where(mask, value, -jnp.inf))
        return jnp.min(jnp.where(mask, value, jnp.inf)) if name.endswith("/min") else jnp.sum(jnp.where(mask, value, 0))

    sums = {"loss": loss} | {name: over_tokens(name, value) for name, value in values.items()}
    return jax.tree.map(jax.lax.stop_gradient, sums)


def add_sums(first: Sums, second: Sums) -> Sums:
    """Sums over the tokens of both."""
    return {name: _pick(name, jnp.maximum, jnp.minimum, jnp.add)(value, second[name]) for name, value in first.items()}


def mean_metrics(sums: Sums) -> dict[str, Float32[Array, ""]]:
    """Metrics of a batch under TRL's names; means are over the tokens in the loss."""
    tokens = jnp.maximum(sums["tokens"], 1)
    metrics = {}
    for name, value in sums.items():
        if name.endswith("/min"):
            metrics[name] = jnp.where(sums["tokens"] > 0, value, 1.0)
        elif name.endswith("/max"):
            metrics[name] = jnp.where(sums["tokens"] > 0, value, 0.0)
        elif name in ("loss", "tokens"):
            metrics[name] = value
        else:
            metrics[name] = value / tokens
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
