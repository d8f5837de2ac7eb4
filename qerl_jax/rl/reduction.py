"""An update of several replicas: the sums of the gradients and metrics that each computed from its own micro-batches,
and the proof that all came to the same state.

Axes: D replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, UInt32

from qerl_jax import keys
from qerl_jax.parallel import Replicas, Vector
from qerl_jax.programs import ALIKE, program
from qerl_jax.rl.metrics import Sums, add_sums
from qerl_jax.rl.optimizer import Flat, as_one, whole_of
from qerl_jax.rl.state import in_parts
from qerl_jax.types import TrainState


def over_replicas(replicas: Replicas, parts: Sequence[Any], sums: Sums) -> tuple[Sequence[Any], Sums]:
    """Gradients and sums over the micro-batches of all replicas, the same bits on each, by one all-reduce.

    Several replicas' gradients are joined to one vector, while the host is ahead of the device, and come as parts of it
    (`Flat`), from which the optimizer's programs read arrays: hundreds of small ones would each cost the host and the
    all-reduce their time.

    Args:
      replicas: this one and the others.
      parts, sums: of its own micro-batches, as in `optimizer.apply_gradients`.

    Raises ReplicaError where another replica failed before it came here.
    """
    if replicas.count == 1:
        return parts, sums
    whole = replicas.sum(in_one_vector(replicas, parts, sums))
    return flat_parts(parts, whole), of_all(whole, tuple(sorted(sums)), replicas.count)


def in_one_vector(replicas: Replicas, parts: Sequence[Any], sums: Sums) -> Vector:
    """What the replicas add up, by programs of one part and one that joins their results: the parts, and behind them
    the sums.
    """
    return joined([*map(joined, parts), placed(sums, np.int32(replicas.index), replicas.count)])


def flat_parts(parts: Sequence[Any], whole: Vector) -> list[Flat]:
    """The parts in one vector, where `in_one_vector` puts them."""
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts]
    starts = np.cumsum([0, *sizes[:-1]])
    return [Flat.like(part, whole, start) for part, start in zip(parts, starts, strict=True)]


joined = program(as_one)


@program(static_argnums=2)
def placed(sums: Sums, index: Int[Array, ""], count: int) -> Float32[Array, " X"]:
    """The sums in their names' order, with zeros for each replica but the one at `index`, so that the sum over replicas
    holds the values of each, from which extremes can be taken.
    """
    own = jnp.stack([sums[name] for name in sorted(sums)])
    return jnp.zeros((count, own.size)).at[index].set(own).ravel()


@program(static_argnums=(1, 2), compiler_options=ALIKE)
def of_all(whole: Float32[Array, " X"], names: tuple[str, ...], count: int) -> Sums:
    """Sums and extremes over all replicas, from the end of what they added up. Each has counted the tokens in the loss
    of the whole batch.
    """
    rows = whole[whole.size - count * len(names) :].reshape(count, len(names))
    each = [dict(zip(names, values, strict=True)) for values in rows]
    return functools.reduce(add_sums, each) | {"tokens": each[0]["tokens"]}


def check_same_state(replicas: Replicas, state: TrainState) -> None:
    """Raise ValueError unless all replicas have the same bits in the optimizer's state and in what it trains. Raises
    ReplicaError where another replica failed.
    """
    if replicas.count == 1:
        return
    sums = checksums(state)
    if not isinstance(sums[0], jax.ShapeDtypeStruct):  # recorded
        name = f"the state after step {int(state.step)}, by parts"
        replicas.check_equal([int(one) for one in jax.device_get(sums)], name)


def checksums(state: TrainState) -> list[UInt32[Array, ""]]:
    """One of each part (`state.in_parts`), with what belongs to no layer; equal for equal bits, different for any one
    difference.
    """
    return [checksum(part) for part in in_parts(whole_of(state), state.model.num_layers)]


@program
def checksum(tree: Any) -> UInt32[Array, ""]:
    """The sum of the words of 1, 2 or 4 bytes in a tree of arrays, each times an odd number of its place."""
    words = jnp.concatenate([_words(leaf) for leaf in jax.tree.leaves(tree)])
    return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _words(leaf: Array) -> UInt32[Array, " X"]:
    leaf = keys.words(leaf)
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32).ravel()
