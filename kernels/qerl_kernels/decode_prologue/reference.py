"""Plain JAX equivalent of the `x A` that the decode prologue computes, in any float dtype; norm and SiLU: `ops`.

Axes: M tokens, K input features, C columns of A (the adapters side by side), S = 64 · adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qerl_kernels.nvfp4_matmul.lora_input import pad_lora_x
from qerl_kernels.ops import fp32_matmul


def lora_x(x: Float[Array, "M K"], a: Float[Array, "K C"], ranks: Sequence[int]) -> Float[Array, "M S"]:
    """`x A` accumulated in fp32 and rounded once, each adapter's columns padded with zeros to 64."""
    return pad_lora_x(jnp.split(fp32_matmul(x, a).astype(x.dtype), np.cumsum(ranks)[:-1], axis=1))
