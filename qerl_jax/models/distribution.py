"""The distribution over the next token: temperature, top-k, top-p, min-p, a draw from it, and its log-probabilities.
Rollout and update read it from here, inside jit and without sorting the vocabulary.

Axes: B sequences, C tokens, V vocab, N blocks of neighbouring tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32
from qerl_kernels.batch_invariant import ordered

from qerl_jax.types import Distribution

_BLOCK = 512  # tokens of the vocabulary drawn from together, at most; a power of two that divides its size
_SMALLEST_BLOCK = 4  # else the vocabulary is one block
_DIGIT = 3  # bits of the threshold found in one pass over the vocabulary


def sampled_logits(logits: Float32[Array, "... V"], distribution: Distribution) -> Float32[Array, "... V"]:
    """Logits of the sampled distribution: divided by the temperature, −inf for dropped tokens.

    top-k, then top-p over the remaining tokens, then min-p; each is a threshold on the logit, so that tokens tied with
    the last kept one stay. Greedy, the logits are not scaled and only the most likely token stays.
    """
    if distribution.temperature is None:
        return jnp.where(jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1, keepdims=True), logits, -jnp.inf)
    logits = logits / distribution.temperature
    if 0 < distribution.top_k < logits.shape[-1]:
        order = _sortable(logits)
        threshold = _threshold(order, lambda kept: jnp.sum(kept, axis=-1), distribution.top_k, bits=32)
        logits = jnp.where(order >= threshold[..., None], logits, -jnp.inf)
    if distribution.top_p < 1:
        p = jax.nn.softmax(logits, axis=-1)
        order = jax.lax.bitcast_convert_type(p, jnp.uint32)  # bits of floats in [0, 1] order alike, the first two are 0
        threshold = _threshold(order, lambda kept: jnp.sum(jnp.where(kept, p, 0), axis=-1), distribution.top_p, bits=30)
        logits = jnp.where(order >= threshold[..., None], logits, -jnp.inf)
    if distribution.min_p > 0:
        lowest = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(distribution.min_p)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    return logits


def _threshold(
    order: UInt32[Array, "... V"], measure: Callable[[Bool[Array, "... V"]], Array], target: float, bits: int
) -> UInt32[Array, ...]:
    """The largest threshold at or above which the tokens' measure (count or probability) reaches `target`; 0 where it
    never does, so that all tokens stay.

    Radix search instead of a sort: the threshold is found digit by digit, highest first. The measures of the seven
    values of a digit are sums of their own, which XLA takes in one pass over the vocabulary; as one sum with an axis of
    candidates it read the vocabulary once for each of them.

    Args:
      order: integers below 2^bits that order as the tokens do.
    """
    threshold = jnp.zeros(order.shape[:-1], jnp.uint32)
    for shift in range((bits - 1) // _DIGIT * _DIGIT, -1, -_DIGIT):
        digit = jnp.zeros_like(threshold)
        for value in range(1, 1 << min(_DIGIT, bits - shift)):
            candidate = threshold + jnp.uint32(value << shift)
            digit += measure(order >= candidate[..., None]) >= target  # the measure falls along the values
        threshold += digit << shift
    return threshold


def _sortable(values: Float32[Array, "... V"]) -> UInt32[Array, "... V"]:
    """Unsigned integers that order like the floats (−0 below +0; NaN at the ends)."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def sample(
    logits: Float32[Array, "B V"], distribution: Distribution, keys: Array, batch_invariant: bool = False
) -> tuple[Int32[Array, " B"], Float32[Array, " B"], Float32[Array, " B"]]:
    """Sample one token a row, with its log-probability under the sampled distribution and the entropy of the policy,
    in nats (both 0 for greedy decoding). The log-probability is not finite where the row's largest logit is not.

    Args:
      logits: logits of the model.
      distribution: temperature and truncation.
      keys: one random key for each row, so that the sample of a row does not depend on its neighbours.
      batch_invariant: fix the summation order; the rows are then one block (`in_blocks`).
    """
    if distribution.temperature is None:
        tokens = jnp.argmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return tokens.astype(jnp.int32), jnp.where(jnp.isfinite(chosen), 0, jnp.nan), jnp.zeros_like(chosen)
    logits = jax.lax.optimization_barrier(logits)  # `logits_of_targets` says why
    kept = sampled_logits(logits, distribution)
    total, entropy, masses = normalizer_and_entropy(logits / distribution.temperature)
    if distribution.truncates:
        total, _, masses = normalizer_and_entropy(kept)
    if batch_invariant:  # XLA may fuse the draw with these sums or with the maximum
        kept, total, entropy, masses, keys = ordered(kept, total, entropy, masses, keys)
    tokens = _draw(kept, masses, keys)
    chosen = jnp.take_along_axis(kept, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - total, entropy


def _draw(logits: Float32[Array, "B V"], masses: Float32[Array, "B N"], keys: Array) -> Int32[Array, " B"]:
    """A token of each row's softmax: a block of neighbouring tokens by its probability, then a token of that block.
    Over 151,936 tokens that takes 1,315 random numbers; one for each token took a tenth of a decode step.
    """
    draw, (count, number) = jax.vmap(jax.random.categorical), masses.shape
    if number == 1:
        return draw(keys, logits)
    blocks, halves = logits.reshape(count, number, -1), jax.vmap(jax.random.split)(keys)
    block = draw(halves[:, 0], jnp.log(masses))
    tokens = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * blocks.shape[-1] + draw(halves[:, 1], tokens)


def normalizer_and_entropy(
    logits: Float32[Array, "B V"],
) -> tuple[Float32[Array, " B"], Float32[Array, " B"], Float32[Array, "B N"]]:
    """`log Z = log Σ exp(z)` and the entropy `H = log Z − Σ z exp(z) / Z` of the softmax of each row, in nats, and the
    probability of each block of neighbouring tokens, not normalized.

    With `c = z − max z`: `H = log Σ exp(c) − Σ c exp(c) / Σ exp(c)`. The barrier keeps XLA from making one sum over the
    row of the sums over blocks and over their results, which would take another pass over the vocabulary.
    """
    count, vocab = logits.shape
    size = math.gcd(vocab, _BLOCK)
    size = size if size >= _SMALLEST_BLOCK else vocab
    largest = jnp.max(logits, axis=-1)
    centred = (logits - largest[:, None]).reshape(count, -1, size)
    weights = jnp.exp(centred)
    moments = jnp.where(weights > 0, weights * centred, 0)
    masses, moments = ordered(jnp.sum(weights, axis=-1), jnp.sum(moments, axis=-1))
    mass = jnp.sum(masses, axis=-1)
    return jnp.log(mass) + largest, jnp.log(mass) - jnp.sum(moments, axis=-1) / mass, masses


def logits_of_targets(
    logits: Float32[Array, "C V"], targets: Int32[Array, " C"], distribution: Distribution
) -> Float32[Array, "C V"]:
    """Logits of the distribution from which the targets were sampled: over the temperature, −inf where it truncates.

    The targets are always kept, because the sampler kept them: with equal logits the kept set is the set sampled from.
    The kept set has no gradient.

    The division is not fused with the product that makes the logits: behind cuBLAS's kernels, which are the fastest for
    many rows, XLA would run it as a pass over the logits of its own. It is fused into each consumer instead.
    """
    logits = jax.lax.optimization_barrier(logits)
    if not distribution.truncates:
        return logits / distribution.temperature
    kept = jnp.isfinite(sampled_logits(jax.lax.stop_gradient(logits), distribution))
    kept |= jnp.arange(logits.shape[-1]) == targets[:, None]
    return jnp.where(kept, logits / distribution.temperature, -jnp.inf)
