"""Plain JAX operations of the decoder: the model runs them where no kernel does, and they are the kernels' oracles.

Axes: M rows, K input features, F ffn features, B sequences, N heads, H head dim, A = H / 2 rotary angles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def rms_norm(
    x: Float32[Array, "*M K"], weight: Float32[Array, " K"], eps: float, dtype: DTypeLike
) -> Float[Array, "*M K"]:
    """`w ⊙ x / sqrt(mean(x²) + eps)` in fp32, rounded once to `dtype`."""
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight).astype(dtype)


def silu_mul(gate_up: Float[Array, "*M 2*F"]) -> Float[Array, "*M F"]:
    """`silu(gate) · up` in fp32, rounded once to the dtype of gate_up."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def rotate(x: Float[Array, "*B N H"], angles: Float32[Array, "*B A"]) -> Float[Array, "*B N H"]:
    """Rotary embedding in fp32, rounded once, of pairs (i, i + H/2), the half-split order of Hugging Face transformers.

    `(x_i, x_{i+H/2}) -> (x_i cos_i − x_{i+H/2} sin_i, x_{i+H/2} cos_i + x_i sin_i)`
    """
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    wide = x.astype(jnp.float32)
    # XLA may leave out the rounding of x where it computes x itself, in one program but not in another; keys of
    # hundreds make it count.
    if x.dtype == jnp.bfloat16:
        wide = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    first, second = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def fp32_matmul(a: Float[Array, "i k"], b: Float[Array, "k j"]) -> Float32[Array, "i j"]:
    """`a b` accumulated and returned in fp32; fp32 operands multiply in fp32, where a GPU's default would be tf32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.matmul(a, b, preferred_element_type=jnp.float32, precision=precision)
