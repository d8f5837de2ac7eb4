"""AdamW of a config, and its learning rate."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32

from qerl_jax.config import Config


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
    def count(state: Any) -> Int32[Array, ""]:
        """Updates that have changed something, of an optimizer's state."""
        return state[0].count


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
