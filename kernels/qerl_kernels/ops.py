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


@jax.custom_vjp
def silu_mul(gate_up: Float[Array, "*M 2*F"]) -> Float[Array, "*M F"]:
    """`silu(gate) · up` in fp32, rounded once to the dtype of gate_up."""
    return _silu_mul(gate_up)


def _silu_mul(gate_up: Float[Array, "*M 2*F"]) -> Float[Array, "*M F"]:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _silu_mul_forward(gate_up: Float[Array, "*M 2*F"]) -> tuple[Float[Array, "*M F"], Float[Array, "*M 2*F"]]:
    return silu_mul(gate_up), gate_up


def _silu_mul_backward(gate_up: Float[Array, "*M 2*F"], d_h: Float[Array, "*M F"]) -> tuple[Float[Array, "*M 2*F"]]:
    """Gradients of gate and up in fp32, rounded once; on a GPU in one pass over memory, which on a CPU, where the
    arithmetic costs more than the bytes, takes a fifth longer for a whole update of the bundled policy.
    """
    return (jax.lax.platform_dependent(gate_up, d_h, cuda=silu_mul_gradient_in_one_pass, default=_silu_mul_gradient),)


def _silu_mul_gradient(gate_up: Float[Array, "*M 2*F"], d_h: Float[Array, "*M F"]) -> Float[Array, "*M 2*F"]:
    return jax.vjp(_silu_mul, gate_up)[1](d_h)[0]


def silu_mul_gradient_in_one_pass(gate_up: Float[Array, "*M 2*F"], d_h: Float[Array, "*M F"]) -> Float[Array, "*M 2*F"]:
    """With s = sigmoid(gate), `d_h up (s + gate s (1 − s))` and `d_h gate s`, side by side.

    Each place of either half chooses between the two, so that XLA makes one pass over memory. The concatenation of two
    halves, which is what autodiff makes, is a pass of its own, and a value that both halves share could be, too.
    """
    halves = gate_up.reshape(*d_h.shape[:-1], 2, d_h.shape[-1]).astype(jnp.float32)
    others, is_gate = jnp.flip(halves, -2), jax.lax.broadcasted_iota(jnp.int32, halves.shape, halves.ndim - 2) == 0
    gate, up = jnp.where(is_gate, halves, others), jnp.where(is_gate, others, halves)
    sigmoid, d_h = jax.nn.sigmoid(gate), d_h.astype(jnp.float32)[..., None, :]
    d_silu = d_h * up
    d_gate = d_silu * sigmoid + d_silu * gate * (sigmoid * (1 - sigmoid))
    d_gate_up = jnp.where(is_gate, d_gate, d_h * (gate * sigmoid))
    return d_gate_up.reshape(gate_up.shape).astype(gate_up.dtype)


silu_mul.defvjp(_silu_mul_forward, _silu_mul_backward)


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
