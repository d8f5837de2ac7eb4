"""Token log-probabilities and entropy without ever holding the logits of a whole batch.

Axes: B sequences, T tokens, C tokens at once, D model, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int
from qerl_kernels.ops import fp32_matmul

from qerl_jax import partition
from qerl_jax.models.distribution import logits_of_targets, normalizer_and_entropy
from qerl_jax.models.qwen2 import Qwen2, merge_model
from qerl_jax.types import Distribution, Policy, Sampling

CHUNK = 1024


@jax.jit
def policy_logits(
    policy: Policy, tokens: Int[Array, "B T"], attention_mask: Bool[Array, "B T"] | None = None
) -> Float32[Array, "B T V"]:
    """All fp32 logits at once, for tests and small research models. Padding may stand on either side."""

    def logits(model: Qwen2, tokens: Array, mask: Array) -> Array:
        return model.logits(model(tokens, mask))

    return _with_model(logits, policy, tokens, attention_mask)


@jax.jit
def hidden_states(
    policy: Policy, tokens: Int[Array, "B T"], attention_mask: Bool[Array, "B T"] | None = None
) -> Float32[Array, "L1 B T D"]:
    """The residual stream in front of each layer and behind the last one, before the final norm: L + 1 states, entry 0
    the embedding. transformers' `output_hidden_states`, but that its last entry is normalized.

    Args:
      policy: its norms and adapters as they are.
      tokens: ids, padded on either side.
      attention_mask: True on real tokens; None: all.
    """

    def states(model: Qwen2, tokens: Array, mask: Array) -> Array:
        return jnp.stack(model.residuals(tokens, mask))

    return _with_model(states, policy, tokens, attention_mask)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def token_logprobs(
    policy: Policy,
    tokens: Int[Array, "B T"],
    attention_mask: Bool[Array, "B T"] | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Float32[Array, "B T-1"]:
    """`log p(token[t+1] | token[≤ t])` of every position under the policy at a temperature, in nats; meaningless where
    either token is padding.

    Args:
      policy: rolled out or trained.
      tokens: sequences, padded on either side.
      attention_mask: True on real tokens; None: all.
      temperature: divides the logits.
      chunk: tokens whose logits exist at one time.

    Raises ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")

    def logprobs(model: Qwen2, tokens: Array, mask: Array) -> Array:
        hidden, distribution = model(tokens, mask)[:, :-1], Sampling(1, temperature).distribution

        @jax.checkpoint
        def one(place: tuple[Array, Array]) -> Array:
            hidden, target = (array[None] for array in place)
            scaled = logits_of_targets(fp32_matmul(hidden, model.head.T), target, distribution)
            return scaled[0, target[0]] - jax.nn.logsumexp(scaled)

        places = hidden.reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)
        return jax.lax.map(one, places, batch_size=chunk).reshape(hidden.shape[:2])

    return _with_model(logprobs, policy, tokens, attention_mask)


def _with_model(
    function: Callable[[Qwen2, Array, Array], Array], policy: Policy, tokens: Array, mask: Array | None
) -> Array:
    """`function(model, tokens, mask)`, on all devices over which the layers are divided."""
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)

    def run(policy: Policy, tokens: Array, mask: Array) -> Array:
        return function(merge_model(policy), tokens, mask)

    arguments = policy, jnp.asarray(tokens), mask
    return partition.on_devices(policy.config.tensor_parallel, run, *arguments, results=PartitionSpec())


def logprobs_entropy_and_gradients(
    head: Float[Array, "V D"],
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
    count: Int[Array, ""],
    distribution: Distribution,
    chunk: int = CHUNK,
    of: tuple[str, ...] = ("logprobs",),
) -> tuple[Float32[Array, " T"], Float32[Array, " T"], dict[str, Float32[Array, "T D"]]]:
    """Log-probability of each target, entropy, and the gradients of either to the token's own hidden state.

    With the scaled logits z = logits / temperature and p = softmax(z),

      d logp / d z    = onehot(target) − p
      d entropy / d z = −p · (log p + entropy)

    and `d z / d hidden = head / temperature`. So any loss of both has the gradient `∂loss/∂logp · d logp / d hidden +
    ∂loss/∂entropy · d entropy / d hidden`: one pass over the vocabulary before the loss is known, with one GEMM for the
    logits and one for each gradient asked for. Holds the logits of `chunk` tokens at a time.

    Args:
      head: output embedding.
      hidden: after the final norm; the first `count` rows are read.
      targets: token that follows each.
      count: rows that count; the results of the others are 0.
      distribution: temperature and truncation; where it truncates, it is renormalized over the tokens that this model
        keeps and the target, which the sampler kept: with equal logits that is the set sampled from. The kept set has
        no gradient.
      chunk: tokens whose logits exist at one time.
      of: gradients to compute, of "logprobs" and "entropy".
    """
    total, width = hidden.shape
    chunk = min(chunk, total)
    padding = -total % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding))

    def one(i: Array, carry: dict[str, Array]) -> dict[str, Array]:
        start = i * chunk
        states = jax.lax.dynamic_slice_in_dim(hidden, start, chunk)
        wanted = jax.lax.dynamic_slice_in_dim(targets, start, chunk)
        scaled = logits_of_targets(fp32_matmul(states, head.T), wanted, distribution)
        normalizer, entropy, _ = normalizer_and_entropy(scaled)
        drawn = jnp.take_along_axis(scaled, wanted[:, None], axis=-1)[:, 0]
        found = {"logprobs": drawn - normalizer, "entropy": entropy}
        logprobs, is_target = scaled - normalizer[:, None], jnp.arange(head.shape[0]) == wanted[:, None]
        for name in of:
            d_logits = (_d_scaled(name, logprobs, is_target, entropy) / distribution.temperature).astype(hidden.dtype)
            found[f"d_{name}"] = fp32_matmul(d_logits, head)
        within = (start + jnp.arange(chunk) < count)[:, None]
        return {
            name: jax.lax.dynamic_update_slice_in_dim(
                into, jnp.where(within if into.ndim == 2 else within[:, 0], found[name], 0), start, 0
            )
            for name, into in carry.items()
        }

    rows = total + padding
    empty = {name: jnp.zeros(rows) for name in ("logprobs", "entropy")}
    empty |= {f"d_{name}": jnp.zeros((rows, width)) for name in of}
    found = jax.lax.fori_loop(0, (count + chunk - 1) // chunk, one, empty)
    return found["logprobs"][:total], found["entropy"][:total], {name: found[f"d_{name}"][:total] for name in of}


def _d_scaled(
    name: str, logprobs: Float32[Array, "C V"], is_target: Bool[Array, "C V"], entropy: Float32[Array, " C"]
) -> Float32[Array, "C V"]:
    """Gradient of "logprobs" or "entropy" to the scaled logits, as in `logprobs_entropy_and_gradients`."""
    if name == "logprobs":
        return is_target - jnp.exp(logprobs)
    return -jnp.exp(logprobs) * jnp.where(jnp.isfinite(logprobs), logprobs + entropy[:, None], 0)
