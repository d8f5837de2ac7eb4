"""NF4: 4-bit NormalFloat with one absmax per block of 64 (QLoRA, arXiv 2305.14314, appendix E).

The quantizer is byte for byte that of bitsandbytes 0.50.2 on a CPU, for bf16, fp16 and fp32 weights. Its CUDA kernel
has the same boundaries between codes, but is compiled with an approximate reciprocal, so that it may give a weight next
to a boundary the other code, and a block of zeros has code 0 (worth -0) there in place of 7.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

from qerl_jax.models.formats.format import Format
from qerl_jax.models.formats.host import check_blocks, row_slices

NF4_BLOCK = 64
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_SMALLEST = np.float32(1e-38)  # what a block is divided by at least


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nf4:
    """NF4 weight, `NF4_VALUES[code] × absmax`.

    Attributes:
      codes: two a byte, even column in the high nibble, as bitsandbytes stores them.
      absmax: one for each block of 64 input features; those of a double-quantized checkpoint are dequantized.
    """

    codes: UInt8[Array | np.ndarray, "n half_k"]
    absmax: Float32[Array | np.ndarray, "n k_blocks"]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.codes.shape[-2], self.codes.shape[-1] * 2


def quantize(weight: np.ndarray) -> Nf4:
    """Quantize a weight [n, k] to NF4, in slices of rows: the nearest NF4 value of `weight · (1 / absmax)` in blocks of
    64 along the input, between two values the lower one.

    Raises ValueError if k is not a multiple of 64, or for a value that is not finite.
    """
    n, k = weight.shape
    absmax, codes = block_absmax(weight), np.empty((n, k // 2), np.uint8)
    table = np.asarray(NF4_VALUES, np.float32)
    boundaries = (table[1:] + table[:-1]) / 2
    for start, stop in row_slices(n, k):
        unit = _blocks(weight[start:stop]) * (1 / np.maximum(absmax[start:stop], _SMALLEST))[..., None]
        found = np.searchsorted(boundaries, unit).astype(np.uint8).reshape(stop - start, k)
        codes[start:stop] = found[:, 0::2] << 4 | found[:, 1::2]
    return Nf4(codes, absmax)


def block_absmax(weight: np.ndarray) -> Float32[np.ndarray, "n k_blocks"]:
    """Largest magnitude of each block of 64. Raises ValueError as `quantize` does."""
    n, k = weight.shape
    check_blocks("NF4", NF4_BLOCK, n, k)
    absmax = np.empty((n, k // NF4_BLOCK), np.float32)
    for start, stop in row_slices(n, k):
        absmax[start:stop] = np.abs(_blocks(weight[start:stop])).max(-1)
        if not np.isfinite(absmax[start:stop]).all():
            raise ValueError(f"rows {start} to {stop - 1} hold a value that is not finite")
    return absmax


def _blocks(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows, np.float32).reshape(len(rows), -1, NF4_BLOCK)


def dequantize(weight: Nf4) -> Float32[Array, "n k"]:
    """`NF4_VALUES[code] × absmax` in fp32."""
    nibbles = jnp.stack([weight.codes >> 4, weight.codes & 0xF], axis=-1)
    n, k = weight.shape
    values = jnp.asarray(NF4_VALUES, jnp.float32)[nibbles].reshape(n, k // NF4_BLOCK, NF4_BLOCK)
    return (values * weight.absmax[..., None]).reshape(n, k)


def _zeros(n: int, k: int, dtype: DTypeLike) -> Nf4:
    return Nf4(jnp.zeros((n, k // 2), jnp.uint8), jnp.zeros((n, k // NF4_BLOCK), jnp.float32))


def _factors(weight: Nf4, dtype: DTypeLike) -> tuple[Float[Array, "n k"], None]:
    """The fp32 block scales lie within the sum over k, so values are rounded to the compute dtype, as in QLoRA."""
    return dequantize(weight).astype(dtype), None


FORMAT = Format(Nf4, _zeros, dequantize, _factors, lambda largest, dtype: quantize)
