"""Optimizer and state of a run before its first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qerl_jax.config import Config
from qerl_jax.types import Policy, TrainState


def learning_rate(config: Config) -> optax.Schedule:
    """`update count -> learning rate`: a linear warm-up from zero over `ceil(warmup_ratio · updates)`, then the decay
    of `lr_scheduler_type`, as transformers' schedulers.
    """
    total = config.num_rollouts * config.num_iterations
    warmup = math.ceil(config.warmup_ratio * total)
    match config.lr_scheduler_type:
        case "cosine":
            after = optax.cosine_decay_schedule(config.learning_rate, max(total - warmup, 1))
        case "linear":
            after = optax.linear_schedule(config.learning_rate, 0.0, max(total - warmup, 1))
        case _:
            after = optax.constant_schedule(config.learning_rate)
    return optax.join_schedules([optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1)), after], [warmup])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW in fp32, after the update has clipped the global norm. Norms do not decay, as in transformers' `Trainer`
    (`get_decay_parameter_names`). (QeRL: 8-bit AdamW; on adapters alone the saving is small, so fp32 here.)
    """
    return optax.adamw(
        learning_rate(config),
        config.adam_beta1,
        config.adam_beta2,
        config.adam_epsilon,
        weight_decay=config.weight_decay,
        mask=lambda trees: {name: name != "norms" for name in trees},
    )


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
    base = policy.norms if policy.base_norms is None else policy.base_norms
    keep_reference = config.beta > 0 and (config.train_norms or policy.base_norms is not None)
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        norms=policy.norms,
        lora=policy.lora,
        opt_state=optimizer.init(trained_trees(policy.lora, policy.norms, config)),
        reference_norms=base if keep_reference else None,
        graphdef=policy.graphdef,
        model=policy.config,
        config=config,
        optimizer=optimizer,
    )


def trained_trees(lora: Any, norms: Any, config: Config) -> dict[str, Any]:
    """What the optimizer changes: the adapters, and the layer norms under `train_norms`."""
    return {"lora": lora, "norms": norms} if config.train_norms else {"lora": lora}


def at_layer(tree: Any, layer: int) -> Any:
    """One layer's part of a tree of parameters, gradients or optimizer state: each `{"layers": {i: …}}` in it becomes
    `{"layers": {0: …}}` with this layer's entry, so that the parts of all layers have the same structure.
    """

    def one(node: Any) -> Any:
        return {"layers": {0: node["layers"][layer]}} if _has_layers(node) else node

    return jax.tree.map(one, tree, is_leaf=_has_layers)


def from_layers(trees: Sequence[Any]) -> Any:
    """The inverse of `at_layer` over all layers; what no layer owns comes from the first."""

    def join(first: Any, *others: Any) -> Any:
        if not _has_layers(first):
            return first
        return {"layers": {i: node["layers"][0] for i, node in enumerate((first, *others))}}

    return jax.tree.map(join, *trees, is_leaf=_has_layers)


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and "layers" in node
