"""An unquantized weight in the model's compute dtype."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from qerl_jax.models.formats.format import Format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """Weight matrix `values` in the compute dtype: bf16, or fp32 in an fp32 model."""

    values: Float[Array | np.ndarray, "n k"]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.values.shape[-2], self.values.shape[-1]


def _zeros(n: int, k: int, dtype: DTypeLike) -> Dense:
    return Dense(jnp.zeros((n, k), dtype))


def _values(weight: Dense) -> Float32[Array, "n k"]:
    return jnp.asarray(weight.values, jnp.float32)


def _factors(weight: Dense, dtype: DTypeLike) -> tuple[Float[Array, "n k"], None]:
    return weight.values.astype(dtype), None


FORMAT = Format(Dense, _zeros, _values, _factors)
