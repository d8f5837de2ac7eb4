"""Problems to token ids through the tokenizer's chat template, and completions back to text."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from qerl_jax.data.problems import DataError, Problem
from qerl_jax.types import Finish, Prompts, Rollout, completion_ids


@dataclasses.dataclass(frozen=True)
class EncodedProblem:
    """A problem with its prompt as token ids."""

    problem: Problem
    tokens: tuple[int, ...]


def encode_problems(
    problems: list[Problem], tokenizer: Any, system_prompt: str, max_prompt_length: int
) -> tuple[list[EncodedProblem], int]:
    """Encode every problem; drop those longer than `max_prompt_length` tokens and say how many.

    Raises DataError if none is left, or without a tokenizer.
    """
    if tokenizer is None:
        raise DataError("the model directory has no tokenizer, and text prompts need one")
    ids = encode([problem.prompt for problem in problems], tokenizer, system_prompt)
    encoded = [EncodedProblem(problem, tuple(tokens)) for problem, tokens in zip(problems, ids, strict=True)]
    kept = [item for item in encoded if 0 < len(item.tokens) <= max_prompt_length]
    if not kept:
        shortest = min(len(item.tokens) for item in encoded)
        raise DataError(
            f"all {len(encoded)} prompts are longer than max_prompt_length {max_prompt_length}; "
            f"the shortest has {shortest} tokens"
        )
    return kept, len(encoded) - len(kept)


def encode(prompts: list[str], tokenizer: Any, system_prompt: str) -> list[list[int]]:
    """Token ids of each prompt, ready for the assistant's turn. Without a chat template: system prompt, blank line,
    prompt.
    """
    if not tokenizer.chat_template:
        return tokenizer([f"{system_prompt}\n\n{prompt}" if system_prompt else prompt for prompt in prompts])[
            "input_ids"
        ]
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    conversations = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    try:
        texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it raises what it likes
        raise DataError(f"the model's chat template fails on {conversations[0]!r}: {error!r}") from error
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def to_prompts(encoded: list[EncodedProblem], length: int, pad: int) -> Prompts:
    """Prompts of a fixed width, so that every step has one trace."""
    return Prompts.from_lists(
        [list(item.tokens) for item in encoded], [item.problem.id for item in encoded], length, pad
    )


def completion_texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Text of every completion, without the EOS that ended it; other special tokens stay, because rewards look for
    them.
    """
    ended = np.asarray(rollout.finish) == Finish.EOS
    return [tokenizer.decode(ids[:-1] if eos else ids) for ids, eos in zip(completion_ids(rollout), ended, strict=True)]
