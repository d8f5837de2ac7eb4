"""Shapes of a rollout: how many sequences are decoded together, and the memory of their keys and values.

Axes: B sequences, P prompts, G group, T tokens, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from qerl_kernels import dispatch
from qerl_kernels.gpu import Gpu

from qerl_jax.buckets import bucket, bucket_of_rows, power_of_two, round_up
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.linear import xla_matmuls
from qerl_jax.rollout.prefill_packing import prefill_shapes
from qerl_jax.types import Engine, Policy

# Towards the end survivors move into fewer slots, powers of two, which other runs have, too; each number of slots costs
# a compilation. A decode step of 7B takes 6.1 ms on an H200 with 128 slots, 3.0 with 32 and 2.2 with 8: halving pays
# down to 32, then a quarter of them. Most steps of a rollout have the most slots: there, three quarters of them, too
# (0.5B: 1.79 ms with 256, 1.60 with 192, 1.23 with 128).
_MIN_HALVED = 32
_MIN_SLOTS = 8
_MIN_QUARTERS = 192
_SHARE_OF_FREE = 0.94  # allocator and libraries take the rest
_CACHE_MULTIPLE = 8  # cache widths in tokens are multiples of this: the smallest copy of the attention kernel
_PROMPT_SLOTS, _PROMPT_TOKENS = 32, 8192  # at least so many prompts in the prompt cache, up to so many tokens
# Where keys and values of a token take little memory, as at 0.5B, there is room for twice as many prompts and for
# completions of other limits. The attention kernel reads no more for it, and its bits are the same.
_LITTLE_TOKEN_BYTES, _LITTLE_BYTES = 16 * 1024, 9e9  # of a token in all layers; of both caches
_COMPLETION_WIDTH = 1024
# A program that moves survivors takes the host 0.3 ms, and one for each of 48 arrays had the GPU wait. So several move
# at a time: an eighth of all at most, which takes a tenth of the cache more.
_MOVES, _MOVED_BYTES = 8, 256e6


@dataclasses.dataclass(frozen=True)
class RolloutShapes:
    """Shapes of a rollout's device state.

    Attributes:
      slots: sequences decoded together.
      prompt_slots: room for prompts in the prompt cache; the completions of a prompt share one.
      prompt_width: tokens of a prompt's cache, a multiple of 8.
      completion_width: tokens of a completion's cache, a multiple of 8.
      rows: room for completions in the results.
      moved_together: arrays of keys or values of a layer that move at a time where survivors move into fewer slots.
      cache_bytes: peak bytes of both caches, reached while survivors move.
    """

    slots: int
    prompt_slots: int
    prompt_width: int
    completion_width: int
    rows: int
    moved_together: int
    cache_bytes: int

    def holds(self, sequences: int) -> bool:
        """Whether so many sequences, all of a rollout, are decoded at once, so that every prefill comes first."""
        return self.slots >= sequences

    def slot_counts(self) -> list[int]:
        """Numbers of slots that the rollout decodes with, largest first: all, then those that survivors move into."""
        counts = [self.slots]
        while counts[-1] >= _MIN_HALVED:
            most = 4 * counts[-1] // 5  # the next one is a fifth smaller
            fewer = power_of_two(most + 1) // 2
            if _MIN_QUARTERS <= 3 * fewer // 2 <= most:
                fewer = 3 * fewer // 2
            counts.append(fewer if fewer >= _MIN_HALVED else _MIN_SLOTS)
        return counts


def kv_token_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of one token's keys and values in a layer, on each device."""
    return 2 * config.part.num_kv_heads * config.head_dim * dtype.itemsize


def decode_bytes(config: ModelConfig, slots: int) -> int:
    """Bytes of a decode step besides weights and caches: `3 · 4 V` a slot for logits, noise and scores."""
    return 12 * config.vocab_size * slots


def prefill_bytes(
    policy: Policy, prompts: int, prompt_length: int, batch_invariant: bool, gpu: Gpu | None = None
) -> int:
    """Bytes of a rollout's largest prefill besides weights and caches, with cuDNN's attention.

    With e bytes of the compute dtype: residual stream and what attention adds to it, `8 T D`, with tensor parallelism
    also a sum over devices and what is summed; in attention q, k and v of the tokens, then with its results in padded
    rows; in the MLP gate and up, `2 e T F`, and either h or what makes them: their input and, where XLA multiplies,
    sums in fp32 and the dequantized weight.

    Args:
      policy: real or abstract.
      prompts: prompts of the rollout, P.
      prompt_length: longest prompt, tokens.
      batch_invariant: as in `Engine`.
      gpu: on which it is; None: the default device.
    """
    config, e = policy.config.part, policy.dtype.itemsize
    d, f = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    xla = xla_matmuls(policy.frozen["layers"], e, gpu)

    def of_layer(t: int, padded: int) -> int:
        attention = e * (t * (heads + 2 * kv_heads) + padded * 2 * (heads + kv_heads))
        mlp = 2 * e * t * f + max(e * t * f, e * t * d + xla.wide(t, 2 * f) + xla.dequantized_bytes)
        return (16 if config.is_part else 8) * t * d + max(attention, mlp)

    shapes = prefill_shapes(prompts, prompt_length, batch_invariant)
    return max(of_layer(shape.tokens, shape.capacity * shape.width) for shape in shapes)


def ending_note(model: ModelConfig, tokenizer: Any) -> str:
    """One sentence on the tokens that end a completion, where there are any. `tokenizer`: the model's, or None."""
    if not model.eos_token_ids:
        return (
            "config.json, generation_config.json and the tokenizer name no EOS token: every completion goes on to "
            "max_completion_length"
        )
    names = [f"{tokenizer.decode([i])!r} ({i})" if tokenizer else str(i) for i in model.eos_token_ids]
    return f"a completion ends with {' or '.join(names)}"


def choose_shapes(
    policy: Policy,
    prompts: int,
    group: int,
    prompt_length: int,
    completion_length: int,
    engine: Engine,
    gpu: Gpu | None = None,
) -> RolloutShapes:
    """As many slots as requested, or as many as fit `engine.memory_gb`.

    A slot holds a completion of `completion_length` tokens, a prompt slot a prompt of `prompt_length`. The prompt cache
    holds at least twice as many prompts as fill the slots, so that a new group can start while the last completions of
    an old one are still being decoded.

    Widths are buckets and prompt slots a power of two, so that runs with other limits or groups have the same programs
    (`buckets`). By the kernels, a model whose keys and values are small has room for completions of 1024 tokens, too.
    Widths and prompt slots are as small as they may be under `batch_invariant`, and where the requested slots would not
    fit the memory otherwise.

    Args:
      prompts: prompts of the rollout, P.
      group: completions of each prompt, G.
      prompt_length: longest prompt, tokens.
      completion_length: longest completion, tokens.
      engine: limits on slots and memory.
      gpu: as in `prefill_bytes`.

    Raises:
      ValueError: not a single completion fits `engine.memory_gb`; or, without one, not all requested ones fit
        `engine.free_bytes` beside what a prefill or a decode step needs. The message has the numbers and names the
        setting to lower.
    """
    requested, memory_gb = min(prompts * group, engine.slots or prompts * group), engine.memory_gb
    available, source = round(memory_gb * 1e9) if memory_gb is not None else None, "rollout_memory_gb"
    if memory_gb is None and engine.free_bytes is not None:
        prefill = prefill_bytes(policy, prompts, prompt_length, engine.batch_invariant, gpu)
        beside = max(prefill, decode_bytes(policy.config, requested))
        available = _SHARE_OF_FREE * engine.free_bytes - beside
        source = f"{_SHARE_OF_FREE:.0%} of the free device memory less {beside / 1e9:.3g} GB of activations, in GB,"
    layer_bytes = kv_token_bytes(policy.config, policy.dtype)
    is_little = policy.config.num_layers * layer_bytes <= _LITTLE_TOKEN_BYTES
    is_little &= dispatch.missing_for_mosaic_gpu(policy.dtype, gpu) is None  # XLA's attention reads whole caches

    def caches(slots: int, prompt_slots: int, *lengths: int) -> RolloutShapes:
        widths = [round_up(length, _CACHE_MULTIPLE) for length in lengths]
        shapes = RolloutShapes(slots, prompt_slots, *widths, bucket_of_rows(prompts * group), 1, 0)
        moved = sum(shapes.slot_counts()[1:2]) * shapes.completion_width * layer_bytes // 2  # of one array
        arrays = 2 * policy.config.num_layers
        most = max(1, min(arrays // _MOVES, int(_MOVED_BYTES // max(moved, 1))))
        together = next(n for n in range(most, 0, -1) if arrays % n == 0)
        tokens = slots * shapes.completion_width + prompt_slots * shapes.prompt_width
        held = policy.config.num_layers * layer_bytes * tokens
        if available is not None and held + together * moved > available:
            together = 1
        return dataclasses.replace(shapes, moved_together=together, cache_bytes=held + together * moved)

    def least_prompts(slots: int) -> int:
        return min(prompts, slots, 2 * -(-slots // group))

    def narrow(slots: int) -> RolloutShapes:
        return caches(slots, least_prompts(slots), prompt_length, completion_length)

    def widest_first(slots: int) -> Iterator[RolloutShapes]:
        if not engine.batch_invariant:
            widths, least = (bucket(prompt_length), bucket(completion_length)), power_of_two(least_prompts(slots))
            room = min(_PROMPT_SLOTS, _PROMPT_TOKENS // widths[0])
            more = caches(slots, max(2 * room, least), widths[0], max(_COMPLETION_WIDTH, widths[1]))
            if is_little and more.cache_bytes <= _LITTLE_BYTES:
                yield more
            yield caches(slots, max(room, least), *widths)
        yield narrow(slots)

    for shapes in widest_first(requested):
        if available is None or shapes.cache_bytes <= available:
            return shapes
    need = narrow(requested if memory_gb is None else 1)
    if memory_gb is None or need.cache_bytes > available:
        advice = "set rollout_memory_gb so that fewer are decoded at a time" if memory_gb is None else "raise it"
        raise ValueError(
            f"{source} {available / 1e9:.3g} cannot hold {need.slots} completions of {completion_length} tokens and "
            f"{need.prompt_slots} prompts of {prompt_length}: they need {need.cache_bytes / 1e9:.3g} GB; lower "
            f"max_completion_length, or {advice}"
        )
    low, high = 1, requested  # the largest count that fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if narrow(middle).cache_bytes <= available else (low, middle)
    return narrow(low - low % _MIN_SLOTS if low > _MIN_SLOTS else low)
