"""Plain JAX: what the fused kernels compute, in any float dtype.

Axes: M tokens, K input features, F ffn features, C adapter columns (the ranks side by side).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qerl_kernels.nvfp4_matmul.lora_input import pad_lora_x
from qerl_kernels.ops import fp32_matmul


def shrink(x: Float[Array, "M K"], a: Float[Array, "K C"], ranks: Sequence[int]) -> Float[Array, "M S"]:
    """`x A` summed in fp32 and rounded once; each adapter padded to `MAX_RANK` columns: S = MAX_RANK · adapters."""
    return pad_lora_x(jnp.split(fp32_matmul(x, a).astype(x.dtype), np.cumsum(ranks)[:-1], axis=1))
