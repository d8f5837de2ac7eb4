"""The head of the update: loss, metrics and the gradient of the last layer's output, of one micro-batch.

Axes: B sequences of the batch, S segments of the micro-batch, T its tokens, C completion tokens (column c is the token
at prompt length + c), D model, V vocab.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32
from qerl_kernels.ops import rms_norm

from qerl_jax.config import Config
from qerl_jax.rl.layer import LayerShape
from qerl_jax.rl.logprobs import logprobs_entropy_and_gradient
from qerl_jax.rl.loss import token_losses, token_weights
from qerl_jax.rl.metrics import Sums, add_sums, token_sums
from qerl_jax.rl.packing import Packed, pack, packed_tokens, predictors
from qerl_jax.types import Batch

LossInputs = dict[str, Array]
"""The head's view of a batch: [B, C] `targets` i32, `mask` bool, `behaviour`, `weights` f32; `advantages` f32[B]."""


@functools.partial(jax.jit, static_argnames="config")
def completions_of(config: Config, batch: Batch) -> LossInputs:
    """What the loss needs of a batch, token arrays starting where each completion starts: prompts have no loss."""
    width = completion_width(config, batch)
    columns = batch.prompt_lengths[:, None] + jnp.arange(width)
    inside = columns < batch.tokens.shape[1]
    columns = jnp.where(inside, columns, 0)

    def take(array: Array) -> Array:
        return jnp.take_along_axis(array, columns, axis=1)

    mask = take(batch.loss_mask) & inside
    return {
        "targets": take(batch.tokens),
        "mask": mask,
        "behaviour": take(batch.logprobs),
        "weights": token_weights(mask, config.loss_type, config.max_completion_length),
        "advantages": batch.advantages,
    }


def completion_width(config: Config, batch: Batch) -> int:
    """C: most tokens of a completion."""
    return min(config.max_completion_length, batch.tokens.shape[1] - 1)


@functools.partial(jax.jit, static_argnames="shape")
def embed(
    shape: LayerShape, embedding: Float[Array, "V D"], batch: Batch, rows: Int32[Array, " S"]
) -> tuple[Float32[Array, "T D"], Packed]:
    """The residual stream before the first layer, and the layout, of the sequences `rows` (-1: none)."""
    packed = pack(rows, batch.lengths, batch.prompt_lengths, shape.pack)
    return embedding[packed_tokens(batch.tokens, packed)].astype(jnp.float32), packed


@functools.partial(jax.jit, static_argnames=("shape", "config"), donate_argnames="into")
def head_logprobs(
    shape: LayerShape,
    config: Config,
    frozen: Any,
    x: Float32[Array, "T D"],
    packed: Packed,
    completions: LossInputs,
    into: Float32[Array, "B C"],
) -> Float32[Array, "B C"]:
    """Log-probabilities of a micro-batch's completions, written into those of the batch. No gradient.

    Args:
      frozen: "norm" and "head".
      x: the residual stream after the last layer.
      into: donated.
    """
    mask = _own(completions["mask"], packed, False)
    logprobs, _, _ = _head(shape, config, frozen, x, packed, completions, mask)
    return into.at[packed.rows].set(logprobs, mode="drop")


@functools.partial(jax.jit, static_argnames=("shape", "config"), donate_argnames=("sums", "into"))
def head_loss(
    shape: LayerShape,
    config: Config,
    frozen: Any,
    x: Float32[Array, "T D"],
    packed: Packed,
    completions: LossInputs,
    old: Float32[Array, "B C"],
    has_old: Bool[Array, ""],
    reference: Float32[Array, "B C"] | None,
    sums: Sums,
    into: Float32[Array, "B C"],
) -> tuple[Float32[Array, "T D"], Sums, Float32[Array, "B C"]]:
    """Loss, metrics and gradient of a micro-batch.

    Args:
      shape, config: static.
      frozen: "norm", the final norm's weight, and "head", the output embedding.
      x: the residual stream after the last layer.
      packed: the micro-batch.
      completions: the batch's completions.
      old: log-probabilities of the clean policy before the first update (`old_logp`), read where `has_old`; else the
        policy's own, without gradient.
      reference: those of the adapter-free policy, where beta > 0.
      sums: metrics so far. Donated.
      into: log-probabilities so far. Donated.

    Returns:
      The gradient of x, the sums and the log-probabilities with this micro-batch's.
    """
    mask = _own(completions["mask"], packed, False)
    logprobs, entropy, pullback = _head(shape, config, frozen, x, packed, completions, mask)
    behaviour, weights, old, reference = (
        None if array is None else _own(array, packed, 0)
        for array in (completions["behaviour"], completions["weights"], old, reference)
    )
    advantages = _own(completions["advantages"], packed, 0)

    def loss_of(logprobs: Array) -> tuple[Array, Sums]:
        before = jnp.where(has_old, old, jax.lax.stop_gradient(logprobs))
        losses, values = token_losses(logprobs, before, behaviour, reference, advantages, mask, config)
        loss = jnp.sum(jnp.where(mask, weights * losses, 0))
        return loss, token_sums(loss, mask, entropy, values)

    d_logprobs, own = jax.grad(loss_of, has_aux=True)(logprobs)
    into = into.at[packed.rows].set(logprobs, mode="drop")
    return pullback(d_logprobs), add_sums(sums, own), into


def _own(array: Array, packed: Packed, empty: Any) -> Array:
    """The rows of a micro-batch's sequences; `empty` for segments without one."""
    rows = array.at[packed.rows].get(mode="fill", fill_value=empty)
    return rows


def _head(shape, config, frozen, x, packed, completions, mask):
    """(log-probabilities [S, C], entropy [S, C], pullback of the log-probabilities to x), 0 outside of the mask."""
    width = mask.shape[1]
    total = packed.real.shape[0]

    def norm(x: Array) -> Array:
        return rms_norm(x, frozen["norm"], shape.model.rms_norm_eps, jnp.dtype(shape.dtype))

    hidden, norm_pullback = jax.vjp(norm, x)
    # Only completion tokens go through the head: their places, side by side.
    [wanted] = jnp.nonzero(mask.reshape(-1), size=total, fill_value=mask.size)
    count = mask.sum()
    inside = jnp.minimum(wanted, mask.size - 1)
    places = jnp.where(wanted < mask.size, predictors(packed, width).reshape(-1)[inside], total)
    targets = _own(completions["targets"], packed, 0).reshape(-1)[inside]
    logprobs, entropy, gradient = logprobs_entropy_and_gradient(
        frozen["head"],
        hidden.at[places].get(mode="fill", fill_value=0),
        targets,
        count,
        config.sampling,
        config.logprob_chunk_size,
    )

    def spread(values: Array) -> Array:
        return jnp.zeros(mask.size).at[wanted].set(values, mode="drop").reshape(mask.shape)

    def pullback(d_logprobs: Float32[Array, "S C"]) -> Float32[Array, "T D"]:
        own = jnp.where(jnp.arange(total) < count, d_logprobs.reshape(-1)[inside], 0)
        d_hidden = (own[:, None] * gradient).astype(hidden.dtype)
        [d_x] = norm_pullback(jnp.zeros_like(hidden).at[places].set(d_hidden, mode="drop"))
        return d_x

    return spread(logprobs), spread(entropy), pullback
