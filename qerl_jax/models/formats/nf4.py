"""NF4: 4-bit NormalFloat with one absmax per block of 64 (QLoRA, arXiv 2305.14314, appendix E)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from qerl_jax.models.formats.nvfp4 import max_magnitude

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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "absmax"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Nf4:
    """NF4 weight, `NF4_VALUES[code] × absmax`: two codes a byte, even column low; no double quantization."""

    codes: UInt8[Array | np.ndarray, "n half_k"]
    absmax: Float32[Array | np.ndarray, "n k_blocks"]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.codes.shape[-2], self.codes.shape[-1] * 2


def quantize(weight: np.ndarray) -> Nf4:
    """Quantize a weight [n, k] to NF4: the nearest NF4 value of `weight / absmax` in blocks of 64 along the input.

    Raises ValueError if k is not a multiple of 64, or for a value that is not finite.
    """
    n, k = weight.shape
    if k % NF4_BLOCK:
        raise ValueError(f"NF4 needs input features divisible by {NF4_BLOCK}, got a weight of {n} x {k}")
    max_magnitude(weight)
    blocks = np.asarray(weight, np.float32).reshape(n, k // NF4_BLOCK, NF4_BLOCK)
    absmax = np.abs(blocks).max(-1)
    unit = blocks / np.where(absmax > 0, absmax, 1)[..., None]
    table = np.asarray(NF4_VALUES, np.float32)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, unit).astype(np.uint8).reshape(n, k)
    return Nf4(codes[:, 0::2] | codes[:, 1::2] << 4, absmax)


def dequantize(weight: Nf4) -> Float32[Array, "n k"]:
    """`NF4_VALUES[code] × absmax` in fp32."""
    nibbles = jnp.stack([weight.codes & 0xF, weight.codes >> 4], axis=-1)
    n, k = weight.shape
    values = jnp.asarray(NF4_VALUES, jnp.float32)[nibbles].reshape(n, k // NF4_BLOCK, NF4_BLOCK)
    return (values * weight.absmax[..., None]).reshape(n, k)
