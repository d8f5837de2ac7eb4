"""The update on padded rows, whole in one program, by autodiff: what the packed one is held against.

Axes: B sequences, T tokens, C completion tokens (column c is the token at prompt length + c).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from qerl_jax.config import Config
from qerl_jax.models.distribution import logits_of_targets
from qerl_jax.models.lora import without_adapter
from qerl_jax.models.qwen2 import merge_model
from qerl_jax.rl.loss import LossSettings, token_losses, token_weights
from qerl_jax.rl.state import trained_trees
from qerl_jax.types import Batch, Policy, TrainState


@functools.partial(jax.jit, static_argnames="token_loss")
def plain_grpo_step(
    state: TrainState, frozen: Any, batch: Batch, token_loss: Any = None
) -> tuple[TrainState, dict[str, Float32[Array, ""]]]:
    """Make `num_iterations` updates from one scored rollout.

    The first update's ratio is `exp(logp − stop_gradient(logp))`; its log-probabilities are the `old_logp` of those
    that follow, so no extra forward pass is made. An update whose loss or gradient is not finite changes nothing and
    is counted.

    Args:
      state: from `init_state` or the last step.
      frozen: `policy.frozen`; never donated, never copied.
      batch: `batch_size` rows.
      token_loss: in place of the config's.

    Returns:
      The next state, and scalar metrics averaged over the updates (`skipped` summed).
    """
    config: Config = state.config
    rows = _completion_rows(batch, min(config.max_completion_length, batch.tokens.shape[1] - 1))
    rows["weights"] = token_weights(rows["mask"], config.loss_type, config.max_completion_length)
    rows["loss"] = LossSettings.of(config, token_loss)
    state, metrics, old = _update(state, frozen, rows)

    def again(state: TrainState, _: None) -> tuple[TrainState, dict[str, Array]]:
        return _update(state, frozen, rows | {"old": old})[:2]

    if config.num_iterations > 1:
        state, more = jax.lax.scan(again, state, None, length=config.num_iterations - 1)
        metrics = {name: _combine(name, jnp.append(more[name], metrics[name])) for name in metrics}
    drawn = batch.tokens.shape[0] // config.num_generations
    return state.replace(step=state.step + 1, cursor=state.cursor + drawn), metrics


def _completion_rows(batch: Batch, width: int) -> dict[str, Array]:
    """The loss's inputs of a batch: token arrays [B, C] from each completion's start; prompts have no logits."""
    columns = batch.prompt_lengths[:, None] + jnp.arange(width)
    inside = columns < batch.tokens.shape[1]
    columns = jnp.where(inside, columns, 1)

    def take(array: Array) -> Array:
        return jnp.take_along_axis(array, columns, axis=1)

    return {
        "tokens": batch.tokens, "attention_mask": batch.attention_mask, "columns": columns,
        "targets": take(batch.tokens), "mask": take(batch.loss_mask) & inside, "behaviour": take(batch.logprobs),
        "advantages": batch.advantages,
    }  # fmt: skip


def _combine(name: str, values: Array) -> Array:
    if name == "skipped":
        return values.sum()
    return values.max() if name.endswith("/max") else values.min() if name.endswith("/min") else values.mean()


def _update(state: TrainState, frozen: Any, rows: dict[str, Array]) -> tuple[TrainState, dict[str, Array], Array]:
    """One optimizer update; also returns the log-probabilities before it, [B, C]."""
    config: Config = state.config
    params = trained_trees(state.lora, state.norms, config)
    (_, (sums, logprobs)), gradient = jax.value_and_grad(_loss, has_aux=True)(params, state, frozen, rows)
    metrics = _reduce(sums)
    metrics["grad_norm"] = optax.tree.norm(gradient)

    clip = optax.clip_by_global_norm(config.max_grad_norm)
    clipped, _ = clip.update(gradient, clip.init(params))
    updates, opt_state = state.optimizer.update(clipped, state.opt_state, params)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    fresh = {"opt_state": opt_state, **optax.apply_updates(params, updates)}
    kept = jax.tree.map(lambda new, last: jnp.where(finite, new, last), fresh, {"opt_state": state.opt_state, **params})
    metrics["skipped"] = 1.0 - finite.astype(jnp.float32)
    return state.replace(**kept), metrics, logprobs.reshape(rows["mask"].shape)


def _loss(
    params: dict[str, Any], state: TrainState, frozen: Any, rows: dict[str, Array]
) -> tuple[Array, tuple[dict[str, Array], Array]]:
    """Weighted loss of some rows, with sums for the metrics and the rows' log-probabilities."""
    config: Config = state.config
    mask = rows["mask"]

    def evaluate(lora: Any, norms: Any) -> tuple[Array, Array]:
        model = merge_model(Policy(frozen, norms, lora, state.model, None))
        hidden = model(rows["tokens"], rows["attention_mask"])
        before = jnp.take_along_axis(hidden, rows["columns"][:, :, None] - 1, axis=1)
        targets, logits = rows["targets"].reshape(-1), model.logits(before)
        scaled = logits_of_targets(logits.reshape(targets.size, -1), targets, config.sampling.distribution)
        logprobs = jax.nn.log_softmax(scaled)
        finite = jnp.where(jnp.isfinite(logprobs), logprobs, 0)
        entropy = -jnp.sum(jnp.exp(finite) * finite, axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)
        return chosen.reshape(before.shape[:2]), entropy.reshape(before.shape[:2])

    logprobs, entropy = evaluate(params["lora"], params.get("norms", state.norms))
    reference = None
    if config.beta > 0:
        base_norms = state.norms if state.reference_norms is None else state.reference_norms
        reference = jax.lax.stop_gradient(evaluate(without_adapter(state.lora), base_norms)[0])
    old = rows.get("old", jax.lax.stop_gradient(logprobs))
    arrays = logprobs, old, rows["behaviour"], reference, rows["advantages"], mask
    losses, values = token_losses(*arrays, rows["loss"], entropy)
    loss = jnp.sum(jnp.where(mask, rows["weights"] * losses, 0))
    return loss, (_sums(loss, mask, entropy, values), jax.lax.stop_gradient(logprobs))


def _sums(loss: Array, mask: Array, entropy: Array, values: dict[str, Array]) -> dict[str, Array]:
    """Sums and extremes over the masked tokens of some rows; `_reduce` makes the batch's metrics of them."""

    def total(value: Array) -> Array:
        return jnp.sum(jnp.where(mask, value, 0))

    importance, mismatch = values["sampling/importance"], values["sampling/mismatch"]
    sums = {
        "loss": loss,
        "tokens": total(jnp.ones_like(entropy)),
        "entropy": total(entropy),
        "sampling/sampling_logp_difference/mean": total(jnp.abs(mismatch)),
        "sampling/sampling_logp_difference/max": jnp.max(jnp.where(mask, jnp.abs(mismatch), 0)),
        "sampling/kl": total(jnp.expm1(mismatch) - mismatch),
        "sampling/token_mult_prob_error": total(jnp.exp(jnp.abs(mismatch))),
        "sampling/importance_sampling_ratio/mean": total(importance),
        "sampling/importance_sampling_ratio/min": jnp.min(jnp.where(mask, importance, jnp.inf)),
        "sampling/importance_sampling_ratio/max": jnp.max(jnp.where(mask, importance, 0)),
    }
    sums |= {name: total(value) for name, value in values.items() if not name.startswith("sampling/")}
    return jax.tree.map(jax.lax.stop_gradient, sums)


def _reduce(sums: dict[str, Array]) -> dict[str, Array]:
    """Metrics of a batch from the sums of its parts, under TRL's names; means are over the tokens in the loss."""
    tokens = jnp.maximum(sums["tokens"].sum(), 1)
    metrics = {}
    for name, value in sums.items():
        if name.endswith("/max"):
            metrics[name] = value.max()
        elif name.endswith("/min"):
            metrics[name] = jnp.where(sums["tokens"].sum() > 0, value.min(), 1.0)
        elif name in ("loss", "tokens"):
            metrics[name] = value.sum()
        else:
            metrics[name] = value.sum() / tokens
    metrics["trained_tokens"] = metrics["tokens"]  # no row is left out here
    if "clip_ratio/low_mean" in metrics:
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return metrics
