"""Rollout: prompts to completions with their behaviour log-probabilities, in one jitted prefill and decode loop.

The plain version: every row decodes until the last one ends. Each prompt is prefilled once and its cache repeated for
its group.

Axes: B sequences, P prompts, G group (row = p · G + g), T tokens, S cache slots, D model, V vocab.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from qerl_jax import keys
from qerl_jax.models import cache as kv
from qerl_jax.models.qwen2 import ModelConfig, Qwen2
from qerl_jax.rollout.sampling import sample
from qerl_jax.types import Finish, Policy, Prompts, Rollout, Sampling, completion_ids


def generate(
    policy: Policy,
    prompts: Prompts | list[list[int]],
    sampling: Sampling,
    key: Array,
    at_once: int | None = None,
) -> Rollout:
    """Sample `sampling.num_generations` completions of each prompt.

    A row's samples depend on `key`, its prompt's id, its place in the group and its logits, not on the batch it is in.

    Args:
      policy: with the norms (noisy or not) and adapters to sample from; `policy.tokenizer` is needed for `stop`
        strings only.
      prompts: `Prompts`, or token lists.
      sampling: how to draw.
      key: of this rollout; `keys.for_step`.
      at_once: at most so many prompts at one time (`prompts_at_once` finds how many fit a memory limit), in equal
        parts. None: all.

    Returns:
      B = P · G rows of width prompt width + max_new_tokens.

    Raises:
      ValueError: no prompts, an empty one, prompt + completion beyond the model's positions, or `stop` without a
        tokenizer.
    """
    config: ModelConfig = policy.config
    if not isinstance(prompts, Prompts):
        prompts = Prompts.from_lists(prompts, pad=config.pad_token_id)
    check_positions(config, prompts.tokens.shape[1], sampling.max_new_tokens)
    if sampling.stop and policy.tokenizer is None:
        raise ValueError(f"stop strings {list(sampling.stop)} need a tokenizer, and the policy has none")
    parts = _split(prompts, at_once)
    rollouts = [_generate(policy, part, sampling.replace(stop=()), key) for part in parts]
    rollout = _join(rollouts, prompts.tokens.shape[0], sampling.num_generations)
    return cut_at_stop(rollout, sampling.stop, policy.tokenizer, config.pad_token_id) if sampling.stop else rollout


def check_positions(config: ModelConfig, prompt_length: int, completion_length: int) -> None:
    """Raise ValueError if prompt and completion together have more tokens than the model has positions."""
    if prompt_length + completion_length > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {prompt_length} tokens and {completion_length} new ones exceed the model's "
            f"max_position_embeddings {config.max_position_embeddings}"
        )


def prompts_at_once(policy: Policy, width: int, group: int, memory_gb: float | None) -> int | None:
    """How many prompts' groups fit when the key-value cache may take `memory_gb` (1e9 bytes); None without a limit.

    Args:
      width: tokens of prompt and completion together.
      group: completions of each prompt.

    Raises ValueError with the numbers if not one group fits.
    """
    if memory_gb is None:
        return None
    config: ModelConfig = policy.config
    element = jnp.dtype(policy.dtype).itemsize
    group_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * element * width * group
    fits = int(memory_gb * 1e9 // group_bytes)
    if fits < 1:
        raise ValueError(
            f"rollout_memory_gb {memory_gb} cannot hold one group: {group} sequences of {width} tokens need "
            f"{group_bytes / 1e9:.3f} GB; lower num_generations or max_completion_length, or raise rollout_memory_gb"
        )
    return fits


def _split(prompts: Prompts, at_once: int | None) -> list[Prompts]:
    """Equal parts (one trace serves them all); the last is filled up with copies of its first prompt."""
    count = prompts.tokens.shape[0]
    if at_once is None or at_once >= count:
        return [prompts]
    size = -(-count // -(-count // at_once))
    index = np.arange(-(-count // size) * size).reshape(-1, size)
    index = np.where(index < count, index, index[:, :1])
    return [jax.tree.map(lambda leaf, rows=rows: leaf[rows], prompts) for rows in index]


def _join(rollouts: list[Rollout], prompts: int, group: int) -> Rollout:
    if len(rollouts) == 1:
        return rollouts[0]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[: prompts * group], *rollouts)
    return joined.replace(prompt_index=jnp.repeat(jnp.arange(prompts, dtype=jnp.int32), group))


@functools.partial(jax.jit, static_argnames="sampling")
def _generate(policy: Policy, prompts: Prompts, sampling: Sampling, key: Array) -> Rollout:
    config: ModelConfig = policy.config
    dtype = policy.dtype
    model = policy.model()
    group, limit = sampling.num_generations, sampling.max_new_tokens
    count, prompt_width = prompts.tokens.shape
    width = prompt_width + limit

    cache = kv.init_cache(count, width, config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    hidden, cache = model.prefill(prompts.tokens, prompts.lengths, cache)
    last = jnp.take_along_axis(hidden, (prompts.lengths - 1)[:, None, None], axis=1)[:, 0]
    cache, last, lengths, ids = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, group, axis=0), (cache, last, prompts.lengths, prompts.ids)
    )
    row_keys = keys.for_rows(key, ids, jnp.tile(jnp.arange(group), count))

    padded = jnp.where(jnp.arange(prompt_width) < prompts.lengths[:, None], prompts.tokens, config.pad_token_id)
    tokens = jnp.pad(jnp.repeat(padded, group, axis=0), ((0, 0), (0, limit)), constant_values=config.pad_token_id)
    rows = count * group
    state = {
        "step": jnp.int32(0),
        "hidden": last,
        "cache": cache,
        "tokens": tokens,
        "logprobs": jnp.zeros((rows, width), jnp.float32),
        "lengths": lengths,
        "finish": jnp.full(rows, Finish.LENGTH, jnp.int8),
        "done": jnp.zeros(rows, bool),
    }
    state = jax.lax.while_loop(
        lambda state: (state["step"] < limit) & ~jnp.all(state["done"]),
        functools.partial(_decode_step, model, config.eos_token_ids, sampling, row_keys),
        state,
    )
    return Rollout(
        state["tokens"],
        state["logprobs"],
        prompt_lengths=lengths,
        lengths=state["lengths"],
        finish=state["finish"],
        prompt_index=jnp.repeat(jnp.arange(count, dtype=jnp.int32), group),
    )


def _decode_step(
    model: Qwen2, eos_ids: tuple[int, ...], sampling: Sampling, row_keys: Array, state: dict[str, Any]
) -> dict[str, Any]:
    """Sample each live row's next token, then run the model on it. Rows that ended write nothing any more."""
    logits = model.logits(state["hidden"])
    positions = state["lengths"]
    failed = ~state["done"] & jnp.isnan(logits).any(axis=-1)
    new, logprob = sample(logits, sampling, keys.for_positions(row_keys, positions))
    live = ~state["done"] & ~failed
    ended = live & jnp.isin(new, jnp.asarray(eos_ids, jnp.int32))
    rows = jnp.arange(new.shape[0])
    here = jnp.where(live, positions, state["tokens"].shape[1])  # out of range: dropped
    tokens = state["tokens"].at[rows, here].set(new, mode="drop")
    logprobs = state["logprobs"].at[rows, here].set(logprob, mode="drop")
    hidden, cache = model.decode(new, here, state["cache"])
    finish = jnp.where(ended, jnp.int8(Finish.EOS), jnp.where(failed, jnp.int8(Finish.FAILED), state["finish"]))
    return {
        "step": state["step"] + 1,
        "hidden": hidden,
        "cache": cache,
        "tokens": tokens,
        "logprobs": logprobs,
        "lengths": positions + live,
        "finish": finish,
        "done": state["done"] | ended | failed,
    }


def cut_at_stop(rollout: Rollout, stop: tuple[str, ...], tokenizer: Any, pad: int) -> Rollout:
    """End each completion with the token that completes the first stop string in its text; on the host."""
    tokens, logprobs, lengths, finish = (
        np.array(x) for x in (rollout.tokens, rollout.logprobs, rollout.lengths, rollout.finish)
    )
    for row, ids in enumerate(completion_ids(rollout)):
        if not any(string in tokenizer.decode(ids) for string in stop):
            continue
        kept = next(n for n in range(1, len(ids) + 1) if any(string in tokenizer.decode(ids[:n]) for string in stop))
        lengths[row] = int(rollout.prompt_lengths[row]) + kept
        tokens[row, lengths[row] :], logprobs[row, lengths[row] :], finish[row] = pad, 0, Finish.STOP
    return rollout.replace(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.asarray(logprobs),
        lengths=jnp.asarray(lengths),
        finish=jnp.asarray(finish),
    )
