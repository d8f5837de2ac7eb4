"""The functions that a weight format consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

Quantizer = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Format:
    """A weight format of frozen projections.

    Attributes:
      weight: the dataclass of its weights, a pytree with `shape` (n, k).
      zeros: `zeros(n, k, dtype)`, a weight of zeros; `dtype`: of a dense one.
      values: `values(weight)`, f32[n, k], the value of every weight.
      factors: `factors(weight, dtype)`, what `linear` multiplies with: a matrix [n, k] in the compute dtype, and the
        fp32 factor of each output row (None: all 1).
      quantizer: `quantizer(largest, dtype)`, a function from a part of a fused projection, [n, k] of `dtype` on the
        host, to a weight; `largest()` is the largest magnitude of all parts. It raises ValueError where input features
        are no whole blocks. None: not quantized.
      packs: whether the Pallas kernels read it, as `qerl_kernels.nvfp4_matmul.packing.pack` packs it.

    Every array of a weight has a row for each output feature, so that the parts of a fused projection are concatenated
    and taken apart by rows.
    """

    weight: type
    zeros: Callable[[int, int, DTypeLike], Any]
    values: Callable[[Any], Array]
    factors: Callable[[Any, DTypeLike], tuple[Array, Array | None]]
    quantizer: Callable[[Callable[[], float], DTypeLike], Quantizer] | None = None
    packs: bool = False
