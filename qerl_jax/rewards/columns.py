"""The columns that a reward gets beside prompts, completions and answers: one value for each completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def reward_columns(
    extra: Sequence[Mapping[str, Any]],
    prompt_index: Sequence[int],
    completion_lengths: Sequence[int],
    max_completion_length: int,
    overlong_buffer: int,
    reward_timeout: float,
) -> dict[str, list[Any]]:
    """Columns by name: `outcomes.GIVEN_COLUMNS`, and those of the datasets, None for a row whose dataset lacks one.

    Args:
      extra: the own columns of each prompt of the batch.
      prompt_index: place of each row's prompt among them.
      completion_lengths: tokens of each row's completion.
      max_completion_length, overlong_buffer: tokens, the same for all rows.
      reward_timeout: seconds, likewise.
    """
    count = len(prompt_index)
    names = sorted({name for prompt in extra for name in prompt})
    return {name: [extra[place].get(name) for place in prompt_index] for name in names} | {
        "prompt_index": list(prompt_index),
        "completion_lengths": list(completion_lengths),
        "max_completion_length": [max_completion_length] * count,
        "overlong_buffer": [overlong_buffer] * count,
        "reward_timeout": [reward_timeout] * count,
    }
