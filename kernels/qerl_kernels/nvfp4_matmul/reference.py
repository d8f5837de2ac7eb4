"""Plain JAX: the values of a 4-bit weight, and the matmul with it.

Sources: OCP Microscaling Formats 1.0 (E2M1, E8M0); the NVFP4 layout of compressed-tensors and ModelOpt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Float32, UInt8

from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4, Nvfp4

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack_codes(codes: UInt8[Array, "n k/2"]) -> Float32[Array, "n k"]:
    """E2M1 values of packed codes. A table look-up: no bit trick, because the CPU backend flushes bf16 subnormals."""
    nibbles = jnp.stack([codes & 0xF, codes >> 4], axis=-1)
    table = jnp.asarray(E2M1_VALUES, jnp.float32)
    return table[nibbles].reshape(*codes.shape[:-1], codes.shape[-1] * 2)


def _blocks(values: Array, scales: Array, block: int) -> Array:
    n, k = values.shape
    return (values.reshape(n, k // block, block) * scales[..., None]).reshape(n, k)


def dequantize(weight: Nvfp4 | Mxfp4) -> Float32[Array, "n k"]:
    """Value of every weight in fp32, rounded as the library that wrote the checkpoint rounds it.

    compressed-tensors: `q × (s / G)`; ModelOpt: `q × (s × G)`; MXFP4: `q × 2^(e − 127)`. Within jit XLA may multiply by
    1 / G where it is to divide, which is one unit in the last place of fp32.
    """
    values = unpack_codes(weight.codes)
    if isinstance(weight, Mxfp4):
        return _blocks(values, _e8m0(weight.exponents), MXFP4_BLOCK)
    scales = weight.scales.astype(jnp.float32)
    row = weight.global_scale[:, None]
    return _blocks(values, scales / row if weight.divides else scales * row, NVFP4_BLOCK)


def _e8m0(exponents: UInt8[Array, "n k/32"]) -> Float32[Array, "n k/32"]:
    return jnp.ldexp(jnp.float32(1), exponents.astype(jnp.int32) - 127)


def no_gradient(leaf: Array) -> np.ndarray | Array:
    """What a custom backward pass returns for an array that is frozen: zeros, `float0` for integers."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jnp.zeros(leaf.shape, leaf.dtype)


def multiplier(weight: Nvfp4) -> Float32[Array, " n"]:
    """The fp32 factor of `code × scale` for each output row; one rounding where the file divides."""
    return 1.0 / weight.global_scale if weight.divides else weight.global_scale


def bf16_parts(weight: Nvfp4 | Mxfp4) -> tuple[BFloat16[Array, "n k"], Float32[Array, " n"] | None]:
    """The weight as an exact bf16 matrix and an fp32 factor for each row.

    E2M1 × E4M3 has at most six significant bits and MXFP4's scale is a power of two, so neither product rounds in
    bf16; only the global scale needs fp32, and that leaves the sum over k. Hence a bf16 matmul that never rounds
    a weight.
    """
    values = unpack_codes(weight.codes)
    if isinstance(weight, Mxfp4):
        return _blocks(values, _e8m0(weight.exponents), MXFP4_BLOCK).astype(jnp.bfloat16), None
    return _blocks(values, weight.scales.astype(jnp.float32), NVFP4_BLOCK).astype(jnp.bfloat16), multiplier(weight)


def matmul(x: Float[Array, "m k"], weight: Nvfp4 | Mxfp4) -> Float32[Array, "m n"]:
    """`y = x · Wᵀ` accumulated in fp32. bf16 x: `bf16_parts`; fp32 x: `dequantize`."""
    if x.dtype == jnp.bfloat16:
        w, row = bf16_parts(weight)
        y = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
        return y if row is None else y * row
    return jnp.matmul(x, dequantize(weight).T, precision=jax.lax.Precision.HIGHEST)
