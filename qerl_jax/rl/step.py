"""One rollout's update as a pure function: `grpo_step(state, frozen, batch) -> (state, metrics)`.

Axes: B sequences, T tokens, C completion tokens (column c is the token at prompt length + c).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from qerl_jax.config import Config
from qerl_jax.models.lora import without_adapter
from qerl_jax.rl.logprobs import logprobs_and_entropy
from qerl_jax.rl.loss import token_losses, token_weights
from qerl_jax.types import Batch, Policy, TrainState, merge_model


def learning_rate(config: Config) -> optax.Schedule:
    """`update count -> learning rate`: a linear warm-up from zero, then the decay of `lr_scheduler_type`."""
    total = config.max_steps * config.num_iterations
    warmup = int(config.warmup_ratio * total)
    match config.lr_scheduler_type:
        case "cosine":
            after = optax.cosine_decay_schedule(config.learning_rate, max(total - warmup, 1))
        case "linear":
            after = optax.linear_schedule(config.learning_rate, 0.0, max(total - warmup, 1))
        case _:
            after = optax.constant_schedule(config.learning_rate)
    return optax.join_schedules([optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1)), after], [warmup])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW in fp32 after clipping the global norm. (QeRL: 8-bit AdamW; on adapters alone the saving is small, so fp32
    here.)
    """
    adamw = optax.adamw(
        learning_rate(config),
        config.adam_beta1,
        config.adam_beta2,
        config.adam_epsilon,
        weight_decay=config.weight_decay,
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def init_state(policy: Policy, config: Config) -> TrainState:
    """The state before the first step.

    Raises ValueError for an imported adapter with dropout: rollout and trainer would no longer be the same policy, and
    the importance ratio would measure the dropout mask.
    """
    if policy.lora_config.dropout > 0:
        raise ValueError(
            f"the adapter has lora_dropout {policy.lora_config.dropout}: with dropout the trainer's policy differs "
            "from the one that sampled, so the ratio would measure the dropout mask; set lora_dropout to 0 in "
            "adapter_config.json"
        )
    optimizer = make_optimizer(config)
    keep_reference = config.train_norms and config.beta > 0
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        norms=policy.norms,
        lora=policy.lora,
        opt_state=optimizer.init(_trained(policy.lora, policy.norms, config)),
        reference_norms=policy.norms if keep_reference else None,
        graphdef=policy.graphdef,
        config=config,
        optimizer=optimizer,
    )


def _trained(lora: Any, norms: Any, config: Config) -> dict[str, Any]:
    return {"lora": lora, "norms": norms} if config.train_norms else {"lora": lora}


@jax.jit
def grpo_step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, Float32[Array, ""]]]:
    """Make `num_iterations` updates from one scored rollout.

    The first update's ratio is `exp(logp − stop_gradient(logp))`; its log-probabilities are the `old_logp` of those
    that follow, so no extra forward pass is made. An update whose loss or gradient is not finite changes nothing and
    is counted.

    Args:
      state: from `init_state` or the last step.
      frozen: `policy.frozen`; never donated, never copied.
      batch: `batch_size` rows.

    Returns:
      The next state, and scalar metrics averaged over the updates (`skipped` summed).
    """
    config: Config = state.config
    rows = _completion_rows(batch, min(config.max_completion_length, batch.tokens.shape[1] - 1))
    rows["weights"] = token_weights(rows["mask"], config.loss_type, config.max_completion_length)
    state, metrics, old = _update(state, frozen, rows)

    def again(state: TrainState, _: None) -> tuple[TrainState, dict[str, Array]]:
        return _update(state, frozen, rows | {"old": old})[:2]

    if config.num_iterations > 1:
        state, more = jax.lax.scan(again, state, None, length=config.num_iterations - 1)
        metrics = {name: _combine(name, jnp.append(more[name], metrics[name])) for name in metrics}
    return state.replace(step=state.step + 1), metrics


def _completion_rows(batch: Batch, width: int) -> dict[str, Array]:
    """What the loss needs of a batch, its token arrays [B, C] starting where each completion starts: prompts have no
    logits.
    """
    columns = batch.prompt_lengths[:, None] + jnp.arange(width)
    inside = columns < batch.tokens.shape[1]
    columns = jnp.where(inside, columns, 1)

    def take(array: Array) -> Array:
        return jnp.take_along_axis(array, columns, axis=1)

    return {
        "tokens": batch.tokens,
        "attention_mask": batch.attention_mask,
        "columns": columns,
        "targets": take(batch.tokens),
        "mask": take(batch.loss_mask) & inside,
        "behaviour": take(batch.logprobs),
        "advantages": batch.advantages,
    }


def _combine(name: str, values: Array) -> Array:
    if name == "skipped":
        return values.sum()
    return values.max() if name.endswith("/max") else values.min() if name.endswith("/min") else values.mean()


def _update(state: TrainState, frozen: Any, rows: dict[str, Array]) -> tuple[TrainState, dict[str, Array], Array]:
    """One optimizer update; also returns the log-probabilities before it, [B, C]."""
    config: Config = state.config
    params = _trained(state.lora, state.norms, config)
    parts = config.gradient_accumulation_steps

    def part(leaf: Array) -> Array:
        return leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:])

    def accumulate(total: Any, some: dict[str, Array]) -> tuple[Any, tuple]:
        (_, aux), gradient = jax.value_and_grad(_loss, has_aux=True)(params, state, frozen, some)
        return jax.tree.map(jnp.add, total, gradient), aux

    zeros = jax.tree.map(jnp.zeros_like, params)
    gradient, (sums, logprobs) = jax.lax.scan(accumulate, zeros, jax.tree.map(part, rows))
    metrics = _reduce(sums)
    metrics["grad_norm"] = optax.tree.norm(gradient)

    updates, opt_state = state.optimizer.update(gradient, state.opt_state, params)
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
        model = merge_model(state.graphdef, frozen, norms, lora)
        hidden = model(rows["tokens"], rows["attention_mask"], remat=config.gradient_checkpointing)
        before = jnp.take_along_axis(hidden, rows["columns"][:, :, None] - 1, axis=1)
        return logprobs_and_entropy(model, before, rows["targets"], config.sampling, config.logprob_chunk_size)

    logprobs, entropy = evaluate(params["lora"], params.get("norms", state.norms))
    reference = None
    if config.beta > 0:
        base_norms = state.norms if state.reference_norms is None else state.reference_norms
        reference = jax.lax.stop_gradient(evaluate(without_adapter(state.lora), base_norms)[0])
    old = rows.get("old", jax.lax.stop_gradient(logprobs))
    losses, values = token_losses(logprobs, old, rows["behaviour"], reference, rows["advantages"], mask, config)
    loss = jnp.sum(jnp.where(mask, rows["weights"] * losses, 0))
    return loss, (_sums(loss, mask, entropy, values), jax.lax.stop_gradient(logprobs))


def _sums(loss: Array, mask: Array, entropy: Array, values: dict[str, Array]) -> dict[str, Array]:
    """Sums and extremes over the masked tokens of some rows; `_reduce` makes the batch's metrics of them."""

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
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return metrics
