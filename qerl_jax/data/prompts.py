"""Problems to token ids through the tokenizer's chat template."""

from __future__ import annotations

import dataclasses
from typing import Any

from qerl_jax.data.problems import DataError, Problem
from qerl_jax.types import Prompts


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
    encoded = [EncodedProblem(problem, tuple(encode(problem.prompt, tokenizer, system_prompt))) for problem in problems]
    kept = [item for item in encoded if 0 < len(item.tokens) <= max_prompt_length]
    if not kept:
        shortest = min(len(item.tokens) for item in encoded)
        raise DataError(
            f"all {len(encoded)} prompts are longer than max_prompt_length {max_prompt_length}; "
            f"the shortest has {shortest} tokens"
        )
    return kept, len(encoded) - len(kept)


def encode(prompt: str, tokenizer: Any, system_prompt: str) -> list[int]:
    """Token ids of a prompt, ready for the assistant's turn. Without a chat template: system prompt, blank line,
    prompt.
    """
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{system_prompt}\n\n{prompt}" if system_prompt else prompt)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def to_prompts(encoded: list[EncodedProblem], length: int, pad: int) -> Prompts:
    """Prompts of a fixed width, so that every step has one trace."""
    return Prompts.from_lists(
        [list(item.tokens) for item in encoded], [item.problem.id for item in encoded], length, pad
    )
