"""Optimizer and state of a run before its first step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32

from qerl_jax.config import Config
from qerl_jax.models.formats import Dense, Weight
from qerl_jax.models.lora import LoraConfig
from qerl_jax.programs import program
from qerl_jax.types import Policy, TrainState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["learning_rate", "warmup", "updates"],
    meta_fields=["lr_scheduler_type", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"],
)
@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with the settings of a config, as an optax transformation: `init` and `update`. Equal settings are equal
    optimizers, for which nothing is compiled again; the functions of two calls of `optax.adamw` never are. Nor is
    anything for other numbers of the learning rate, which programs take as arrays.

    Attributes:
      learning_rate: the largest.
      warmup: updates until it is reached, from zero.
      updates: those of the run.
      lr_scheduler_type, adam_beta1, adam_beta2, adam_epsilon, weight_decay: as in `Config`.
    """

    learning_rate: Float32[ArrayLike, ""]
    warmup: Int32[ArrayLike, ""]
    updates: Int32[ArrayLike, ""]
    lr_scheduler_type: str
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float

    @classmethod
    def of(cls, config: Config) -> AdamW:
        """That of a config; the warm-up takes `ceil(warmup_ratio · updates)`."""
        updates = config.num_rollouts * config.num_iterations
        warmup = math.ceil(config.warmup_ratio * updates)
        others = (getattr(config, field.name) for field in dataclasses.fields(cls)[3:])
        return cls(np.float32(config.learning_rate), np.int32(warmup), np.int32(updates), *others)

    def init(self, params: Any) -> Any:
        """The state before the first update."""
        return make_optimizer(self).init(params)

    def update(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """What to add to `params`, and the next state."""
        return make_optimizer(self).update(gradient, state, params)

    @staticmethod
    def count(state: Any) -> int:
        """Updates that have changed something, of an optimizer's state."""
        return int(state[0].count)


def learning_rate(config: Config | AdamW) -> optax.Schedule:
    """`update count -> learning rate`: a linear warm-up from zero, then the decay of `lr_scheduler_type`, as
    transformers' schedulers. (optax's schedules take no arrays as their settings.)
    """
    settings = config if isinstance(config, AdamW) else AdamW.of(config)

    def rate(count: Int32[ArrayLike, ""]) -> Float32[Array, ""]:
        warmup, decay = settings.warmup, jnp.maximum(settings.updates - settings.warmup, 1)
        done = jnp.clip(count - warmup, 0, decay) / decay
        after = {"cosine": (1 + jnp.cos(jnp.pi * done)) / 2, "linear": 1 - done}.get(settings.lr_scheduler_type, 1.0)
        return settings.learning_rate * jnp.where(count < warmup, count / jnp.maximum(warmup, 1), after)

    return rate


@jax.jit
def learning_rate_at(optimizer: AdamW, updates: Int32[ArrayLike, ""]) -> Float32[Array, ""]:
    """The learning rate of the next update, after so many."""
    return jnp.asarray(learning_rate(optimizer)(updates), jnp.float32)


def make_optimizer(config: Config | AdamW) -> optax.GradientTransformation:
    """AdamW in fp32, after the update has clipped the global norm. Norms and biases, the only vectors, do not decay, as
    in transformers' `Trainer` (`get_decay_parameter_names`). (QeRL: 8-bit AdamW; on adapters alone the saving is small,
    so fp32 here.)
    """
    return optax.adamw(
        learning_rate(config),
        config.adam_beta1,
        config.adam_beta2,
        config.adam_epsilon,
        weight_decay=config.weight_decay,
        mask=lambda trees: jax.tree.map(lambda leaf: leaf.ndim > 1, trees),
    )


def init_state(
    policy: Policy, config: Config, optimizer: optax.GradientTransformation | AdamW | None = None
) -> TrainState:
    """The state before the first step.

    Args:
      policy: with the adapters that `config` describes.
      config: settings of the updates.
      optimizer: any optax transformation in place of the config's AdamW and its learning rate (`learning_rate` makes
        that schedule). It sees one tree over all layers, `{"lora": …}`, with `"norms"` under `train_norms`, and
        `{"norms": …, "weights": …}` under full fine-tuning, fp32, and gradients that are clipped to `max_grad_norm`
        already. Make it once: programs are compiled for it, and again for another, even of equal settings. Its step is
        computed twice, once to see whether everything stays finite.

    Raises ValueError where the adapters of policy and config differ, naming both values; for an imported adapter with
    dropout: rollout and trainer would no longer be the same policy, and the importance ratio would measure the dropout
    mask; and for full fine-tuning of quantized weights.
    """
    _check_adapters(policy.lora_config, config)
    weights = None
    if config.is_full:
        _refuse_quantized(policy.frozen)
        weights = _masters(policy.frozen)
    optimizer = AdamW.of(config) if optimizer is None else optimizer
    base = policy.norms if policy.base_norms is None else policy.base_norms
    keep_reference = config.trains_norms or policy.base_norms is not None
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        norms=policy.norms,
        lora=policy.lora,
        opt_state=optimizer.init(trained_trees(policy.lora, policy.norms, weights, config)),
        reference_norms=base if keep_reference else None,
        model=policy.config,
        config=config,
        optimizer=optimizer,
        weights=weights,
    )


@jax.jit
def _masters(frozen: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen)


@program
def compute_copy(weights: Any, frozen: Any) -> Any:
    """The trained weights of full fine-tuning as the model computes with them: in the dtypes of `frozen`, the policy's
    own, whose values are not read.
    """
    return jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), weights, frozen)


def current_policy(policy: Policy, state: TrainState) -> Policy:
    """The policy in a run's `state`, noise-free and in the compute dtype, to sample from or to evaluate.

    Args:
      policy: the policy with which the run began.
      state: state of the run.
    """
    frozen = policy.frozen if state.weights is None else compute_copy(state.weights, policy.frozen)
    return policy.replace(frozen=frozen, norms=state.norms, lora=state.lora)


def _refuse_quantized(frozen: Any) -> None:
    for weight in jax.tree.leaves(frozen, is_leaf=lambda node: isinstance(node, Weight)):
        if isinstance(weight, Weight) and not isinstance(weight, Dense):
            raise ValueError(
                f"weight_format 'full' trains unquantized weights, the policy's are {type(weight).__name__}: load it "
                "with weight_format 'bf16'"
            )


def _check_adapters(found: LoraConfig, config: Config) -> None:
    wanted = config.lora
    if found.dropout > 0:
        raise ValueError(
            f"the adapter has lora_dropout {found.dropout}: with dropout the trainer's policy differs from the one "
            "that sampled, so the ratio would measure the dropout mask; set lora_dropout to 0 in adapter_config.json"
        )
    if config.is_full and found.rank:
        raise ValueError(
            f"weight_format 'full' trains all weights and no adapters, the policy's have rank {found.rank}: load it "
            "with LoraConfig(rank=0)"
        )
    if found.rank != wanted.rank:
        raise ValueError(f"the policy's adapters have rank {found.rank}, the config has lora_rank {wanted.rank}")
    if found.rank == 0:
        return
    if found.scale != wanted.scale:
        raise ValueError(
            f"the policy's adapters have the scale {found.scale:g}, the config's lora_alpha and use_rslora give "
            f"{wanted.scale:g}"
        )
    if set(found.target_modules) != set(wanted.target_modules):
        raise ValueError(
            f"the policy's adapters are on {sorted(found.target_modules)}, the config's lora_target_modules are "
            f"{sorted(wanted.target_modules)}"
        )


def trained_trees(lora: Any, norms: Any, weights: Any, config: Config) -> dict[str, Any]:
    """What the optimizer changes: the adapters, and the layer norms under `train_norms`; or all weights."""
    if config.is_full:
        return {"norms": norms, "weights": weights}
    return {"lora": lora, "norms": norms} if config.train_norms else {"lora": lora}


def at_layer(tree: Any, layer: int) -> Any:
    """One layer's part of a tree of parameters, gradients or optimizer state: each `{"layers": {i: …}, …}` in it
    becomes `{"layers": {0: …}}` with this layer's entry, so that the parts of all layers have the same structure.
    """

    def one(node: Any) -> Any:
        return {"layers": {0: node["layers"][layer]}} if _has_layers(node) else node

    return jax.tree.map(one, tree, is_leaf=_has_layers)


def outside_layers(tree: Any) -> Any:
    """The part of such a tree that belongs to no layer: each `{"layers": {i: …}, …}` in it without the layers."""
    return jax.tree.map(lambda node: node | {"layers": {}} if _has_layers(node) else node, tree, is_leaf=_has_layers)


def from_layers(trees: Sequence[Any]) -> Any:
    """The inverse of `at_layer` over all layers, in their order, followed by `outside_layers` where it holds anything;
    what is the same in every part comes from the first.
    """

    def join(*nodes: Any) -> Any:
        if not _has_layers(nodes[0]):
            return nodes[0]
        layers = [node["layers"][0] for node in nodes if node["layers"]]
        outside = {name: value for node in nodes for name, value in node.items() if name != "layers"}
        return {"layers": dict(enumerate(layers)), **outside}

    return jax.tree.map(join, *trees, is_leaf=_has_layers)


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and "layers" in node
