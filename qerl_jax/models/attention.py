"""Attention of a decoder layer, with rotary positions: of padded sequences, of packed sequences, and of one new token
against caches.

Axes: B sequences, T tokens, S cache slots, P prompts, N query heads, K key/value heads, G query heads per key/value
head, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int
from qerl_kernels import dispatch
from qerl_kernels.decode_attention.api import decode_attention
from qerl_kernels.ops import rotate
from qerl_kernels.rope_cache.api import rope_and_cache

from qerl_jax.models.config import ModelConfig, RopeScaling
from qerl_jax.models.linear import FP32_PRECISION
from qerl_jax.models.packed_sequences import PackedLayout

AttentionFn = Callable[[Array, Array, Any], tuple[Array, Any]]
"""Attention of one layer: (q, k and v side by side [*B (N + 2 K)·H], rotary angles [*B H/2], the layer's cache) ->
(attended [*B N H], the layer's new cache). Training, prefill and decode differ in nothing else. A cache is any pytree;
training has None.
"""

_MASKED = -1e30  # finite: a row whose keys are all masked stays finite


def padded_attention(config: ModelConfig, attention_mask: Bool[Array, "B T"]) -> AttentionFn:
    """Causal attention of padded sequences, without caches. Padding may be on either side."""
    order = jnp.arange(attention_mask.shape[1])
    mask = (order[:, None] >= order[None, :]) & attention_mask[:, None, :]

    def attention(qkv: Array, angles: Array, cache: None) -> tuple[Array, None]:
        q, k, v = split_and_rotate(config, qkv, angles)
        return masked_attention(q, k, v, mask), None

    return attention


def packed_attention(config: ModelConfig, layout: PackedLayout) -> AttentionFn:
    """Causal attention within each of several packed sequences. The new cache is the tokens' (k, v), [T, K, H] each."""

    def attention(qkv: Array, angles: Array, cache: None) -> tuple[Array, tuple[Array, Array]]:
        q, k, v = split_and_rotate(config, qkv, angles)
        return layout.pack(causal_attention(*(layout.unpack(x) for x in (q, k, v)))), (k, v)

    return attention


def cached_attention(
    prompt_index: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"],
    slots: Int[Array, " B"],
    batch_invariant: bool,
) -> AttentionFn:
    """Attention of one new token a sequence to its prompt's cache and its own, in which the token gets its slot.

    A layer's cache is (prompt keys, prompt values, keys, values); the new cache is (keys, values). Arguments as for
    `decode_attention` and `rope_and_cache`.
    """

    def attention(qkv: Array, angles: Array, cache: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        prompt_keys, prompt_values, keys, values = cache
        q, keys, values = rope_and_cache(qkv, angles, slots, keys, values)
        prompts = prompt_keys, prompt_values, prompt_index, prompt_lengths
        attended = decode_attention(q, *prompts, keys, values, lengths, batch_invariant=batch_invariant)
        return attended, (keys, values)

    return attention


def split_and_rotate(
    config: ModelConfig, qkv: Float[Array, "*B M"], angles: Float32[Array, "*B A"]
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"], Float[Array, "*B K H"]]:
    """`split_heads`, q and k with rotary positions; A = H / 2."""
    q, k, v = split_heads(config, qkv)
    return rotate(q, angles), rotate(k, angles), v


def split_heads(
    config: ModelConfig, qkv: Float[Array, "*B M"]
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B K H"], Float[Array, "*B K H"]]:
    """q, k and v by heads; M = (N + 2 K)·H."""
    heads = qkv.reshape(*qkv.shape[:-1], -1, config.head_dim)
    return tuple(jnp.split(heads, (config.num_heads, config.num_heads + config.num_kv_heads), axis=-2))


def rotary_angles(positions: Int[Array, "*B"], config: ModelConfig) -> Float32[Array, "*B {config.head_dim//2}"]:
    """`position · theta^(−2i / H)` in fp32, in radians, with frequencies stretched as `rope_scaling` says."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    return positions[..., None].astype(jnp.float32) * frequencies


def _stretched(frequencies: Float32[Array, " A"], scaling: RopeScaling) -> Float32[Array, " A"]:
    """Llama 3.1's frequencies: `f (1 − s) / factor + f s`, with s rising from 0 to 1 as the original length holds
    `low_freq_factor` to `high_freq_factor` wavelengths.
    """
    wavelengths_held = scaling.original_max_position_embeddings * frequencies / (2 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = jnp.clip((wavelengths_held - low) / (high - low), 0.0, 1.0)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def is_flash(dtype: jnp.dtype) -> bool:
    """Whether cuDNN's flash attention computes queries of that dtype: bf16 on a GPU."""
    return dtype == jnp.bfloat16 and dispatch.is_for_gpu()


def causal_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
) -> Float[Array, "B T N H"]:
    """Causal softmax attention: by cuDNN's flash attention where `is_flash`, else by `masked_attention`."""
    if is_flash(q.dtype):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    order = jnp.arange(q.shape[1])
    mask = jnp.broadcast_to(order[:, None] >= order, (q.shape[0], *order.shape, *order.shape))
    return masked_attention(q, k, v, mask)


def masked_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """`softmax(q kᵀ / sqrt(H)) v` over the keys that the mask admits (True).

    Scores and softmax are fp32; the weights are rounded to v's dtype, the result to q's. Query head n reads key/value
    head `n // G`. A row whose keys are all masked gets their mean.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    precision = FP32_PRECISION if q.dtype == jnp.float32 else None
    # Heads first: else XLA's CPU backend transposes the scores in place of q, k and v.
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = jnp.einsum("bkgth,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32, precision=precision)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v, preferred_element_type=jnp.float32, precision=precision)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim).astype(q.dtype)
