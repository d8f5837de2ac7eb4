"""An update of several replicas: the sums of the gradients and metrics that each computed from its own micro-batches,
and the proof that all came to the same state.

Axes: D replicas.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, UInt32

from qerl_jax.parallel import Replicas
from qerl_jax.programs import program
from qerl_jax.rl.metrics import Sums, add_sums
from qerl_jax.rl.optimizer import whole_of
from qerl_jax.rl.state import at_layer, outside_layers
from qerl_jax.types import TrainState


def over_replicas(
    replicas: Replicas, gradients: list[Any], sums: Sums, outside: Any = None
) -> tuple[list[Any], Sums, Any]:
    """Gradients and sums over the micro-batches of all replicas, the same bits on each, by one all-reduce.

    Args:
      replicas: this one and the others.
      gradients, sums, outside: of its own micro-batches, as in `optimizer.apply_gradients`.

    Raises ReplicaError where another replica failed before it came here.
    """
    if replicas.count == 1:
        return gradients, sums, outside
    placed = in_place(sums, np.int32(replicas.index), replicas.count)
    gradients, placed, outside = replicas.sum((gradients, placed, outside))
    return gradients, of_all(placed), outside


@program(static_argnames="count")
def in_place(sums: Sums, index: Int[Array, ""], count: int) -> dict[str, Float32[Array, " D"]]:
    """Zeros for each replica but the one at `index`, so that the sums over replicas hold the values of each, from which
    extremes can be taken.
    """
    return {name: jnp.zeros(count).at[index].set(value) for name, value in sums.items()}


@program
def of_all(placed: dict[str, Float32[Array, " D"]]) -> Sums:
    """Sums and extremes over all replicas. Each has counted the tokens in the loss of the whole batch."""
    count = len(placed["tokens"])
    each = [{name: values[i] for name, values in placed.items()} for i in range(count)]
    return functools.reduce(add_sums, each) | {"tokens": each[0]["tokens"]}


def check_same_state(replicas: Replicas, state: TrainState) -> None:
    """Raise ValueError unless all replicas have the same bits in the optimizer's state and in what it trains. Raises
    ReplicaError where another replica failed.
    """
    if replicas.count == 1:
        return
    sums = checksums(state)
    if not isinstance(sums[0], jax.ShapeDtypeStruct):  # recorded
        name = f"the state after step {int(state.step)}, by layer"
        replicas.check_equal([int(one) for one in jax.device_get(sums)], name)


def checksums(state: TrainState) -> list[UInt32[Array, ""]]:
    """One of each layer and one of the rest; equal for equal bits, different for any one difference."""
    whole = whole_of(state)
    parts = [at_layer(whole, layer) for layer in range(state.model.num_layers)]
    return [checksum(part) for part in (*parts, outside_layers(whole))]


@program
def checksum(tree: Any) -> UInt32[Array, ""]:
    """The sum of the words of 1, 2 or 4 bytes in a tree of arrays, each times an odd number of its place."""
    words = jnp.concatenate([_words(leaf) for leaf in jax.tree.leaves(tree)])
    return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _words(leaf: Array) -> UInt32[Array, " X"]:
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32).ravel()
