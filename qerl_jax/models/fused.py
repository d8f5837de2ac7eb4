"""A decoder layer in decode on packed weights: what precedes each projection, and its adapters' `x A`, in one launch
(where the product does not compute `x A` itself).

The arithmetic is that of `DecoderLayer`; only what adds to the residual stream waits for the norm that follows it.

Axes: B sequences, D model, A rotary angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float, Float32
from qerl_kernels.decode_prologue.api import MAX_TOKENS, lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul.api import product_takes
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK

from qerl_jax.models.formats import PackedNvfp4
from qerl_jax.models.lora import together

if TYPE_CHECKING:
    from qerl_jax.models.qwen2 import DecoderLayer, Mix, Projection, RMSNorm


def fits(layers: Sequence[DecoderLayer], batch: int) -> bool:
    """Whether `layer_step` takes these layers and so many sequences: packed weights, adapters that the kernels hold."""
    projections = [projection for layer in layers for projection in _projections(layer)]
    return batch <= MAX_TOKENS and all(
        isinstance(projection.weight.get_value(), PackedNvfp4)
        and all(part.b.shape[0] <= MAX_RANK for part in projection.adapters())
        for projection in projections
    )


def layer_step(
    layer: DecoderLayer,
    x: Float32[Array, "B D"],
    delta: Float[Array, "B D"] | None,
    angles: Float32[Array, "B 1 A"],
    mix: Mix,
    held: Any,
) -> tuple[Float32[Array, "B D"], Float[Array, "B D"], Any]:
    """One token a sequence through a layer. No gradients.

    Args:
      layer: its projections as `fits` wants them.
      x: the residual stream.
      delta: what the layer before adds to it; None before the first.
      angles: of the tokens' positions.
      mix: as in `DecoderLayer`.
      held: what it is given for this layer.

    Returns:
      x and delta for the next layer, and what `mix` keeps.
    """
    attention, mlp = layer.self_attn, layer.mlp
    x, y, t = _norm(layer.input_layernorm, x, delta, attention.qkv_proj)
    qkv = attention.qkv_proj(y, shrunk=t)
    mixed, kept = mix(qkv[:, None], angles, held)
    mixed = mixed.reshape(x.shape[0], -1)
    a, ranks, in_parts = _adapters(attention.o_proj, mixed)
    t = None if a is None else lora_prologue(mixed, a, ranks, in_parts=in_parts)
    delta = attention.o_proj(mixed, shrunk=t)
    x, y, t = _norm(layer.post_attention_layernorm, x, delta, mlp.gate_up_proj)
    a, ranks, in_parts = _adapters(mlp.down_proj, y)
    h, t = silu_mul_prologue(mlp.gate_up_proj(y, shrunk=t), a, ranks, in_parts=in_parts)
    return x, mlp.down_proj(h, shrunk=t), kept


def _projections(layer: DecoderLayer) -> tuple[Projection, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _norm(norm: RMSNorm, x: Array, delta: Array | None, projection: Projection) -> tuple[Array, Array, Array | None]:
    a, ranks, _ = _adapters(projection, jax.ShapeDtypeStruct(x.shape, norm.dtype))
    return rms_norm_prologue(x, delta, norm.weight.get_value(), norm.eps, a, ranks, dtype=norm.dtype)


def _adapters(projection: Projection, x: Array | jax.ShapeDtypeStruct) -> tuple[Array | None, tuple[int, ...], bool]:
    """(A of a projection's adapters side by side, their ranks, whether `x A` may come in parts), for a product with as
    many rows as x has, of its dtype. No A where there are no adapters or the product computes `x A` itself."""
    parts = projection.adapters()
    takes = product_takes(x.shape[0], projection.weight.get_value(), parts, x.dtype)
    if not parts or takes == "a":
        return None, (), False
    return together(parts).astype(x.dtype), tuple(part.b.shape[0] for part in parts), takes == "parts"
