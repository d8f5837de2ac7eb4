"""What `grpo_step` refuses: a batch that contradicts the config, or lacks what the config reads."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np

from qerl_jax.config import Config
from qerl_jax.types import Batch


def checked(batch: Batch, config: Config) -> Batch:
    """The batch, its behaviour log-probabilities NaN where it has none and no importance weight reads them: metrics of
    the mismatch are NaN then.

    Raises ValueError, naming both values, where shapes, group size or lengths are not the config's, where the mask has
    tokens outside of completions, which no pass would read, and where the importance weight would be computed from
    behaviour log-probabilities that are not there (None, or of the rows with an advantage no token's is finite and
    other than 0). Of a batch of shapes only they are checked.
    """
    rows, width = config.batch_size, batch.tokens.shape[1]
    of_tokens = [batch.tokens, batch.loss_mask, *([] if batch.logprobs is None else [batch.logprobs])]
    of_rows = [batch.prompt_lengths, batch.lengths, batch.finish, batch.prompt_index, batch.advantages]
    try:
        chex.assert_shape(of_tokens, (rows, width))
        chex.assert_shape(of_rows, (rows,))
    except AssertionError as error:
        raise ValueError(f"the batch is not one of batch_size {rows} and {width} tokens: {error}") from error
    lacks = batch.logprobs is None
    values = batch.prompt_lengths, batch.lengths, batch.prompt_index, batch.loss_mask, batch.logprobs, batch.advantages
    if not any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        prompts, lengths, groups, mask, logprobs, advantages = jax.device_get(values)
        _check_groups(groups, config)
        _check_lengths(lengths - prompts, config)
        _check_mask(mask, prompts, lengths)
        # A single kept token has the log-probability 0, and so have all of a policy that always says the same.
        weighted = mask & (np.nan_to_num(advantages) != 0)[:, None]
        lacks = lacks or (config.top_k != 1 and weighted.any() and not _any_known(logprobs[weighted]))
    if not lacks:
        return batch
    if config.importance_sampling_cap is not None:
        cap = config.importance_sampling_cap
        raise ValueError(
            "the batch has no behaviour log-probabilities (logprobs is None, or none is finite and other than 0): "
            f"importance_sampling_cap {cap} weighs by them; pass those of the distribution sampled from, or set "
            "importance_sampling_cap to None"
        )
    return dataclasses.replace(batch, logprobs=jax.device_put(np.full((rows, width), np.nan, np.float32)))


def _any_known(logprobs: np.ndarray) -> bool:
    return bool((np.isfinite(logprobs) & (logprobs != 0)).any())


def _check_groups(prompt_index: np.ndarray, config: Config) -> None:
    prompts, counts = np.unique(prompt_index, return_counts=True)
    wrong = np.flatnonzero(counts != config.num_generations)
    if len(wrong):
        raise ValueError(
            f"the batch has {counts[wrong[0]]} completions of prompt {prompts[wrong[0]]}, the config has "
            f"num_generations {config.num_generations}"
        )


def _check_lengths(lengths: np.ndarray, config: Config) -> None:
    if lengths.max() > config.max_completion_length:
        raise ValueError(
            f"completion {lengths.argmax()} of the batch has {lengths.max()} tokens, the config has "
            f"max_completion_length {config.max_completion_length}"
        )


def _check_mask(mask: np.ndarray, prompts: np.ndarray, lengths: np.ndarray) -> None:
    columns = np.arange(mask.shape[1])
    outside = np.argwhere(mask & ((columns < prompts[:, None]) | (columns >= lengths[:, None])))
    if len(outside):
        row, column = outside[0]
        raise ValueError(
            f"loss_mask has column {column} of row {row}, whose completion lies in columns {prompts[row]} to "
            f"{lengths[row]} (exclusive): tokens of no completion cannot be trained on"
        )
