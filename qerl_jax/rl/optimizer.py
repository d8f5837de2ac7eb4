"""The optimizer's part of an update: the gradient's norm, clipping, non-finite updates, and the step itself.

A layer has dozens of small arrays, and a kernel for each of them would take a GPU longer to launch than to run. So what
is reduced to one number is one array first, which XLA reads from its parts, and a step is computed twice, once to see
whether it stays finite and once to be kept, because XLA then makes one kernel for parameter and moments.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int

from qerl_jax.programs import ALIKE, program
from qerl_jax.rl.adamw import AdamW
from qerl_jax.rl.metrics import Sums, mean_metrics
from qerl_jax.rl.state import from_parts, in_parts, trained_trees
from qerl_jax.types import TrainState

Step = AdamW | Partial
"""The config's optimizer, whose numbers are arrays, or the step of another one."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "start"], meta_fields=["structure", "shapes"]
)
@dataclasses.dataclass(frozen=True)
class Flat:
    """A tree of arrays as a part of one vector, in the order of its leaves.

    Attributes:
      values: fp32.
      start: of the part.
      structure: of the tree.
      shapes: of its leaves.
    """

    values: Float32[Array, " X"]
    start: Int[ArrayLike, ""]
    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def like(cls, tree: Any, values: Float32[Array, " X"], start: int | np.integer) -> Flat:
        """A part of the vector in the form of a tree."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(values, np.int32(start), structure, tuple(leaf.shape for leaf in leaves))

    def tree(self) -> Any:
        """The tree. Within a program its leaves are views of the vector, which fuse with what reads them."""
        sizes = [math.prod(shape) for shape in self.shapes]
        own = jax.lax.dynamic_slice(self.values, (self.start,), (sum(sizes),))
        ends = zip(self.shapes, sizes, itertools.accumulate(sizes), strict=True)
        return jax.tree.unflatten(self.structure, [own[end - n : end].reshape(shape) for shape, n, end in ends])


def apply_gradients(state: TrainState, parts: Sequence[Any], sums: Sums) -> tuple[TrainState, dict[str, Array]]:
    """The state after the optimizer's step, if loss, gradient and the state itself are finite, else that before it, and
    the update's metrics.

    The config's AdamW treats every array by itself, so it runs part by part, as one program for all parts. An
    optimizer of the user's may compare arrays (a global norm, one trust ratio for all), so it runs over the whole tree.

    Args:
      state: before the update.
      parts: the gradient, from `parts_of`; each may be `Flat`.
      sums: sums over the update's tokens.
    """
    squares = zeros_like(sums["loss"])
    for part in parts:
        squares = add_squares(part, squares)
    metrics, factor, finite = finish(np.float32(state.config.max_grad_norm), sums, squares)
    whole = whole_of(state)
    if isinstance(state.optimizer, AdamW):
        update = state.optimizer
        before, join = in_parts(whole, state.model.num_layers), from_parts
    else:
        update = Partial(state.optimizer.update)
        before, join = [whole], lambda trees: trees[0]
        parts = [from_parts([unflattened(part) if isinstance(part, Flat) else part for part in parts])]
    for old, part in zip(before, parts, strict=True):
        finite = stays_finite(update, old, part, factor, finite)
    step = apply_flat if isinstance(parts[0], Flat) else apply
    after = [step(update, old, part, factor, finite) for old, part in zip(before, parts, strict=True)]
    return state.replace(**join(after)), metrics | {"skipped": skipped(finite)}


def whole_of(state: TrainState) -> dict[str, Any]:
    """The optimizer's state and the trained trees."""
    trained = trained_trees(state.lora, state.norms, state.config)
    return {"opt_state": state.opt_state, **trained}


# An argument whose values do not matter is kept, so that the result is committed to a device where the argument is.
@program(keep_unused=True)
def zeros_like(tree: Any) -> Any:
    """Zeros in the form of a tree of arrays."""
    return jax.tree.map(jnp.zeros_like, tree)


def parts_of(gradients: Sequence[dict[str, Any]]) -> list[Any]:
    """The gradient in parts (`state.in_parts`), from that of each layer's trained trees."""
    whole = {name: {"layers": {i: each[name] for i, each in enumerate(gradients)}} for name in gradients[0]}
    return in_parts(whole, len(gradients))


@program
def unflattened(flat: Flat) -> Any:
    """The tree of a vector."""
    return flat.tree()


@program(compiler_options=ALIKE)
def add_squares(gradient: Any, total: Float32[Array, ""]) -> Float32[Array, ""]:
    """The total with the sum of squares of a part of the gradient."""
    return total + jnp.sum(jnp.square(as_one(_tree_of(gradient))))


@program(compiler_options=ALIKE)
def finish(
    max_norm: Float32[ArrayLike, ""], sums: Sums, squares: Float32[Array, ""]
) -> tuple[dict[str, Array], Float32[Array, ""], Bool[Array, ""]]:
    """The update's metrics, the factor that clips the gradient, at most 1, and whether loss and gradient are finite."""
    metrics = mean_metrics(sums)
    norm = metrics["grad_norm"] = jnp.sqrt(squares)
    return metrics, max_norm / jnp.maximum(norm, max_norm), jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)


@program(compiler_options=ALIKE)
def stays_finite(
    update: Step, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""], finite: Bool[Array, ""]
) -> Bool[Array, ""]:
    """Whether everything so far is finite, and the optimizer's state and the parameters after its step.

    Args:
      update: of the optimizer.
      before: "opt_state" and the trained trees, of a part or of all layers.
      gradient: gradient of the trained trees.
      factor: from `finish`.
      finite: from `finish`, or from this function for the parts before.
    """
    by_shape = collections.defaultdict(list)
    for leaf in jax.tree.leaves(_stepped(update, before, gradient, factor)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            by_shape[leaf.shape].append(jnp.abs(leaf).astype(jnp.float32))
    largest = [functools.reduce(jnp.maximum, leaves) for leaves in by_shape.values()]  # NaN if one is
    return finite & jnp.isfinite(as_one(largest)).all()


@program(donate_argnums=2, compiler_options=ALIKE)
def apply(
    update: Step, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""], finite: Bool[Array, ""]
) -> dict[str, Any]:
    """The optimizer's state and the parameters after its step, or `before` where an update is not finite. Arguments as
    in `stays_finite`, `finite` from the last part; the gradient is donated.
    """
    return _applied(update, before, gradient, factor, finite)


@program(compiler_options=ALIKE)
def apply_flat(
    update: Step, before: dict[str, Any], gradient: Flat, factor: Float32[Array, ""], finite: Bool[Array, ""]
) -> dict[str, Any]:
    """`apply`, but for the donation: no result has the shape of the vector."""
    return _applied(update, before, gradient, factor, finite)


def _applied(
    update: Step, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""], finite: Bool[Array, ""]
) -> dict[str, Any]:
    after = _stepped(update, before, gradient, factor)
    return jax.tree.map(lambda new, last: jnp.where(finite, new, last), after, before)


def _stepped(update: Step, before: dict[str, Any], gradient: Any, factor: Float32[Array, ""]) -> dict[str, Any]:
    gradient = _tree_of(gradient)
    params = {name: before[name] for name in gradient}
    gradient = jax.tree.map(lambda leaf: factor * leaf, gradient)
    step = update.update if isinstance(update, AdamW) else update
    updates, opt_state = step(gradient, before["opt_state"], params)
    return {"opt_state": opt_state, **optax.apply_updates(params, updates)}


def _tree_of(gradient: Any) -> Any:
    return gradient.tree() if isinstance(gradient, Flat) else gradient


def as_one(tree: Any) -> Float[Array, " X"]:
    """The arrays of a tree in one vector; inside jit."""
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([leaf.ravel() for leaf in leaves]) if leaves else jnp.zeros(0)


@program
def skipped(finite: Bool[Array, ""]) -> Float32[Array, ""]:
    """The metric: 1 for an update that is not finite."""
    return 1.0 - finite.astype(jnp.float32)
