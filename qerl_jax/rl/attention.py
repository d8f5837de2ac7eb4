"""Causal attention of packed sequences and its gradient, each sequence apart.

On a GPU in bf16 by cuDNN's flash attention in its packed layout: offsets and lengths of the segments are arrays, so one
program serves every packing. Elsewhere plain masked attention, segment by segment.

The forward and the backward pass are two functions: between them the caller keeps what the backward pass needs.

Axes: T tokens, S segments, N query heads, K key/value heads, H head dim, W longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from qerl_jax.models.attention import masked_attention
from qerl_jax.rl.packing import Packed, PackShape

Statistics = Float32[Array, "S N W"] | None


def is_flash(dtype: jnp.dtype) -> bool:
    """Whether cuDNN's flash attention computes it."""
    return dtype == jnp.bfloat16 and jax.default_backend() == "gpu"


def segment_attention(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], packed: Packed, shape: PackShape
) -> tuple[Float[Array, "T N H"], Statistics]:
    """`softmax(q kᵀ / sqrt(H)) v` of each segment under a causal mask, 0 on the filler; and the softmax statistics that
    the backward pass reads (None where it computes the scores again).
    """
    if is_flash(q.dtype):
        out, statistics = _cudnn_forward(q, k, v, packed, shape)
    else:
        [out] = _each_segment(lambda _, *heads: (_causal(*heads),), (q, k, v), (q,), packed)
        statistics = None
    return jnp.where(packed.real[:, None, None], out, 0), statistics


def segment_attention_backward(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    out: Float[Array, "T N H"],
    statistics: Statistics,
    d_out: Float[Array, "T N H"],
    packed: Packed,
    shape: PackShape,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Gradients of q, k and v, 0 on the filler."""
    real = packed.real[:, None, None]
    d_out = jnp.where(real, d_out, 0)
    if is_flash(q.dtype):
        gradients = _cudnn_backward(q, k, v, out, statistics, d_out, packed, shape)
    else:

        def segment(real: Array, q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, Array, Array]:
            _, pullback = jax.vjp(_causal, q, k, v)
            return pullback(jnp.where(real[:, None, None], d_out, 0))

        gradients = _each_segment(segment, (q, k, v, d_out), (q, k, v), packed)
    return tuple(jnp.where(real, gradient, 0) for gradient in gradients)


def _causal(q: Float[Array, "W N H"], k: Float[Array, "W K H"], v: Float[Array, "W K H"]) -> Float[Array, "W N H"]:
    order = jnp.arange(q.shape[0])
    return masked_attention(q[None], k[None], v[None], (order[:, None] >= order)[None])[0]


def _each_segment(
    function: Callable[..., tuple[Array, ...]], arrays: tuple[Array, ...], like: tuple[Array, ...], packed: Packed
) -> tuple[Float[Array, "T ..."], ...]:
    """`function(real, *arrays of one segment)`, its results in the places of the segment's tokens; on the filler they
    are arbitrary.

    One segment after the other: the scores of one fit a CPU's cache, and segments without a sequence cost nothing.

    Args:
      function: takes bool[W], where the segment has tokens, and [W, ...] of each array, past the segment's end its last
        token; gives [W, ...] for each array of `like`.
      arrays: [T, ...].
      like: shapes and dtypes of the results, [T, ...].
      packed: the micro-batch.
    """
    width = packed.layout.unpack_index.shape[1]
    order = jnp.arange(width)

    def segment(i: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        index = packed.layout.unpack_index[i]
        found = function(order < packed.lengths[i], *(array[index] for array in arrays))
        # Behind a short segment this writes into the places of the next one, which writes later.
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(into, own, packed.starts[i], 0)
            for into, own in zip(results, found, strict=True)
        )

    used = jnp.max(jnp.where(packed.lengths > 0, jnp.arange(1, packed.lengths.shape[0] + 1), 0))
    empty = tuple(jnp.zeros((array.shape[0] + width, *array.shape[1:]), array.dtype) for array in like)
    return tuple(array[:-width] for array in jax.lax.fori_loop(0, used, segment, empty))


def _views(shape: PackShape) -> tuple[int, int]:
    """(rows R that the packed tokens are seen as, segments of a row): cuDNN launches for sequences as long as a
    row, so rows are as short as the longest sequence allows. A sequence may cross from a row into the next, because
    offsets count from the first row.
    """
    rows = max(1, shape.tokens // shape.longest)
    while shape.tokens % rows:
        rows -= 1
    return rows, max(2, -(-shape.segments // rows))  # with one segment a row, cuDNN does not take offsets at all


def _cudnn_arguments(packed: Packed, shape: PackShape, q: Array, k: Array) -> tuple[dict, tuple[Array, ...]]:
    """Static parameters, and (lengths, lengths, offsets of q, offsets of k) as cuDNN takes them: lengths of all
    segments, then zeros; offsets in elements, then the end.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    rows, row_segments = _views(shape)
    padding = rows * row_segments - shape.segments
    lengths = jnp.pad(packed.lengths, (0, padding)).reshape(rows, row_segments)
    starts = jnp.where(packed.lengths > 0, packed.starts, shape.tokens)
    starts = jnp.pad(starts, (0, padding + rows), constant_values=shape.tokens).reshape(rows, row_segments + 1)
    parameters = {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": fused.MaskType.PADDING_CAUSAL,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    offsets = (starts * (x.shape[1] * x.shape[2]) for x in (q, k))
    return parameters, (lengths, lengths, *offsets)


def _as_rows(x: Array, shape: PackShape) -> Array:
    rows, _ = _views(shape)
    return x.reshape(rows, shape.tokens // rows, *x.shape[1:])


def _cudnn_forward(q: Array, k: Array, v: Array, packed: Packed, shape: PackShape) -> tuple[Array, Statistics]:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    parameters, segments = _cudnn_arguments(packed, shape, q, k)
    none = jnp.zeros(0, q.dtype)  # bias, page tables
    out, statistics = fused._dot_product_attention_fwd_p.bind(
        *(_as_rows(x, shape) for x in (q, k, v)), none, *segments, none, none, is_training=True, **parameters
    )
    return out.reshape(q.shape), statistics


def _cudnn_backward(q, k, v, out, statistics, d_out, packed: Packed, shape: PackShape) -> tuple[Array, ...]:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    parameters, segments = _cudnn_arguments(packed, shape, q, k)
    none = jnp.zeros(0, q.dtype)
    q_rows, k_rows, v_rows, out_rows, d_out_rows = (_as_rows(x, shape) for x in (q, k, v, out, d_out))
    gradients = fused._dot_product_attention_bwd_p.bind(
        q_rows, k_rows, v_rows, none, *segments, none, none, statistics, out_rows, d_out_rows, **parameters
    )
    return tuple(x.reshape(like.shape) for x, like in zip(gradients[:3], (q, k, v), strict=True))
