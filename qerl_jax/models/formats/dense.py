"""An unquantized weight in the model's compute dtype."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jaxtyping import Array, Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Dense:
    """Weight matrix `values` in the compute dtype: bf16, or fp32 in an fp32 model."""

    values: Float[Array, "n k"]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.values.shape[-2], self.values.shape[-1]
