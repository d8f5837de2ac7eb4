"""Metrics of an update, summed over its micro-batches on the device.

Axes: S sequences, C completion tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

Sums = dict[str, Float32[Array, ""]]


def empty_sums(with_kl: bool) -> Sums:
    """Sums and extremes over no token."""
    names = [
        "loss",
        "tokens",
        "entropy",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
        "sampling/kl",
        "sampling/token_mult_prob_error",
        "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max",
    ] + ["kl"] * with_kl
    return {name: jnp.float32(0) for name in names} | {"sampling/importance_sampling_ratio/min": jnp.float32(jnp.inf)}


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

    def total(value: Array) -> Array:
        return jnp.sum(jnp.where(mask, value, 0))

    importance, mismatch = values["importance"], values["mismatch"]
    sums = {
        "loss": loss,
        "tokens": total(jnp.ones_like(entropy)),
        "entropy": total(entropy),
        "clip_ratio/low_mean": total(values["clip_low"]),
        "clip_ratio/high_mean": total(values["clip_high"]),
        "sampling/sampling_logp_difference/mean": total(jnp.abs(mismatch)),
        "sampling/sampling_logp_difference/max": jnp.max(jnp.where(mask, jnp.abs(mismatch), 0)),
        "sampling/kl": total(jnp.expm1(mismatch) - mismatch),
        "sampling/token_mult_prob_error": total(jnp.exp(jnp.abs(mismatch))),
        "sampling/importance_sampling_ratio/mean": total(importance),
        "sampling/importance_sampling_ratio/min": jnp.min(jnp.where(mask, importance, jnp.inf)),
        "sampling/importance_sampling_ratio/max": jnp.max(jnp.where(mask, importance, 0)),
    }
    if "kl" in values:
        sums["kl"] = total(values["kl"])
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
        elif name.endswith("/max") or name in ("loss", "tokens"):
            metrics[name] = value
        else:
            metrics[name] = value / tokens
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return metrics


def over_updates(updates: list[dict[str, Float32[Array, ""]]]) -> dict[str, Float32[Array, ""]]:
    """Metrics of several updates as one: means, extremes where the name says so, `skipped` summed."""

    def combined(name: str) -> Array:
        values = jnp.stack([metrics[name] for metrics in updates])
        return values.sum() if name == "skipped" else _pick(name, jnp.max, jnp.min, jnp.mean)(values)

    return {name: combined(name) for name in updates[0]}


def _pick(name: str, largest, smallest, otherwise):
    return largest if name.endswith("/max") else smallest if name.endswith("/min") else otherwise
