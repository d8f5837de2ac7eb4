"""The programs of an update, known before the first rollout, so that they can be compiled while nothing waits for them.

A program compiled here is the one that `grpo_step` runs: it is found in the cache of its `jax.jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qerl_jax.compilation import Program, compile_programs
from qerl_jax.config import Config
from qerl_jax.rl import head, layer, optimizer, step
from qerl_jax.rl.activations import Keeps
from qerl_jax.rl.loss import TokenLoss
from qerl_jax.rl.packing import Assignment, Packed
from qerl_jax.rl.state import AdamW, at_layer, from_layers, outside_layers
from qerl_jax.types import Batch, TrainState


class _Call(NamedTuple):
    """A call of a jitted function; arrays may be abstract."""

    name: str
    function: Any
    static: tuple
    arguments: tuple

    def program(self) -> Program:
        return Program(self.name, self.function, (*self.static, *self.arguments))

    def outputs(self) -> Any:
        """Abstract results, committed to a device where an argument is."""
        abstract = jax.eval_shape(lambda *arguments: self.function(*self.static, *arguments), *self.arguments)
        arguments = jax.tree.leaves(self.arguments)
        shardings = [leaf.sharding for leaf in arguments if _is_committed(leaf)][:1]
        for sharding in shardings:
            abstract = jax.tree.map(functools.partial(_placed, sharding=sharding), abstract)
        return abstract


def _is_committed(leaf: Any) -> bool:
    return getattr(leaf, "committed", getattr(leaf, "sharding", None) is not None)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_batch(config: Config, width: int | None = None) -> Batch:
    """The shape of a step's batch, with sequences of `width` tokens (None: the limits' sum)."""
    rows = config.batch_size
    width = config.max_prompt_length + config.max_completion_length if width is None else width

    def batch() -> Batch:
        flat, tokens = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, width), jnp.int32)
        floats = tokens.astype(jnp.float32)
        return Batch(tokens, floats, flat, flat, flat.astype(jnp.int8), flat, floats[:, 0], tokens > 0)

    return jax.eval_shape(batch)


def update_programs(
    state: TrainState, frozen: Any, batch: Batch, token_loss: TokenLoss | None = None, with_reference: bool = False
) -> list[Program]:
    """Every program of `grpo_step` on such arguments, abstract or not; the largest ones first."""
    return [call.program() for call in _calls(state, frozen, batch, token_loss, with_reference)]


def kept_bytes_of_a_layer(state: TrainState, frozen: Any, batch: Batch) -> int:
    """Bytes that a layer keeps for its backward pass, besides its input."""
    keep = next(call for call in _calls(state, frozen, batch) if call.function is layer.forward_and_keep)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(keep.outputs()[1]))


def _calls(
    state: TrainState, frozen: Any, batch: Batch, token_loss: TokenLoss | None = None, with_reference: bool = False
) -> Iterator[_Call]:
    config: Config = state.config
    state, work = step.work_of(state, frozen, batch, token_loss, with_reference)
    frozen, batch, plan, shape = work.frozen, work.batch, work.plan, work.shape
    weights = frozen if state.weights is None else state.weights
    own, trained = frozen["layers"][0], step.layers_of(state.lora, state.norms, state.weights)[0]
    zeros = _Call("zeros", optimizer.zeros_like, (), ({name: trained[name] for name in step.trained_names(state)},))
    completions = _Call("completions", head.completions_of, (config.loss_type, config.max_completion_length), (batch,))
    rows = jax.ShapeDtypeStruct((plan.pack.suffixes,), jnp.int32)
    embed = _Call("embed", head.embed, (shape,), (weights["embed_tokens"], batch, Assignment(rows, rows)))
    x, packed = embed.outputs()
    found, gradient = completions.outputs(), zeros.outputs()
    yield from _layer_calls(work, own, trained, gradient, x, packed)
    none = _Call("no logprobs", step.no_logprobs, (), (found,))
    logprobs = none.outputs()
    reference = logprobs if work.needs_reference else None
    sums = _Call("no sums", head.no_sums, (work.loss,), (found, reference))
    has_old = jax.ShapeDtypeStruct((), jnp.bool_)
    outside = None if state.weights is None else outside_layers(state.weights)
    loss = _Call(
        "head",
        head.head_loss,
        (work.head_shape, work.loss),
        (step.head_of(weights), x, packed, found, logprobs, has_old, reference, sums.outputs(), logprobs, outside),
    )
    yield loss
    if reference is not None:
        arguments = step.head_of(frozen), x, packed, found, logprobs
        yield _Call("head of the reference", head.head_logprobs, (work.head_shape,), arguments)
        yield _Call("reference", step.without_adapters, (), (state.lora,))
        if outside is not None:  # it reads the frozen weights, the policy the trained ones
            without = _Call("embed", head.embed, (shape,), (frozen["embed_tokens"], batch, Assignment(rows, rows)))
            frozen_layer = step.layers_of(state.lora, state.norms)[0]
            yield without
            for of_kind in map(work.layer_shape, plan.pack.kinds()):
                yield _Call("layer of the reference", layer.forward, (of_kind,), (own, frozen_layer, x, packed))
    yield from (embed, completions, zeros, none, sums)
    if outside is not None:
        yield _Call("embed backward", head.embed_backward, (), (outside, x, batch, packed))
        yield _Call("zeros outside of layers", optimizer.zeros_like, (), (outside,))
    yield from _optimizer_programs(state, gradient, outside, loss.outputs()[1])


def _layer_calls(work: step.Work, own: Any, trained: Any, gradient: Any, x: Any, packed: Packed) -> Iterator[_Call]:
    """Those of the layers, for each kind of micro-batch."""
    keeps, kinds = set(work.keeps), work.plan.pack.kinds()
    for kind in kinds:
        shape = work.layer_shape(kind)
        of = f", segments of {kind.longest_segment} tokens" if len(kinds) > 1 else ""
        forward = (shape,), (own, trained, x, packed)
        keep = _Call("layer forward" + of, layer.forward_and_keep, *forward)
        x_after, kept = keep.outputs()
        what = {}
        if Keeps.ALL in keeps:
            what["layer backward"] = kept
        if Keeps.ALL_BUT_GATE_UP in keeps:
            without = jax.tree.map(lambda leaf, gate_up=kept.gate_up: None if leaf is gate_up else leaf, kept)
            what["layer backward, gate and up recomputed"] = without
        if Keeps.INPUT in keeps:
            what["layer recomputed and backward"] = None
        for name, some in what.items():
            arguments = own, trained, gradient, x, some, x_after, packed
            yield _Call(name + of, layer.backward, (shape,), arguments)
        if keeps != {Keeps.INPUT}:
            yield keep
        if Keeps.INPUT in keeps or work.needs_reference:
            yield _Call("layer forward, nothing kept" + of, layer.forward, *forward)


def _optimizer_programs(state: TrainState, gradient: Any, outside: Any, sums: Any) -> Iterator[_Call]:
    parts = [optimizer.as_tree(gradient)]
    parts += [] if outside is None else [optimizer.as_outside_tree(outside)]
    zero = _Call("zero", optimizer.zeros_like, (), (sums["loss"],))
    squares = [_Call("squares", optimizer.add_squares, (), (part, zero.outputs())) for part in parts]
    finish = _Call("metrics", optimizer.finish, (state.config.max_grad_norm,), (sums, squares[0].outputs()))
    metrics, factor, finite = finish.outputs()
    whole = optimizer.whole_of(state)
    if isinstance(state.optimizer, AdamW):
        before = [at_layer(whole, 0), outside_layers(whole)]
    else:
        before, parts = [whole], [from_layers([parts[0]] * state.model.num_layers + parts[1:])]
    for old, part in zip(before, parts, strict=False):
        arguments = old, part, factor, finite
        yield _Call("optimizer's check", optimizer.stays_finite, (state.optimizer,), arguments)
        yield _Call("optimizer", optimizer.apply, (state.optimizer,), arguments)
    skipped = _Call("skipped", optimizer.skipped, (), (finite,))
    metrics = metrics | {"skipped": skipped.outputs()}
    yield from (zero, *squares, finish, skipped)
    yield _Call("metrics of all updates", step.next_count, (), (state.step, [metrics] * state.config.num_iterations))


def compile_update(
    state: TrainState,
    frozen: Any,
    batch: Batch,
    threads: int | None = None,
    done: Callable[[str, int], None] | None = None,
    token_loss: TokenLoss | None = None,
    with_reference: bool = False,
) -> int:
    """Compile every program of `grpo_step` on such arguments, several at a time (`compilation.compile_programs`).

    Args:
      state, frozen: as they will be given, or abstract.
      batch: likewise (`abstract_batch`).
      threads: programs compiled at one time.
      done: called after each with its name and how many are done.
      token_loss, with_reference: as `grpo_step` will get them.

    Returns:
      The number of programs.
    """
    return compile_programs(update_programs(state, frozen, batch, token_loss, with_reference), threads, done)
