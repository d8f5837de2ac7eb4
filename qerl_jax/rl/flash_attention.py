"""Attention of packed sequences by cuDNN's flash attention: offsets and lengths of the segments are arrays, so one
program serves every packing.

Two calls make one attention. In the first every segment, prefix or suffix, attends causally to itself; in the second
the suffixes of a prefix, side by side, are one query segment that attends to all of the prefix. With the outputs o₁, o₂
and the logarithms l₁, l₂ of their softmax's sums,

  l = log(exp l₁ + exp l₂),   o = exp(l₁ − l) o₁ + exp(l₂ − l) o₂.

The backward pass of either call is given o and l in the place of its own: it then computes the weights exp(s − l) of
the whole softmax, and what belongs to its own keys of the gradient (FlashAttention, arXiv 2307.08691, §2.3.2).

Axes: T tokens, N query heads, K key/value heads, H head dim, G segments, P prefixes, W tokens of a row.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from qerl_jax.rl.micro_batches import Packed, PackShape

Statistics = Float32[Array, "T N"] | None
"""l of each token and head."""


class _Part(NamedTuple):
    """One call: which segments of queries read which segments of keys and values.

    Attributes:
      causal: whether segments are masked causally; else every query sees every key.
      rows: R, the packed tokens are seen as so many rows of T / R: cuDNN launches for sequences as long as a row. A
        sequence may cross from a row into the next, because offsets count from the first row.
      segments: number of segments of a row.
      q_starts, q_lengths, k_starts, k_lengths: [R · segments], empty ones of length 0.
      segment_of: segment in which each token is a query.
      place_of: place of each token in that segment.
      reads: whether a token is a query of a segment that has keys.
      is_read: whether it is a key of one that has queries.
    """

    causal: bool
    rows: int
    segments: int
    q_starts: Int[Array, " G"]
    q_lengths: Int[Array, " G"]
    k_starts: Int[Array, " G"]
    k_lengths: Int[Array, " G"]
    segment_of: Int[Array, " T"]
    place_of: Int[Array, " T"]
    reads: Bool[Array, " T"]
    is_read: Bool[Array, " T"]


def forward(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], packed: Packed, shape: PackShape
) -> tuple[Float[Array, "T N H"], Statistics]:
    """Attention's output, and the statistics that `backward` reads; arbitrary on the filler."""
    parts = [_call_forward(q, k, v, part, shape) for part in _parts(packed, shape)]
    (out, own), (of_prefix, seen) = parts
    statistics = jnp.logaddexp(own, seen)
    shares = [jnp.exp(x - statistics)[..., None] for x in (own, seen)]
    return (shares[0] * out + shares[1] * of_prefix).astype(q.dtype), statistics


def backward(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    out: Float[Array, "T N H"],
    statistics: Statistics,
    d_out: Float[Array, "T N H"],
    packed: Packed,
    shape: PackShape,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Gradients of q, k and v; arbitrary on the filler."""
    itself, of_prefix = _parts(packed, shape)
    first = _call_backward(q, k, v, out, statistics, d_out, itself, shape)
    second = _call_backward(q, k, v, out, statistics, d_out, of_prefix, shape)
    written = of_prefix.reads, of_prefix.is_read, of_prefix.is_read
    return tuple(
        (a.astype(jnp.float32) + jnp.where(some[:, None, None], b, 0)).astype(a.dtype)
        for a, b, some in zip(first, second, written, strict=True)
    )


def views(shape: PackShape) -> tuple[int, int]:
    """(rows that the packed tokens are seen as, segments of a row) where segments attend to themselves."""
    rows, segments = rows_of(shape.tokens, shape.longest_segment), shape.prefixes + shape.suffixes
    return rows, row_segments(-(-segments // rows))


def row_segments(segments: int) -> int:
    """Segments of a row for so many that are needed: at least two, because with one cuDNN takes no offsets."""
    return max(2, segments)


def rows_of(tokens: int, longest: int) -> int:
    """Most rows of equal length, at least `longest`, that so many tokens can be seen as."""
    rows = max(1, tokens // longest)
    while tokens % rows:
        rows -= 1
    return rows


def _parts(packed: Packed, shape: PackShape) -> tuple[_Part, _Part]:
    rows, segments = views(shape)
    room, count = packed.prefixes, shape.prefixes  # `packed` has room for more prefixes and suffixes than are used
    prefix_starts, suffix_starts = packed.starts[:count], packed.starts[room:]
    prefix_lengths, suffix_lengths = packed.lengths[:count], packed.lengths[room:]
    is_suffix = packed.segment_ids >= room

    def of_all(prefixes: Array, suffixes: Array) -> Array:
        return _padded(jnp.concatenate([prefixes, suffixes[: shape.suffixes]]), rows * segments)

    starts, lengths = of_all(prefix_starts, suffix_starts), of_all(prefix_lengths, suffix_lengths)
    itself = _Part(
        causal=True,
        rows=rows,
        segments=segments,
        q_starts=starts,
        q_lengths=lengths,
        k_starts=starts,
        k_lengths=lengths,
        segment_of=packed.segment_ids - jnp.where(is_suffix, room - count, 0),
        place_of=packed.places,
        reads=packed.real,
        is_read=packed.real,
    )
    # The suffixes of a prefix: the first one's start, all their tokens.
    own = packed.prefix_of == jnp.arange(count)[:, None]
    own &= (suffix_lengths > 0) & (prefix_lengths[:, None] > 0)
    q_lengths = jnp.sum(jnp.where(own, suffix_lengths, 0), axis=1)
    q_starts = suffix_starts[jnp.argmax(own, axis=1)]
    suffix = jnp.clip(packed.segment_ids - room, 0, packed.prefix_of.shape[0] - 1)
    prefix = packed.prefix_of[suffix]
    reads = packed.real & is_suffix & (prefix_lengths[prefix] > 0)
    is_read = ~is_suffix & (q_lengths[jnp.minimum(packed.segment_ids, count - 1)] > 0)
    place = jnp.arange(shape.tokens) - q_starts[prefix]
    width = row_segments(count)
    arrays = (_padded(x, width) for x in (q_starts, q_lengths, prefix_starts, prefix_lengths))
    return itself, _Part(False, 1, width, *arrays, prefix, jnp.where(reads, place, 0), reads, is_read)


def _padded(x: Int[Array, " X"], count: int) -> Int[Array, " G"]:
    return jnp.pad(x, (0, count - x.shape[0]))


def _arguments(part: _Part, shape: PackShape, q: Array, k: Array) -> tuple[dict, tuple[Array, ...]]:
    """Static parameters, and (lengths of q, of k, offsets of q, of k) as cuDNN takes them, offsets in elements, one
    more for each row.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def offsets(starts: Array, lengths: Array, x: Array) -> Array:
        starts = jnp.where(lengths > 0, starts, shape.tokens)
        starts = jnp.pad(starts, (0, part.rows), constant_values=shape.tokens)
        return starts.reshape(part.rows, part.segments + 1) * (x.shape[1] * x.shape[2])

    parameters = {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": fused.MaskType.PADDING_CAUSAL if part.causal else fused.MaskType.PADDING,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if "score_mod" in inspect.signature(fused._dot_product_attention_fwd_impl).parameters:  # jax 0.12
        parameters |= {"score_mod_name": None, "score_mod_jaxpr": None}
    lengths = (x.reshape(part.rows, part.segments) for x in (part.q_lengths, part.k_lengths))
    return parameters, (
        *lengths,
        offsets(part.q_starts, part.q_lengths, q),
        offsets(part.k_starts, part.k_lengths, k),
    )


def _as_rows(x: Array, part: _Part) -> Array:
    return x.reshape(part.rows, x.shape[0] // part.rows, *x.shape[1:])


def _call_forward(q, k, v, part: _Part, shape: PackShape) -> tuple[Float32[Array, "T N H"], Float32[Array, "T N"]]:
    """(output, statistics), 0 and −inf where a token is no query."""
    parameters, segments = _arguments(part, shape, q, k)
    out, statistics = _cudnn_forward(*(_as_rows(x, part) for x in (q, k, v)), segments, parameters)
    out, reads = out.reshape(q.shape).astype(jnp.float32), part.reads[:, None]
    segment = jnp.minimum(part.segment_of, statistics.shape[0] - 1)
    place = jnp.minimum(part.place_of, statistics.shape[2] - 1)
    return jnp.where(reads[..., None], out, 0), jnp.where(reads, statistics[segment, :, place], -jnp.inf)


def _call_backward(q, k, v, out, statistics, d_out, part: _Part, shape: PackShape) -> tuple[Array, ...]:
    parameters, segments = _arguments(part, shape, q, k)
    width = shape.tokens // part.rows
    inside = jnp.arange(width) < part.q_lengths[:, None]
    index = jnp.where(inside, part.q_starts[:, None] + jnp.arange(width), 0)
    own = jnp.where(inside[..., None], statistics[index], 0).swapaxes(1, 2)  # [G, N, W]
    q_rows, k_rows, v_rows, out_rows, d_out_rows = (_as_rows(x, part) for x in (q, k, v, out, d_out))
    gradients = _cudnn_backward(q_rows, k_rows, v_rows, own, out_rows, d_out_rows, segments, parameters)
    return tuple(x.reshape(like.shape) for x, like in zip(gradients, (q, k, v), strict=True))


def _cudnn_forward(q, k, v, segments: tuple[Array, ...], parameters: dict) -> tuple[Array, Array]:
    """(output, statistics [G, N, W])."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    none = jnp.zeros(0, q.dtype)  # bias, page tables
    arguments = q, k, v, none, *segments, none, none
    out, statistics = fused._dot_product_attention_fwd_p.bind(*arguments, is_training=True, **parameters)
    return out, statistics


def _cudnn_backward(q, k, v, statistics, out, d_out, segments: tuple[Array, ...], parameters: dict) -> list[Array]:
    """Gradients of q, k and v."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    none = jnp.zeros(0, q.dtype)
    arguments = q, k, v, none, *segments, none, none, statistics, out, d_out
    return fused._dot_product_attention_bwd_p.bind(*arguments, **parameters)[:3]
