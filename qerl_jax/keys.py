"""Random keys: every random number of a run is a function of (seed, step, purpose, problem, sample, resampling
round, position), never of a slot or a batch.

Axes: B sequences.
"""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int


class Purpose(enum.IntEnum):
    """Purpose of a key. The numbers are part of every run's reproducibility: never renumber."""

    LORA_INIT = 0
    AQN = 1
    SAMPLE = 2
    EVALUATE = 3


def for_step(seed: int, purpose: Purpose, step: int) -> Array:
    """The key of a purpose at a step."""
    return _folded(jax.random.key(seed), int(purpose), step)


@jax.jit
def _folded(key: Array, *numbers: Int[ArrayLike, ""]) -> Array:
    """`fold_in` of each number: one program, where JAX runs several for each."""
    return functools.reduce(jax.random.fold_in, numbers, key)


def typed(key: Array) -> Array:
    """The key with a dtype of its own, where it is an array of words, as `jax.random.PRNGKey` makes them."""
    return key if is_typed(key) else jax.random.wrap_key_data(key)


def is_typed(array: ArrayLike) -> bool:
    """Whether an array is one of keys with a dtype of their own."""
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def words(array: ArrayLike) -> ArrayLike:
    """The words of such keys, any other array as it is."""
    return jax.random.key_data(array) if is_typed(array) else array


def for_round(key: Array, resampling_round: int) -> Array:
    """The key of one round of dynamic sampling; round 0 is the first."""
    return _folded(key, resampling_round)


def for_rows(key: Array, problem_ids: Int[Array, " B"], samples: Int[Array, " B"]) -> Array:
    """One key for each sequence, from its problem and its index in the group."""
    return jax.vmap(lambda p, g: jax.random.fold_in(jax.random.fold_in(key, p), g))(problem_ids, samples)


def for_positions(row_keys: Array, positions: Int[Array, " B"]) -> Array:
    """One key for the next token of each sequence, from its position."""
    return jax.vmap(jax.random.fold_in)(row_keys, positions)
