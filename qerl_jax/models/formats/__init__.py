"""Weight formats of a frozen projection: `Dense`, `Nvfp4`, `Mxfp4`, `Nf4`, and `PackedNvfp4`, the form of NVFP4 and
MXFP4 weights that the kernels read. Each format has a file with its NumPy quantizer; how checkpoints store it is in
`checkpoint.layouts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4, Nvfp4, PackedNvfp4

from qerl_jax.models.formats import mxfp4, nf4, nvfp4
from qerl_jax.models.formats.dense import Dense, rounded
from qerl_jax.models.formats.nf4 import NF4_BLOCK, Nf4

Weight = Dense | Nvfp4 | Mxfp4 | Nf4 | PackedNvfp4
WEIGHT_FORMATS = ("bf16", "nvfp4", "mxfp4", "nf4")

__all__ = ["WEIGHT_FORMATS", "Dense", "Mxfp4", "Nf4", "Nvfp4", "PackedNvfp4", "Weight", "quantizer", "rounded", "zeros"]


def quantizer(weight_format: str, largest: float, dtype: DTypeLike) -> Callable[[np.ndarray], Weight]:
    """Quantizer for the parts of a fused projection. Those in NVFP4 share one global scale, as llm-compressor writes
    them.

    Args:
      weight_format: "nvfp4", "mxfp4" or "nf4".
      largest: largest magnitude over all parts.
      dtype: their dtype.
    """
    if weight_format == "nvfp4":
        return functools.partial(nvfp4.quantize, divisor=nvfp4.global_scale(largest, dtype))
    return {"mxfp4": mxfp4.quantize, "nf4": nf4.quantize}[weight_format]


def zeros(weight_format: str, n: int, k: int, dtype: DTypeLike) -> Weight:
    """A projection of zeros in the canonical form of a format; `dtype`: of a dense one."""
    codes = jnp.zeros((n, k // 2), jnp.uint8)
    match weight_format:
        case "nvfp4":
            return Nvfp4(codes, jnp.zeros((n, k // NVFP4_BLOCK), jnp.float8_e4m3fn), jnp.ones(n, jnp.float32), True)
        case "mxfp4":
            return Mxfp4(codes, jnp.zeros((n, k // MXFP4_BLOCK), jnp.uint8))
        case "nf4":
            return Nf4(codes, jnp.zeros((n, k // NF4_BLOCK), jnp.float32))
        case _:
            return Dense(jnp.zeros((n, k), dtype))
