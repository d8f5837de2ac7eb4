"""The optimizer's part of an update: the gradient's norm, clipping, non-finite updates, and the step itself.

A layer has dozens of small arrays, and a kernel for each of them would take a GPU longer to launch than to run. So what
is reduced to one number is one array first, which XLA reads from its parts, and a step is computed twice, once to see
whether it stays finite and once to be kept, because XLA then makes one kernel for parameter and moments.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32

from qerl_jax.programs import program
from qerl_jax.rl.adamw import AdamW
from qerl_jax.rl.metrics import Sums, mean_metrics
from qerl_jax.rl.state import at_layer, from_layers, outside_layers, trained_trees
from qerl_jax.types import TrainState


def apply_gradients(
    state: TrainState, gradients: list[Any], sums: Sums, outside: Any = None
) -> tuple[TrainState, dict[str, Array]]:
    """The state after the optimizer's step, if loss, gradient and the state itself are finite, else that before it, and
    the update's metrics.

    The config's AdamW treats every array by itself, so it runs layer by layer, as one program for all layers. An
    optimizer of the user's may compare arrays (a global norm, one trust ratio for all), so it runs over the whole tree.

    Args:
      state: before the update.
      gradients: the gradient of each layer's trained trees.
      sums: sums over the update's tokens.
      outside: the gradient of the trained weights that are in no layer; None: there are none.
    """
    parts = [as_tree(gradient) for gradient in gradients]
    parts += [] if outside is None else [as_outside_tree(outside)]
    squares = zeros_like(sums["loss"])
    for part in parts:
        squares = add_squares(part, squares)
    metrics, factor, finite = finish(np.float32(state.config.max_grad_norm), sums, squares)
    whole = whole_of(state)
    if isinstance(state.optimizer, AdamW):
        update = Partial(AdamW.update, state.optimizer)
        before, join = [at_layer(whole, i) for i in range(len(gradients))], from_layers
        before += [] if outside is None else [outside_layers(whole)]
    else:
        update = Partial(state.optimizer.update)
        before, join, parts = [whole], lambda trees: trees[0], [from_layers(parts)]
    for old, part in zip(before, parts, strict=True):
        finite = stays_finite(update, old, part, factor, finite)
    jax.block_until_ready(finite)  # the last activations are freed then; else the next state would be beside them
    after = [apply(update, old, part, factor, finite) for old, part in zip(before, parts, strict=True)]
    return state.replace(**join(after)), metrics | {"skipped": skipped(finite)}


def whole_of(state: TrainState) -> dict[str, Any]:
    """The optimizer's state and the trained trees."""
    trained = trained_trees(state.lora, state.norms, state.weights, state.config)
    return {"opt_state": state.opt_state, **trained}


@program(keep_unused=True)
def zeros_like(tree: Any) -> Any:
    """Zeros in the form of a tree of arrays."""
    return jax.tree.map(jnp.zeros_like, tree)


def as_tree(gradient: dict[str, Any]) -> dict[str, Any]:
    """A layer's gradient in the form of `at_layer`."""
    return {name: {"layers": {0: own}} if own else {} for name, own in gradient.items()}


def as_outside_tree(gradient: dict[str, Any]) -> dict[str, Any]:
    """The gradient of the weights that are in no layer, in the form of `outside_layers`."""
    return {"norms": {"layers": {}}, "weights": gradient}


@program
def add_squares(gradient: Any, total: Float32[Array, ""]) -> Float32[Array, ""]:
    """The total with the sum of squares of a part of the gradient."""
    return total + jnp.sum(jnp.square(_as_one(jax.tree.leaves(gradient))))


@program
def finish(
    max_norm: Float32[ArrayLike, ""], sums: Sums, squares: Float32[Array, ""]
) -> tuple[dict[str, Array], Float32[Array, ""], Bool[Array, ""]]:
    """The update's metrics, the factor that clips the gradient, at most 1, and whether loss and gradient are finite."""
    metrics = mean_metrics(sums)
    norm = metrics["grad_norm"] = jnp.sqrt(squares)
    return metrics, max_norm / jnp.maximum(norm, max_norm), jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)


@program
def stays_finite(
    update: Partial, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""], finite: Bool[Array, ""]
) -> Bool[Array, ""]:
    """Whether everything so far is finite, and the optimizer's state and the parameters after its step.

    Args:
      update: an optimizer's step; its numbers are arrays.
      before: "opt_state" and the trained trees, of one layer, of none or of all.
      gradient: gradient of the trained trees.
      factor: from `finish`.
      finite: from `finish`, or from this function for the parts before.
    """
    by_shape = collections.defaultdict(list)
    for leaf in jax.tree.leaves(_stepped(update, before, gradient, factor)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            by_shape[leaf.shape].append(jnp.abs(leaf).astype(jnp.float32))
    largest = [functools.reduce(jnp.maximum, leaves) for leaves in by_shape.values()]  # NaN if one is
    return finite & jnp.isfinite(_as_one(largest)).all()


@program(donate_argnums=2)
def apply(
    update: Partial, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""], finite: Bool[Array, ""]
) -> dict[str, Any]:
    """The optimizer's state and the parameters after its step, or `before` where an update is not finite. Arguments as
    in `stays_finite`, `finite` from the last part; the gradient is donated.
    """
    after = _stepped(update, before, gradient, factor)
    return jax.tree.map(lambda new, last: jnp.where(finite, new, last), after, before)


def _stepped(update: Partial, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""]) -> dict[str, Any]:
    params = {name: before[name] for name in gradient}
    gradient = jax.tree.map(lambda leaf: factor * leaf, gradient)
    updates, opt_state = update(gradient, before["opt_state"], params)
    return {"opt_state": opt_state, **optax.apply_updates(params, updates)}


def _as_one(leaves: Sequence[Array]) -> Float[Array, " X"]:
    return jnp.concatenate([leaf.ravel() for leaf in leaves]) if leaves else jnp.zeros(0)


@program
def skipped(finite: Bool[Array, ""]) -> Float32[Array, ""]:
    """The metric: 1 for an update that is not finite."""
    return 1.0 - finite.astype(jnp.float32)
