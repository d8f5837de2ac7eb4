"""`linear`: a weight of any format, bias and LoRA adapters. Every projection of the model calls it.

Axes: M rows, K input features, N output features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from qerl_kernels import dispatch
from qerl_kernels.batch_invariant import in_blocks
from qerl_kernels.gpu import Gpu
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul, rows_at_once
from qerl_kernels.nvfp4_matmul.lora_input import LoraX
from qerl_kernels.nvfp4_matmul.reference import no_gradient
from qerl_kernels.nvfp4_matmul.route import Route
from qerl_kernels.ops import fp32_matmul

from qerl_jax.models.formats import Dense, PackedNvfp4, Weight, format_of
from qerl_jax.models.lora import Lora

# GEMMs of an fp32 model must be fp32 too: a GPU's default would be tf32, three digits.
FP32_PRECISION = jax.lax.Precision.HIGHEST


class XlaMatmuls(NamedTuple):
    """What the projections need where XLA multiplies in place of a kernel.

    Attributes:
      wide_bytes: of an element of a forward pass's results, which are summed in fp32; 0 where kernels multiply.
      in_blocks: whether many rows are multiplied some at a time (`nvfp4_matmul.api.rows_at_once`).
      dequantized_bytes: the largest such projection, dequantized to the compute dtype; 0 for dense weights.
    """

    wide_bytes: int = 0
    in_blocks: bool = False
    dequantized_bytes: int = 0

    def wide(self, m: int, n: int) -> int:
        """Bytes of the sums in fp32 of a projection to n features of m rows: of a block, product and adapters' part."""
        rows = rows_at_once(m, n) if self.in_blocks else m
        return self.wide_bytes * m * n if rows == m else 8 * rows * n


def xla_matmuls(layers: Any, itemsize: int, gpu: Gpu | None) -> XlaMatmuls:
    """`XlaMatmuls` of the frozen layers, real or abstract, on a GPU (None: the default one): of packed ones too where
    its tier has no GEMM for many rows. Then one array in fp32 is there at a time; otherwise the product and, with the
    adapters' part, the sum.
    """
    weights = jax.tree.leaves(layers, is_leaf=lambda node: isinstance(node, Weight))
    weights = [leaf for leaf in weights if isinstance(leaf, Weight)]
    others = [leaf for leaf in weights if not isinstance(leaf, PackedNvfp4)]
    by_xla = others if (gpu or dispatch.this_gpu()).tier == "wgmma" else weights
    quantized = [leaf.shape for leaf in by_xla if not isinstance(leaf, Dense)]
    dequantized_bytes = itemsize * max((n * k for n, k in quantized), default=0)
    return XlaMatmuls(8 if others else 4 if by_xla else 0, bool(by_xla) and not others, dequantized_bytes)


def linear(
    x: Float[Array, "... K"],
    weight: Weight,
    bias: Float[Array, " N"] | None = None,
    lora: Sequence[Lora] = (),
    *,
    batch_invariant: bool = False,
    route: Route | None = None,
    lora_x: LoraX | None = None,
) -> Float[Array, "... N"]:
    """`y = x Wᵀ + bias + Σ_adapters scale · (x A) B`, summed in fp32 and rounded once to x's dtype; `x A` is rounded to
    x's dtype, too.

    Differentiable in x, bias and the adapters. The weight is frozen and gets no gradient, and the backward pass
    dequantizes a quantized one again instead of keeping a copy.

    Args:
      x: activations, bf16 or fp32.
      weight: [N, K], in any of the formats.
      bias: in any float dtype; added in fp32.
      lora: the adapters of a (fused) projection with their output offsets.
      batch_invariant: a row's bits do not depend on the number of rows or on the other rows; slower.
      route: the route of the GEMM (`nvfp4_matmul`) where the caller has it; for packed weights.
      lora_x: `x A` computed by a prologue kernel (`nvfp4_matmul`); for packed weights, without gradients.

    Raises:
      ValueError: K of x and of the weight differ, or `route` or `lora_x` is given with a weight that is not packed.
    """
    n, k = weight.shape
    if x.shape[-1] != k:
        raise ValueError(f"linear: x has {x.shape[-1]} input features, the weight {k} (shape {n} x {k})")
    adapters = list(lora)
    if isinstance(weight, PackedNvfp4):
        return nvfp4_matmul(x, weight, bias, adapters, batch_invariant=batch_invariant, route=route, lora_x=lora_x)
    if route is not None or lora_x is not None:
        raise ValueError(f"linear: route and lora_x go with a packed weight, this is {type(weight).__name__}")

    def matmul(rows: Array) -> Array:
        y = _matmul(rows, weight)
        if bias is not None:
            y = y + bias.astype(jnp.float32)
        if adapters:
            y = y + _lora_delta(rows, adapters, n)
        return y.astype(x.dtype)

    rows = x.reshape(-1, k)
    y = in_blocks(matmul, rows) if batch_invariant else matmul(rows)
    return y.reshape(*x.shape[:-1], n)


def _lora_delta(rows: Float[Array, "M K"], adapters: list[Lora], n: int) -> Float32[Array, "M N"]:
    """Every adapter's `scale · (x A) B` at its output features, zero elsewhere.

    `x A` is accumulated in fp32 and rounded once to x's dtype.
    """
    deltas, end = [], 0
    for lora in sorted(adapters, key=lambda lora: lora.offset):
        if lora.offset > end:
            deltas.append(jnp.zeros((rows.shape[0], lora.offset - end), jnp.float32))
        lora_x = fp32_matmul(rows, lora.own_a.astype(rows.dtype)).astype(rows.dtype)
        deltas.append(lora.scale * fp32_matmul(lora_x, lora.b.astype(rows.dtype)))
        end = lora.offset + lora.b.shape[-1]
    if end < n:
        deltas.append(jnp.zeros((rows.shape[0], n - end), jnp.float32))
    return deltas[0] if len(deltas) == 1 else jnp.concatenate(deltas, axis=-1)


@jax.custom_vjp
def _matmul(rows: Float[Array, "M K"], weight: Weight) -> Float32[Array, "M N"]:
    matrix, row_scale = format_of(weight).factors(weight, rows.dtype)
    y = fp32_matmul(rows, matrix.T)
    return y if row_scale is None else y * row_scale


def _matmul_fwd(rows, weight):
    return _matmul(rows, weight), (weight, jnp.zeros((0,), rows.dtype))


def _matmul_bwd(residual, dy):
    weight, of_dtype = residual
    matrix, row_scale = format_of(weight).factors(weight, of_dtype.dtype)
    dy = (dy if row_scale is None else dy * row_scale).astype(of_dtype.dtype)
    return fp32_matmul(dy, matrix).astype(of_dtype.dtype), jax.tree.map(no_gradient, weight)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
