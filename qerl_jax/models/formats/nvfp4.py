"""NVFP4 quantizer, byte for byte equal to llm-compressor 0.14.0.1 (scheme NVFP4A16, on compressed-tensors 0.19.0).

llm-compressor keeps a weight's minimum and maximum in the weight's own dtype, so for a bf16 weight the global scale
and `amax / 6` are rounded to bf16. In NumPy on purpose: under jit, XLA keeps the excess precision of those roundings,
and then most scales of bf16 weights are wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32
from qerl_kernels.formats import NVFP4_BLOCK, Mxfp4, Nvfp4
from qerl_kernels.nvfp4_matmul import reference

from qerl_jax.models.formats.format import Format, Quantizer
from qerl_jax.models.formats.host import check_blocks, magnitudes, max_magnitude, row_slices

E2M1_MAX = 6.0
E4M3_MAX = 448.0
ZERO_SCALE = 0.125  # compressed-tensors stores it for a block whose scale would be zero
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """Nearest E2M1 code (bit 3 the sign), ties to the even code, saturating at ±6; a negative that rounds to zero
    keeps code 8, −0 has code 0.
    """
    magnitude, codes, is_above = np.abs(values), np.zeros(values.shape, np.uint8), np.empty(values.shape, bool)
    for i, midpoint in enumerate(_MIDPOINTS):  # the tie at midpoint i lies between codes i and i + 1: odd i rounds up
        (np.greater_equal if i % 2 else np.greater)(magnitude, midpoint, out=is_above)
        codes += is_above.view(np.uint8)
    codes |= np.less(values, 0, out=is_above).view(np.uint8) << 3
    return codes


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, even column in the low nibble: u8[n, k] -> u8[n, k/2]."""
    pairs = codes.view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)


def global_scale(amax: float, dtype: DTypeLike) -> np.float32:
    """The divisor `G = 448 · 6 / amax` of a tensor, or of fused tensors that share it, in the weight's `dtype`.

    Computed as `(1 / amax) · 2688`, each rounded to `dtype`, as torch computes `2688.0 / tensor`: 12800 for a bf16
    weight of amax 0.2109375, where fp32 gives 12743.11. A tensor of zeros, or one so small that G is infinite, gets 1.
    fp16 departs from llm-compressor there: G overflows below amax 0.041, and is then computed in fp32.
    """
    dtype = np.dtype(dtype)
    with np.errstate(over="ignore"):
        reciprocal = np.float32(1) / np.float32(max(amax, float(ml_dtypes.finfo(dtype).tiny)))
        divisor = np.float32(reciprocal.astype(dtype)) * np.float32(E4M3_MAX * E2M1_MAX)
        divisor = divisor.astype(dtype).astype(np.float32)
    if np.isfinite(divisor):
        return divisor
    return global_scale(amax, np.float32) if dtype == np.float16 else np.float32(1)


def block_scales(weight: np.ndarray, divisor: np.float32) -> np.ndarray:
    """`e4m3(G · amax_block / 6)`, with `amax_block / 6` rounded to the weight's own dtype first; zero becomes 0.125."""
    n, k = weight.shape
    columns = magnitudes(weight).reshape(-1, NVFP4_BLOCK).T.copy()  # a maximum over a last axis of 16 takes four times
    amax = columns.max(0).reshape(n, k // NVFP4_BLOCK).view(weight.dtype).astype(np.float32)
    sixth = (amax / np.float32(E2M1_MAX)).astype(weight.dtype).astype(np.float32)
    scales = np.clip(divisor * sixth, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return np.where(scales == 0, ml_dtypes.float8_e4m3fn(ZERO_SCALE), scales)


def quantize(weight: np.ndarray, divisor: np.float32 | None = None) -> Nvfp4:
    """Quantize a weight [n, k] to NVFP4, in slices of rows so that no whole fp32 copy exists.

    Args:
      weight: bf16, fp16 or fp32; may be memory-mapped.
      divisor: the global scale; None computes it from this tensor alone.

    Raises:
      ValueError: k is not a multiple of 16, or the weight is not finite.
    """
    n, k = weight.shape
    check_blocks("NVFP4", NVFP4_BLOCK, n, k)
    divisor = global_scale(max_magnitude(weight), weight.dtype) if divisor is None else divisor
    codes = np.empty((n, k // 2), np.uint8)
    scales = np.empty((n, k // NVFP4_BLOCK), ml_dtypes.float8_e4m3fn)
    for start, stop in row_slices(n, k):
        rows = np.asarray(weight[start:stop])
        scales[start:stop] = block_scales(rows, divisor)
        step = scales[start:stop].astype(np.float32) / divisor
        blocks = rows.astype(np.float32).reshape(stop - start, k // NVFP4_BLOCK, NVFP4_BLOCK)
        blocks /= step[..., None]
        codes[start:stop] = pack_codes(encode_e2m1(blocks).reshape(stop - start, k))
    return Nvfp4(codes, scales, np.full(n, divisor, np.float32), divides=True)


def quantizer(largest: Callable[[], float], dtype: DTypeLike) -> Quantizer:
    """The parts of a fused projection share one global scale, as llm-compressor writes them."""
    return functools.partial(quantize, divisor=global_scale(largest(), dtype))


def fp4_factors(weight: Nvfp4 | Mxfp4, dtype: DTypeLike) -> tuple[Float[Array, "n k"], Float32[Array, " n"] | None]:
    """In bf16 the matrix is exact (`bf16_parts`)."""
    if dtype == jnp.bfloat16:
        return reference.bf16_parts(weight)
    return reference.dequantize(weight).astype(dtype), None


def _zeros(n: int, k: int, dtype: DTypeLike) -> Nvfp4:
    scales = jnp.zeros((n, k // NVFP4_BLOCK), jnp.float8_e4m3fn)
    return Nvfp4(jnp.zeros((n, k // 2), jnp.uint8), scales, jnp.ones(n, jnp.float32), True)


FORMAT = Format(Nvfp4, _zeros, reference.dequantize, fp4_factors, quantizer, packs=True)
