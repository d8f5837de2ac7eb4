"""MXFP4 quantizer (OCP Microscaling Formats 1.0, §6.3): block of 32, shared power-of-two scale."""

from __future__ import annotations

import numpy as np
from qerl_kernels.formats import MXFP4_BLOCK, Mxfp4

from qerl_jax.models.formats.nvfp4 import encode_e2m1, max_magnitude, pack_codes

_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 · 2^2


def quantize(weight: np.ndarray) -> Mxfp4:
    """Quantize a weight [n, k] to MXFP4: `e = floor(log2(amax)) − 2` for each block of 32, and E2M1 codes of
    `weight / 2^e`, rounded to nearest, ties to even, saturating at ±6.

    Raises ValueError if k is not a multiple of 32, or for a value that is not finite.
    """
    n, k = weight.shape
    if k % MXFP4_BLOCK:
        raise ValueError(f"MXFP4 needs input features divisible by {MXFP4_BLOCK}, got a weight of {n} x {k}")
    max_magnitude(weight)
    blocks = np.asarray(weight, np.float32).reshape(n, k // MXFP4_BLOCK, MXFP4_BLOCK)
    amax = np.abs(blocks).max(-1)
    exponent = np.frexp(amax)[1] - 1 - _E2M1_MAX_EXPONENT
    exponent = np.where(amax > 0, np.clip(exponent, -127, 127), -127)
    scaled = np.ldexp(blocks, -exponent[..., None])
    return Mxfp4(pack_codes(encode_e2m1(scaled).reshape(n, k)), (exponent + 127).astype(np.uint8))
