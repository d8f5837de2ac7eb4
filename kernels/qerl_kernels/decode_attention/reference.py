"""Plain JAX equivalent of decode attention, and the path where no kernel runs.

Axes: B sequences, P prompts, S slots of a prompt's cache, T slots of a sequence's own cache, N query heads, K key/value
heads, G = N / K query heads a key/value head, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def decode_attention(
    q: Float[Array, "B N H"],
    prompt_k: Float[Array, "P K S H"],
    prompt_v: Float[Array, "P K S H"],
    prompt_index: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    lengths: Int[Array, " B"],
    scale: float,
) -> Float[Array, "B N H"]:
    """`softmax(scale · q [prompt_k; k]ᵀ) [prompt_v; v]` over the slots that are filled; scores and sums in fp32.

    The weights `exp(score - max)` are rounded to q's dtype before they multiply v and stay fp32 in the denominator, as
    the kernel has it. Slots past the lengths are masked on both sides, so that nothing in them matters, NaN included.
    """
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    parts = [
        (prompt_k[prompt_index], prompt_v[prompt_index], _filled(prompt_lengths, prompt_k)),
        (k, v, _filled(lengths, k)),
    ]
    scores = [
        jnp.where(filled[:, None, None], scale * _einsum("bkgh,bksh->bkgs", grouped, keys), -jnp.inf)
        for keys, _, filled in parts
    ]
    top = jnp.maximum(*(part.max(axis=-1, keepdims=True) for part in scores))
    top = jnp.where(top == -jnp.inf, 0.0, top)  # an idle sequence has nothing to attend to: its weights are all 0
    weights = [jnp.exp(part - top) for part in scores]
    out = sum(
        _einsum("bkgs,bksh->bkgh", part.astype(q.dtype), jnp.where(filled[:, None, :, None], values, 0))
        for part, (_, values, filled) in zip(weights, parts, strict=True)
    )
    total = sum(part.sum(axis=-1, keepdims=True) for part in weights)
    return (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype).reshape(q.shape)


def _filled(lengths: Int[Array, " B"], cache: Float[Array, "R K S H"]) -> Bool[Array, "B S"]:
    return jnp.arange(cache.shape[2]) < lengths[:, None]


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """Accumulated in fp32; fp32 operands multiply in fp32, where a GPU's default would be tf32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32, precision=precision)
