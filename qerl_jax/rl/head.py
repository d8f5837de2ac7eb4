"""The two ends of a micro-batch: the embedding, and the head with loss, metrics and the gradient of the last layer's
output.

Axes: B sequences of the batch, in their bucket, S sequences of the micro-batch, T its tokens, C completion tokens
(column c is the token at prompt length + c), D model, V vocab.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from qerl_jax.buckets import bucket_of_columns, bucket_of_rows
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.modules import final_norm
from qerl_jax.programs import program
from qerl_jax.rl.logprobs import logprobs_entropy_and_gradients
from qerl_jax.rl.loss import LossSettings, token_losses, token_weights
from qerl_jax.rl.metrics import Sums, add_sums, empty_sums, token_sums
from qerl_jax.rl.micro_batches import Assignment, Packed, last_of_prompts, pack, packed_tokens, predictors
from qerl_jax.types import Batch, Distribution

Sequences = dict[str, Array]
"""A batch's sequences: i32[B, L] `tokens`; i32[B] `lengths`, of prompt and completion, and `prompt_lengths`."""

LossInputs = dict[str, Array]
"""The head's view of a batch: [B, C] `targets` i32, `mask` bool, `behaviour`, `weights` f32; `advantages` f32[B]."""


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """What the head's programs are compiled for. Hashable: static under jit.

    Attributes:
      model: shape of the model.
      dtype: compute dtype, by name.
      chunk: tokens whose logits exist at one time.
    """

    model: ModelConfig
    dtype: str
    chunk: int


@program(static_argnames=("loss_type", "limit", "room"))
def inputs_of(loss_type: str, limit: int, room: tuple[int, int], batch: Batch) -> tuple[Sequences, LossInputs]:
    """What the passes read of a batch, token arrays of the loss starting where each completion starts: prompts have no
    loss. All is as large as the bucket of the batch; a row or column beyond the batch has length, mask and weight 0.

    Args:
      loss_type: how tokens are averaged, static.
      limit: `max_completion_length`, static.
      room: tokens of a prompt and of a completion, at least; their buckets are. Static.
      batch: the whole batch.
    """
    rows, width = batch.tokens.shape
    most = [bucket_of_columns(tokens) for tokens in room]
    columns = batch.prompt_lengths[:, None] + jnp.arange(min(limit, width - 1))
    inside = columns < width
    columns = jnp.where(inside, columns, 0)

    def take(array: Array) -> Array:
        return jnp.take_along_axis(array, columns, axis=1)

    def padded(array: Array, columns: int = 0) -> Array:
        more = [(0, bucket_of_rows(rows) - rows), *((0, max(0, columns - n)) for n in array.shape[1:])]
        return jnp.pad(array, more)

    mask = take(batch.loss_mask) & inside
    of_tokens = {
        "targets": take(batch.tokens),
        "mask": mask,
        "behaviour": take(batch.logprobs),
        "weights": token_weights(mask, loss_type, limit),
    }
    sequences = {
        "tokens": padded(batch.tokens, sum(most)),
        "lengths": padded(batch.lengths),
        "prompt_lengths": padded(batch.prompt_lengths),
    }
    completions = {name: padded(array, most[1]) for name, array in of_tokens.items()}
    return sequences, completions | {"advantages": padded(batch.advantages)}


@program(static_argnames=("tokens", "prefixes"))
def embed(
    tokens: int,
    prefixes: int,
    embedding: Float[Array, "V D"],
    sequences: Sequences,
    assignment: Assignment,
) -> tuple[Float32[Array, "T D"], Packed]:
    """The residual stream before the first layer, and the layout, of the sequences of a micro-batch with room for so
    many tokens and prefixes.
    """
    packed = pack(assignment, sequences["lengths"], sequences["prompt_lengths"], tokens, prefixes)
    return embedding[packed_tokens(sequences["tokens"], packed)].astype(jnp.float32), packed


@program(static_argnames="loss")
def no_sums(loss: LossSettings, completions: LossInputs, reference: Float32[Array, "B C"] | None) -> Sums:
    """Sums over no token, of every metric that `head_loss` adds to, and the batch's tokens in the loss."""
    zeros = jnp.zeros_like(completions["weights"])

    def some() -> Sums:
        mask = completions["mask"]
        arrays = zeros, zeros, zeros, None if reference is None else zeros
        _, values = token_losses(*arrays, completions["advantages"], mask, loss, zeros)
        return token_sums(zeros[0, 0], mask, zeros, values)

    return empty_sums(jax.eval_shape(some)) | {"tokens": jnp.sum(completions["mask"], dtype=jnp.float32)}


@program(static_argnames="shape", donate_argnames="into")
def head_logprobs(
    shape: HeadShape,
    distribution: Distribution,
    frozen: Any,
    x: Float32[Array, "T D"],
    packed: Packed,
    completions: LossInputs,
    into: Float32[Array, "B C"],
) -> Float32[Array, "B C"]:
    """Log-probabilities of a micro-batch's completions, written into those of the batch. No gradient.

    Args:
      shape: static.
      distribution: the one sampled from.
      frozen: "norm" and "head".
      x: the residual stream after the last layer.
      packed: the micro-batch.
      completions: the batch's completions.
      into: donated.
    """
    mask = _own(completions["mask"], packed, False)
    logprobs, _, _ = _head(shape, distribution, frozen, x, packed, completions, mask, ())
    return into.at[packed.rows].set(logprobs, mode="drop")


@program(static_argnames=("shape", "loss"), donate_argnames=("sums", "into"))
def head_loss(
    shape: HeadShape,
    loss: LossSettings,
    distribution: Distribution,
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
      shape, loss: static.
      distribution: the one sampled from.
      frozen: "norm", the final norm's weight, and "head", the output embedding.
      x: the residual stream after the last layer.
      packed: the micro-batch.
      completions: the batch's completions.
      old: log-probabilities of the clean policy before the first update (`old_logp`), read where `has_old`; else the
        policy's own, without gradient.
      has_old: whether `old` is there.
      reference: those of the model's checkpoint, where the loss needs them.
      sums: metrics so far. Donated.
      into: log-probabilities so far. Donated.

    Returns:
      The gradient of x; the sums and the log-probabilities with this micro-batch's.
    """
    mask = _own(completions["mask"], packed, False)
    of = ("logprobs", "entropy") if loss.uses_entropy else ("logprobs",)
    logprobs, entropy, pullback = _head(shape, distribution, frozen, x, packed, completions, mask, of)
    behaviour, weights, old, reference = (
        None if array is None else _own(array, packed, 0)
        for array in (completions["behaviour"], completions["weights"], old, reference)
    )
    advantages = _own(completions["advantages"], packed, 0)

    def loss_of(values: dict[str, Array]) -> tuple[Array, Sums]:
        logp = values["logprobs"]
        before = jnp.where(has_old, old, jax.lax.stop_gradient(logp))
        arrays = logp, before, behaviour, reference, advantages, mask
        losses, reported = token_losses(*arrays, loss, values.get("entropy"))
        total = jnp.sum(jnp.where(mask, weights * losses, 0))
        return total, token_sums(total, mask, entropy, reported)

    values = {"logprobs": logprobs, "entropy": entropy}
    d_values, own = jax.grad(loss_of, has_aux=True)({name: values[name] for name in of})
    into = into.at[packed.rows].set(logprobs, mode="drop")
    return pullback(d_values), add_sums(sums, own), into


def _to_places(
    d_states: Float32[Array, "T D"],
    wanted: Int32[Array, " T"],
    places: Int32[Array, " T"],
    mask: Bool[Array, "S C"],
    packed: Packed,
) -> Float32[Array, "T D"]:
    """Gradients of the predicting tokens in the tokens' places. The last token of a prompt predicts the first of all
    its completions; those are summed in an order of their own, because a scatter's on a GPU is arbitrary.
    """
    total = places.shape[0]
    is_first = wanted % mask.shape[1] == 0
    d_hidden = jnp.zeros_like(d_states).at[jnp.where(is_first, total, places)].set(d_states, mode="drop")
    counts = mask.sum(axis=1)
    firsts = jnp.minimum(jnp.cumsum(counts) - counts, total - 1)  # a sequence's first token in `wanted`
    own = packed.prefix_of == jnp.arange(packed.prefixes)[:, None]
    d_last = jnp.sum(jnp.where((own & mask[:, 0])[..., None], d_states[firsts], 0), axis=1)
    last = last_of_prompts(packed)
    there = packed.lengths[: packed.prefixes] > 0
    return d_hidden.at[jnp.where(there, last, total)].add(d_last, mode="drop")


def _own(array: Array, packed: Packed, empty: Any) -> Array:
    """The rows of a micro-batch's sequences; `empty` for segments without one."""
    return array.at[packed.rows].get(mode="fill", fill_value=empty)


def _head(shape, distribution, frozen, x, packed, completions, mask, of):
    """(log-probabilities [S, C], entropy [S, C], pullback of those named in `of` to x), 0 outside of the mask."""
    width = mask.shape[1]
    total = packed.real.shape[0]
    hidden, norm_pullback = jax.vjp(final_norm(shape.model, frozen["norm"], jnp.dtype(shape.dtype)), x)
    # Only completion tokens go through the head: their places, side by side.
    [wanted] = jnp.nonzero(mask.reshape(-1), size=total, fill_value=mask.size)
    count = mask.sum()
    inside = jnp.minimum(wanted, mask.size - 1)
    places = jnp.where(wanted < mask.size, predictors(packed, width).reshape(-1)[inside], total)
    targets = _own(completions["targets"], packed, 0).reshape(-1)[inside]
    states = hidden.at[places].get(mode="fill", fill_value=0)
    logprobs, entropy, gradients = logprobs_entropy_and_gradients(
        frozen["head"], states, targets, count, distribution, shape.chunk, of
    )

    def spread(values: Array) -> Array:
        return jnp.zeros(mask.size).at[wanted].set(values, mode="drop").reshape(mask.shape)

    def pullback(d_values: dict[str, Float32[Array, "S C"]]) -> Float32[Array, "T D"]:
        within = jnp.arange(total) < count
        own = {name: jnp.where(within, d_values[name].reshape(-1)[inside], 0) for name in of}
        d_states = sum(own[name][:, None] * gradients[name] for name in of)
        [d_x] = norm_pullback(_to_places(d_states, wanted, places, mask, packed).astype(hidden.dtype))
        return d_x

    return spread(logprobs), spread(entropy), pullback
