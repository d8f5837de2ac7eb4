"""An unquantized weight, frozen in the model's compute dtype or trained in fp32."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from qerl_jax.models.formats.format import Format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """Weight matrix `values` in the compute dtype: bf16, or fp32 in an fp32 model; a trained one always in fp32."""

    values: Float[Array | np.ndarray, "n k"]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.values.shape[-2], self.values.shape[-1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(values: Float32[Array, "*S"], dtype: DTypeLike) -> Float32[Array, "*S"]:
    """Trained values as the model computes with them: rounded to the compute dtype, here still in fp32. The gradient
    passes unchanged. A cast to bf16 and back will not do, because XLA may leave both out.
    """
    return jax.lax.reduce_precision(values, 8, 7) if dtype == jnp.bfloat16 else values


@rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return rounded(*primals, dtype), tangents[0]


def _zeros(n: int, k: int, dtype: DTypeLike) -> Dense:
    return Dense(jnp.zeros((n, k), dtype))


def _values(weight: Dense) -> Float32[Array, "n k"]:
    return jnp.asarray(weight.values, jnp.float32)


def _factors(weight: Dense, dtype: DTypeLike) -> tuple[Float[Array, "n k"], None]:
    """A trained fp32 weight is rounded to the compute dtype."""
    values = rounded(weight.values, dtype) if weight.values.dtype == jnp.float32 else weight.values
    return values.astype(dtype), None


FORMAT = Format(Dense, _zeros, _values, _factors)
