"""4-bit weight formats: NVFP4 and MXFP4 as checkpoints store them, and the packed form the kernels read.

Axes: n output features, k input features. `Nvfp4` and `Mxfp4` keep the stored bytes unchanged, so that loading,
dequantizing and writing back are exact. `PackedNvfp4` is the same weight in the register order of Hopper's tensor
cores (`nvfp4_matmul.packing`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Float8e4m3fn, UInt8, UInt32

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
      global_scale: one fp32 value for each output row, so that the parts of a fused
        projection may differ.
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "scales", "multiplier", "global_scale"],
    meta_fields=["shape", "divides", "block", "uniform"],
)
@dataclasses.dataclass(frozen=True)
class PackedNvfp4:
    """A 4-bit weight as the kernels read it, 4.5 bits a weight; made by `packing.pack` once at load.

    A tile is 64 output by 64 input features. Weights past `shape` are zero.

    Attributes:
      words: E2M1 codes. `words[i, j, warp, 4 * lane + s]` holds the eight codes that one thread of a warpgroup needs
        for step `s` (16 input features) of tile (i, j); the order of the bits is explained in `packing`.
      scales: block scales re-encoded as E5M3, four in a word.
      multiplier: what the fp32 sum of an output row is multiplied by: 2^13 × global scale.
      global_scale: the global scale of every row as the file stores it (MXFP4: the power of two that was taken out of
        the row).
      shape: (n, k) of the weight it stands for.
      divides: as in `Nvfp4`.
      block: 16 where it was packed from NVFP4, 32 from MXFP4.
      uniform: True where all rows are known to have the same multiplier (then the backward pass need not scale its
        input first).
    """

    words: UInt32[Array, "n/64 k/64 4 128"]
    scales: UInt32[Array, "n/64 k/64 64"]
    multiplier: Float[Array, " n_padded"]
    global_scale: Float[Array, " n"]
    shape: tuple[int, int]
    divides: bool
    block: int
    uniform: bool
