"""Attention of packed sequences as one dense attention: its mask lets each token see what its sequences say."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.attention import masked_attention
from qerl_jax.rl.micro_batches import Assignment, Packed


def visible(assignment: Assignment, packed: Packed) -> np.ndarray:
    """bool[T, T]: a token sees itself and what comes before it in its sequence, prompt and then completion."""
    starts, lengths = np.asarray(packed.starts), np.asarray(packed.lengths)
    mask = np.zeros((packed.real.shape[0],) * 2, bool)
    for s, (row, prefix) in enumerate(zip(*assignment, strict=True)):
        if row < 0:
            continue
        suffix = packed.prefixes + s
        parts = [starts[part] + np.arange(lengths[part]) for part in (prefix, suffix)]
        own = np.concatenate(parts)
        for i, token in enumerate(own):
            mask[token, own[: i + 1]] = True
    return mask


@jax.jit
def dense(q, k, v, d_out, mask) -> list[jax.Array]:
    """(out, d q, d k, d v) in fp32, zero where a token sees nothing."""
    real = mask.any(axis=1)[:, None, None]
    q, k, v, d_out = (jnp.where(real, x, 0) for x in (q, k, v, d_out))
    out, pullback = jax.vjp(lambda q, k, v: masked_attention(q[None], k[None], v[None], mask[None])[0], q, k, v)
    return [jnp.where(real, x, 0).astype(jnp.float32) for x in (out, *pullback(d_out))]
