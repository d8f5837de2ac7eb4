"""Row by row the same bits, however many rows there are: what XLA computes goes in blocks of one size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

ROWS = 64


def in_blocks(function: Callable[..., Any], *rows: Shaped[Array, "m ..."], size: int = ROWS) -> Any:
    """`function` of arrays whose first axis is m, computed `size` rows at a time (the last block is filled up with
    copies of the last row): a product or a sum goes in an order that depends on how many rows there are, and so would a
    row's bits.

    Nor is a block compiled together with what stands around it: XLA for a GPU adds up a row by one thread where it
    fuses the sum into an operation on the result, and by a warp where it does not. For the same reason `function` must
    not leave XLA a choice: of two reductions of one array that do not wait for each other, either may be fused with
    what comes next (`ordered`).
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
    """The same arrays; what is made of any of them waits for all and is not compiled together with what made them."""
    return jax.lax.optimization_barrier(arrays)
