"""Plain JAX: what the fused kernels compute, in any float dtype.

Axes: M tokens, K input features, F ffn features, C adapter columns (the ranks side by side).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from qerl_kernels.nvfp4_matmul.reference import fp32_matmul, in_slots


def rms_norm(x: Float32[Array, "*M K"], weight: Float32[Array, " K"], eps: float, dtype: DTypeLike) -> Array:
    """`w ⊙ x / sqrt(mean(x²) + eps)` in fp32, rounded once."""
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight).astype(dtype)


def silu_product(gate_up: Float[Array, "*M 2*F"]) -> Float[Array, "*M F"]:
    """`silu(gate) · up` in fp32, rounded once to the dtype of gate_up."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def shrink(x: Float[Array, "M K"], a: Float[Array, "K C"], ranks: Sequence[int]) -> Float[Array, "M S"]:
    """`x A` summed in fp32 and rounded once; the columns of each adapter padded to `SLOT`: S = SLOT · adapters."""
    return in_slots(jnp.split(fp32_matmul(x, a).astype(x.dtype), np.cumsum(ranks)[:-1], axis=1))
