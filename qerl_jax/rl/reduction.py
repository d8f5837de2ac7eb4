"""One update of several replicas: the sums of the gradients and metrics that each computed from its own micro-batches.

Axes: D replicas.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from qerl_jax.parallel import Replicas
from qerl_jax.programs import program
from qerl_jax.rl.metrics import Sums, add_sums


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
    extremes can be taken."""
    return {name: jnp.zeros(count).at[index].set(value) for name, value in sums.items()}


@program
def of_all(placed: dict[str, Float32[Array, " D"]]) -> Sums:
    """Sums and extremes over all replicas. Each has counted the tokens in the loss of the whole batch."""
    count = len(placed["tokens"])
    each = [{name: values[i] for name, values in placed.items()} for i in range(count)]
    return functools.reduce(add_sums, each) | {"tokens": each[0]["tokens"]}
