"""From logits to a token and its exact behaviour log-probability, inside jit.

Axes: B sequences, V vocab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from qerl_jax.types import Sampling


def sampled_logits(logits: Float32[Array, "... V"], sampling: Sampling) -> Float32[Array, "... V"]:
    """Logits of the distribution that is sampled: divided by the temperature, dropped tokens at −inf.

    top-k, then top-p over what is left, then min-p, each as a threshold on the logit, so that tokens tied with the
    last kept one stay. At temperature 0 the logits pass unchanged and only the likeliest token remains.
    """
    if sampling.temperature == 0:
        return jnp.where(jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1, keepdims=True), logits, -jnp.inf)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = _keep_from(logits, jax.lax.top_k(logits, sampling.top_k)[0][..., -1:])
    if sampling.top_p < 1:
        logits = _keep_from(logits, _nucleus_threshold(logits, sampling.top_p))
    if sampling.min_p > 0:
        logits = _keep_from(logits, jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p))
    return logits


def _keep_from(logits: Float32[Array, "... V"], threshold: Float32[Array, "... 1"]) -> Float32[Array, "... V"]:
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _nucleus_threshold(logits: Float32[Array, "... V"], top_p: float) -> Float32[Array, "... 1"]:
    """Logit of the last token in the smallest set whose probability reaches top_p."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    return jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)


def sample(
    logits: Float32[Array, "B V"], sampling: Sampling, keys: Array
) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """Draw one token a row, and its log-probability under the distribution drawn from (0 for greedy).

    Args:
      logits: of the model.
      sampling: temperature and truncation.
      keys: one for each row, so that a row's draw does not depend on its neighbours.
    """
    kept = sampled_logits(logits, sampling)
    if sampling.temperature == 0:
        tokens = jnp.argmax(kept, axis=-1)
        return tokens.astype(jnp.int32), jnp.zeros(tokens.shape, jnp.float32)
    tokens = jax.vmap(jax.random.categorical)(keys, kept)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(kept, axis=-1), tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), logprobs
