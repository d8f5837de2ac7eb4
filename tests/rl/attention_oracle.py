"""Attention of packed sequences one by one: prompt and completion side by side, autodiff through plain attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.attention import masked_attention
from qerl_jax.rl.packing import Assignment, Packed


def each_sequence(q, k, v, d_out, assignment: Assignment, packed: Packed) -> list[np.ndarray]:
    """(out, d q, d k, d v) over the packed tokens in fp32, zero where no sequence is; the gradients of a prompt are the
    sums of those in its sequences, of which the first alone has `d_out` there.
    """
    out, *gradients = (np.zeros(x.shape, np.float32) for x in (q, q, k, v))
    starts, lengths = np.asarray(packed.starts), np.asarray(packed.lengths)
    seen = set()
    for s, (row, prefix) in enumerate(zip(*assignment, strict=True)):
        suffix = packed.prefixes + s
        if row < 0:
            continue
        before = starts[prefix] + np.arange(lengths[prefix])
        own = np.concatenate([before, starts[suffix] + np.arange(lengths[suffix])])
        cotangent = np.array(d_out[own], np.float32)
        if prefix in seen:
            cotangent[: len(before)] = 0
        seen.add(prefix)
        order = jnp.arange(len(own))

        def alone(q, k, v, mask=(order[:, None] >= order)[None]):
            return masked_attention(q[None], k[None], v[None], mask)[0]

        value, pullback = jax.vjp(alone, q[own], k[own], v[own])
        out[own] = np.float32(value)
        for into, found in zip(gradients, pullback(jnp.asarray(cotangent, q.dtype)), strict=True):
            into[own] += np.float32(found)
    return [out, *gradients]
