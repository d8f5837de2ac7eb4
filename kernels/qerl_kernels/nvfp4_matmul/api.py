"""The 4-bit weight types that the loader writes and the kernels read.

Axes: n output features, k input features. Both types keep what the file stores, byte for byte, so that loading,
dequantizing and writing back are exact.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

NVFP4_BLOCK = 16
MXFP4_BLOCK = 32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales", "global_scale"], meta_fields=["divides"]
)
@dataclasses.dataclass(frozen=True)
class Nvfp4:
    """NVFP4 weight in its canonical form: `code × e4m3 scale × fp32 global scale`.

    Attributes:
      codes: E2M1 codes, two a byte, even column in the low nibble.
      scales: one E4M3 scale for each block of 16 input features.
      global_scale: one fp32 value for each output row, so that fused projections may differ by part.
      divides: True where the value is `code × (scale / global)` (compressed-tensors), False where it is
        `code × (scale × global)` (ModelOpt).
    """

    codes: UInt8[Array, "n k/2"]
    scales: Float8e4m3fn[Array, "n k/16"]
    global_scale: Float[Array, " n"]
    divides: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the weight it stands for."""
        return self.codes.shape[-2], self.codes.shape[-1] * 2


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "exponents"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """MXFP4 weight (OCP microscaling): `code × 2^(exponent − 127)`.

    Attributes:
      codes: E2M1 codes, two a byte, even column in the low nibble.
      exponents: one E8M0 byte for each block of 32 input features.
    """

    codes: UInt8[Array, "n k/2"]
    exponents: UInt8[Array, "n k/32"]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the weight it stands for."""
        return self.codes.shape[-2], self.codes.shape[-1] * 2
