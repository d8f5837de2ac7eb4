"""Every program of a rollout, known before it starts, so that all can be compiled in parallel beforehand.

The programs are those of `engine.generate`: its calls find them in the caches of `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array

from qerl_jax.compilation import Program, as_committed
from qerl_jax.rollout import decode, engine
from qerl_jax.rollout.prefill import prefill_programs
from qerl_jax.rollout.prefill_packing import prefill_shapes
from qerl_jax.rollout.shapes import RolloutShapes, choose_shapes
from qerl_jax.types import Engine, Policy, Prompts, Sampling


def rollout_programs(
    policy: Policy, prompts: int, prompt_length: int, sampling: Sampling, key: Array, engine_config: Engine
) -> Iterator[Program]:
    """The programs of rollouts of one shape, the slowest to compile first.

    Args:
      policy: as for `generate`.
      prompts: prompts of a rollout, P.
      prompt_length: width of the prompts' array, tokens.
      sampling: as for `generate`.
      key: a key of the kind that `generate` gets.
      engine_config: as for `generate`.
    """
    most, group = sampling.max_new_tokens, sampling.num_generations
    shapes = choose_shapes(policy, prompts, group, prompt_length, most, engine_config)
    steps, sequences = engine.chunk_steps(most, engine_config), prompts * group
    bare, batch_invariant = sampling.replace(stop=()), engine_config.batch_invariant
    key = as_committed(key, policy)
    cast = Program("adapters in the compute dtype", decode.cast_lora, (policy,))
    ready = policy.replace(lora=as_committed(jax.eval_shape(decode.cast_lora, policy), policy))
    states = {slots: _states(ready, shapes, slots, sequences, key) for slots in shapes.slot_counts()}
    prompt_cache, all_slots = states[shapes.slots]
    for shape in prefill_shapes(prompts, prompt_length, batch_invariant, shapes.holds(sequences)):
        yield from prefill_programs(ready, prompt_cache, shape, batch_invariant)
    for slots, (_, state) in states.items():
        arguments = ready, prompt_cache, state, bare, steps, batch_invariant
        yield Program(f"decode of {slots} slots", decode.decode_chunk, arguments)
    yield from (cast, _allocation(ready, shapes, sequences, key))
    for slots, (_, state) in states.items():
        if slots == shapes.slots or sampling.stop:  # afterwards no sequence waits, but a stop string may end one
            yield Program(f"admission to {slots} slots", decode.admit, _admission(state, prompt_cache, key))
    for many, few in itertools.pairwise(states):
        kept = jax.ShapeDtypeStruct((few,), jnp.int32)
        for tree in decode.moved(states[many][1]):
            yield Program(f"{many} to {few} slots", decode.gather, (tree, kept))
    yield Program("result", engine.assemble, _result(prompts, prompt_length, all_slots, bare, policy))


def _allocation(policy: Policy, shapes: RolloutShapes, sequences: int, key: Array) -> Program:
    return Program("caches", decode.allocate_jit, (key, policy.config, policy.dtype, shapes, sequences))


def _states(
    policy: Policy, shapes: RolloutShapes, slots: int, sequences: int, key: Array
) -> tuple[decode.PromptCache, decode.Slots]:
    """Abstract state of a rollout that has been compacted to `slots`."""
    fewer = dataclasses.replace(shapes, slots=slots)
    config, dtype = policy.config, policy.dtype
    states = jax.eval_shape(lambda key: decode.allocate_jit(key, config, dtype, fewer, sequences), key)
    return as_committed(states, policy)


def _admission(slots: decode.Slots, prompt_cache: decode.PromptCache, key: Array) -> tuple:
    count = slots.limits.shape[0]
    new = {name: jax.ShapeDtypeStruct((count,), jnp.int32) for name in engine.ADMISSION_FIELDS}
    flags = jax.ShapeDtypeStruct((count,), jnp.bool_)
    return slots, prompt_cache, key, {"start": flags, **new}, flags


def _result(prompts: int, prompt_length: int, slots: decode.Slots, sampling: Sampling, policy: Policy) -> tuple:
    numbers = jax.ShapeDtypeStruct((prompts,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((prompts, prompt_length), jnp.int32)
    return jax.eval_shape(Prompts, tokens, numbers, numbers), slots.completions, sampling, policy.config.pad_token_id
