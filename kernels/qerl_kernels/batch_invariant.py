"""Batch invariance of XLA operations: a row has the same bits whatever the number of rows, by blocks of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

ROWS = 64


def in_blocks(function: Callable[..., Any], *rows: Shaped[Array, "m ..."], size: int = ROWS) -> Any:
    """`function` of arrays whose first axis is m, computed `size` rows at a time (the last block is filled up with
    copies of the last row): the order of a matmul's or a sum's additions depends on the number of rows, and so would a
    row's bits.

    A block is not compiled together with the code around it either: XLA for a GPU adds up a row by one thread where it
    fuses the sum into an operation on the result, and by a warp where it does not. For the same reason `function` must
    not leave XLA a choice: of two independent reductions of one array, either may be fused with the next operation
    (`ordered`).
    """
    count = rows[0].shape[0]
    if count % size:
        places = jnp.minimum(jnp.arange(count + -count % size), count - 1)
        rows = tuple(array[places] for array in rows)
    blocks = tuple(array.reshape(-1, size, *array.shape[1:]) for array in rows)
    apart = jax.lax.optimization_barrier
    out = jax.lax.map(lambda block: apart(function(*apart(block))), blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], out)


def ordered(*arrays: Any) -> Any:
    """The same arrays behind an optimization barrier: consumers wait for all of them, unfused with the producers."""
    return jax.lax.optimization_barrier(arrays)
