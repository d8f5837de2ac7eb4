"""Between `Sampling` and `Rollout` and what vLLM has for them.

Axes: B sequences, P prompts, G group (row = p · G + g), T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from qerl_jax import keys
from qerl_jax.models.config import ModelConfig
from qerl_jax.types import FinishReason, Prompts, Rollout, Sampling

Completion = tuple[list[int], list[float], str]
"""Token ids, their log-probabilities, and vLLM's reason of the end: "stop" or "length"."""


class VllmError(ValueError):
    """vLLM failed, or did not do what was asked for."""


def sampling_arguments(sampling: Sampling, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams`, but for the seed."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": [int(token) for token in eos_token_ids],
        "ignore_eos": True,  # it has no others
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": False,
    }


def row_seeds(key: Array, ids: Int[np.ndarray, " B"], samples: Int[np.ndarray, " B"]) -> list[int]:
    """A seed for each row, from the rollout's key, its problem and its number among that problem's samples."""
    row_keys = keys.for_rows(key, jnp.asarray(ids, jnp.int32), jnp.asarray(samples, jnp.int32))
    high, low = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (2,)))(row_keys)).astype(np.int64).T
    return [int(seed) for seed in (high >> 1 << 32) | low]


def assemble(
    prompts: Prompts,
    rows: Int[np.ndarray, " B"],
    completions: Sequence[Completion],
    sampling: Sampling,
    model: ModelConfig,
) -> Rollout:
    """vLLM's completions as a `Rollout`. Greedy tokens have log-probability 0, as they are sampled with certainty; a
    completion with a log-probability that is not finite has failed.

    `rows` has the prompt of each completion. Raises VllmError for a completion that ended before its limit
    without one of the model's EOS ids.
    """
    prompt_tokens, prompt_lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)[rows]
    shape = (len(rows), prompt_tokens.shape[1] + sampling.max_new_tokens)
    tokens, logprobs = np.full(shape, model.pad_token_id, np.int32), np.zeros(shape, np.float32)
    lengths, finish = prompt_lengths.copy(), np.zeros(len(rows), np.int8)
    for row, (ids, values, reason) in enumerate(completions):
        ended = bool(ids) and ids[-1] in model.eos_token_ids
        if reason != ("stop" if ended else "length") or not (ended or len(ids) == sampling.max_new_tokens):
            raise VllmError(f"vLLM ended completion {row} by {reason!r} after {len(ids)} tokens, {ids[-1:]} the last")
        start = prompt_lengths[row]
        own = slice(start, start + len(ids))
        tokens[row, :start], tokens[row, own] = prompt_tokens[rows[row], :start], ids
        lengths[row] += len(ids)
        finish[row] = FinishReason.EOS if ended else FinishReason.LENGTH
        if not np.isfinite(values).all():
            finish[row] = FinishReason.FAILED
        elif sampling.temperature > 0:
            logprobs[row, own] = values
    arrays = (tokens, logprobs, prompt_lengths, lengths, finish, rows.astype(np.int32))
    return Rollout(*map(jax.device_put, arrays))
