"""Causal attention of packed sequences and its gradient, each sequence apart, the prefixes of prompts once.

A prefix attends to itself; a suffix to itself and to all of its prefix. On a GPU in bf16 both parts are computed by
cuDNN's flash attention in its packed layout (`rl.flash_attention`), elsewhere by plain masked attention, segment by
segment.

The forward and the backward pass are two functions: between them the caller keeps what the backward pass needs.

Axes: T tokens, N query heads, K key/value heads, H head dim, U tokens of a prefix, W of a suffix, at most.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qerl_jax.models.attention import causal_attention, is_flash, masked_attention
from qerl_jax.rl import flash_attention
from qerl_jax.rl.flash_attention import Statistics
from qerl_jax.rl.micro_batches import Packed, PackShape


def segment_attention(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], packed: Packed, shape: PackShape
) -> tuple[Float[Array, "T N H"], Statistics]:
    """`softmax(q kᵀ / sqrt(H)) v` of each sequence under a causal mask, 0 on the filler; and the softmax statistics
    that the backward pass reads (None where it computes the scores again).
    """
    if is_flash(q.dtype):
        out, statistics = flash_attention.forward(q, k, v, packed, shape)
    else:
        out, statistics = _plain_forward(q, k, v, packed, shape), None
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
        gradients = flash_attention.backward(q, k, v, out, statistics, d_out, packed, shape)
    else:
        gradients = _plain_backward(q, k, v, d_out, packed, shape)
    return tuple(jnp.where(real, gradient, 0) for gradient in gradients)


def _of_prefix(q: Float[Array, "U N H"], k: Float[Array, "U K H"], v: Float[Array, "U K H"]) -> Float[Array, "U N H"]:
    return causal_attention(q[None], k[None], v[None])[0]


def _of_suffix(
    seen: Bool[Array, " U"],
    q: Float[Array, "W N H"],
    k: Float[Array, "W K H"],
    v: Float[Array, "W K H"],
    prefix_k: Float[Array, "U K H"],
    prefix_v: Float[Array, "U K H"],
) -> Float[Array, "W N H"]:
    order = jnp.arange(q.shape[0])
    own = order[:, None] >= order
    mask = jnp.concatenate([jnp.broadcast_to(seen, (*own.shape[:1], *seen.shape)), own], axis=1)
    k, v = jnp.concatenate([prefix_k, k]), jnp.concatenate([prefix_v, v])
    return masked_attention(q[None], k[None], v[None], mask[None])[0]


def _plain_forward(q: Array, k: Array, v: Array, packed: Packed, shape: PackShape) -> Float[Array, "T N H"]:
    def prefix(i: Array, out: Array) -> tuple[Array]:
        index = _index(packed, i, shape.longest_prefix)
        return (_write(out, _of_prefix(q[index], k[index], v[index]), packed.starts[i]),)

    def suffix(i: Array, out: Array) -> tuple[Array]:
        index, before, seen = _indices(packed, i, shape)
        own = _of_suffix(seen, q[index], k[index], v[index], k[before], v[before])
        return (_write(out, own, packed.starts[i]),)

    [out] = _each_segment(prefix, suffix, (_room(q, shape),), packed)
    return out[: q.shape[0]]


def _plain_backward(q, k, v, d_out, packed: Packed, shape: PackShape) -> tuple[Array, Array, Array]:
    def pull(function: Callable[..., Array], index: Array, i: Array, *inputs: Array) -> tuple[Array, ...]:
        inside = jnp.arange(index.shape[0]) < packed.lengths[i]
        return jax.vjp(function, *inputs)[1](jnp.where(inside[:, None, None], d_out[index], 0))

    def prefix(i: Array, *into: Array) -> tuple[Array, ...]:
        index = _index(packed, i, shape.longest_prefix)
        found = pull(_of_prefix, index, i, q[index], k[index], v[index])
        return tuple(_write(x, own, packed.starts[i]) for x, own in zip(into, found, strict=True))

    def suffix(i: Array, *into: Array) -> tuple[Array, ...]:
        index, before, seen = _indices(packed, i, shape)

        def attention(*heads: Array) -> Array:
            return _of_suffix(seen, *heads)

        d_q, d_k, d_v, *d_prefix = pull(attention, index, i, q[index], k[index], v[index], k[before], v[before])
        into = [_write(x, own, packed.starts[i]) for x, own in zip(into, (d_q, d_k, d_v), strict=True)]
        start = packed.starts[packed.prefix_of[i - packed.prefixes]]
        for place, own in zip((1, 2), d_prefix, strict=True):  # 0 behind the prefix's end
            so_far = jax.lax.dynamic_slice_in_dim(into[place], start, own.shape[0])
            into[place] = _write(into[place], so_far + own, start)
        return tuple(into)

    gradients = _each_segment(prefix, suffix, tuple(_room(x, shape) for x in (q, k, v)), packed)
    return tuple(gradient[: q.shape[0]] for gradient in gradients)


def _each_segment(
    prefix: Callable[..., tuple[Array, ...]],
    suffix: Callable[..., tuple[Array, ...]],
    results: tuple[Array, ...],
    packed: Packed,
) -> tuple[Array, ...]:
    """`results` after `prefix(i, *results)` for each prefix i and then `suffix(i, *results)` for each suffix i.

    One segment after the other: the scores of one fit a CPU's cache, and segments without a token cost nothing.
    """

    def used(some: Int[Array, " X"]) -> Array:
        return jnp.max(jnp.where(some > 0, jnp.arange(1, some.shape[0] + 1), 0))

    def step(function: Callable) -> Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]:
        return lambda i, results: function(i, *results)

    count = packed.prefixes
    results = jax.lax.fori_loop(0, used(packed.lengths[:count]), step(prefix), results)
    return jax.lax.fori_loop(count, count + used(packed.lengths[count:]), step(suffix), results)


def _index(packed: Packed, i: Array, width: int) -> Int[Array, " X"]:
    """Tokens of segment i; past its end its last token, because another segment's might be NaN."""
    last = jnp.maximum(packed.starts[i] + packed.lengths[i] - 1, 0)
    return jnp.minimum(packed.starts[i] + jnp.arange(max(1, width)), last)


def _indices(packed: Packed, i: Array, shape: PackShape) -> tuple[Array, Array, Bool[Array, " U"]]:
    """Tokens of suffix i, of its prefix, and which of the latter are there."""
    prefix = packed.prefix_of[i - packed.prefixes]
    before = _index(packed, prefix, shape.longest_prefix)
    return _index(packed, i, shape.longest_suffix), before, jnp.arange(before.shape[0]) < packed.lengths[prefix]


def _room(like: Float[Array, "T ..."], shape: PackShape) -> Float[Array, "T_and_more ..."]:
    """Zeros, with room for a segment of the longest behind the last token."""
    return jnp.zeros((like.shape[0] + max(shape.longest_prefix, shape.longest_suffix), *like.shape[1:]), like.dtype)


def _write(into: Array, own: Array, start: Array) -> Array:
    """Behind a short segment this writes into the places of the next one, which writes later."""
    return jax.lax.dynamic_update_slice_in_dim(into, own, start, 0)
