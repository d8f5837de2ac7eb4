"""Problems to token ids through the tokenizer's chat template, and completions back to text."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qerl_jax.data.files import DataError
from qerl_jax.data.problems import Dataset, Problem, load_dataset
from qerl_jax.types import FinishReason, Prompts, Rollout, completion_ids

OVERLONG = ("drop", "truncate_left", "error")
_TEXTS_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class EncodedProblem:
    """A problem with its prompt as token ids, four bytes each."""

    problem: Problem
    tokens: array.array


def load_encoded(
    name: str,
    split: str,
    tokenizer: Any,
    *,
    prompt_column: str,
    answer_column: str,
    system_prompt: str | None,
    max_prompt_length: int,
    overlong_prompts: str = "drop",
    reward_columns: Sequence[str] = (),
    limit: int | None = None,
    first_id: int = 0,
    need_answers: bool = False,
) -> tuple[list[EncodedProblem], Dataset, list[str]]:
    """Problems of a dataset as token ids (see `load_dataset`, `encode_problems`), the dataset, and one note for each
    kind of record that was left out or cut.

    Raises DataError.
    """
    dataset = load_dataset(
        name,
        split,
        prompt_column,
        answer_column,
        reward_columns=reward_columns,
        system_prompt=system_prompt,
        limit=limit,
        first_id=first_id,
    )
    if need_answers and not dataset.problems[0].answer:
        raise DataError(f"dataset {name!r} has no answers to evaluate by")
    items, overlong = encode_problems(
        dataset.problems, tokenizer, dataset.system_prompt, max_prompt_length, overlong_prompts
    )
    notes = list(dataset.notes)
    if overlong:
        done = "dropped" if overlong_prompts == "drop" else "cut the beginning of"
        notes.append(
            f"{name}: {done} {overlong} of {len(dataset.problems)} prompts longer than {max_prompt_length} tokens"
        )
    return items, dataset, notes


def encode_problems(
    problems: list[Problem], tokenizer: Any, system_prompt: str, max_prompt_length: int, overlong: str = "drop"
) -> tuple[list[EncodedProblem], int]:
    """Encode every problem; those longer than `max_prompt_length` tokens are left out ("drop"), cut to their last
    `max_prompt_length` tokens ("truncate_left") or refused ("error"). Also returns the number of overlong prompts.

    Raises DataError if none is left, or without a tokenizer.
    """
    if tokenizer is None:
        raise DataError("the model directory has no tokenizer, and text prompts need one")
    if overlong not in OVERLONG:
        raise DataError(f"overlong {overlong!r} is not one of {list(OVERLONG)}")
    kept: list[EncodedProblem] = []
    lengths = []
    for start in range(0, len(problems), _TEXTS_AT_ONCE):
        part = problems[start : start + _TEXTS_AT_ONCE]
        for problem, ids in zip(part, encode(part, tokenizer, system_prompt), strict=True):
            lengths.append(len(ids))
            if len(ids) > max_prompt_length and overlong == "error":
                raise DataError(
                    f"the prompt of problem {problem.id} has {len(ids)} tokens, max_prompt_length {max_prompt_length}: "
                    f"{problem.prompt[:60]!r}…"
                )
            if ids and (len(ids) <= max_prompt_length or overlong == "truncate_left"):
                kept.append(EncodedProblem(problem, array.array("i", ids[-max_prompt_length:])))
    if not kept:
        raise DataError(
            f"all {len(problems)} prompts are longer than max_prompt_length {max_prompt_length}; "
            f"the shortest has {min(lengths)} tokens"
        )
    return kept, sum(length > max_prompt_length for length in lengths)


def encode(problems: list[Problem], tokenizer: Any, system_prompt: str) -> list[list[int]]:
    """Token ids of each prompt, ready for the assistant's turn. A conversation brings its own system message or none.
    Without a chat template: all messages with a blank line between them.

    Raises DataError where the chat template fails.
    """
    system = (("system", system_prompt),) if system_prompt else ()
    # The tokenizer is called without `verbose`: prompts that are too long are counted elsewhere.
    conversations = [problem.messages or (*system, ("user", problem.prompt)) for problem in problems]
    if not tokenizer.chat_template:
        texts = ["\n\n".join(content for _, content in messages) for messages in conversations]
        return tokenizer(texts, verbose=False)["input_ids"]
    turns = [[{"role": role, "content": content} for role, content in messages] for messages in conversations]
    try:
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program and may raise anything
        raise DataError(f"the model's chat template fails on {turns[0]!r}: {error!r}") from error
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def to_prompts(encoded: list[EncodedProblem], length: int, pad: int) -> Prompts:
    """Prompts padded to a fixed length, so that no step compiles again."""
    return Prompts.from_lists(
        [list(item.tokens) for item in encoded], [item.problem.id for item in encoded], length, pad
    )


def completion_texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Text of every completion without its final EOS; other special tokens stay, because rewards look for them."""
    ended = np.asarray(rollout.finish) == FinishReason.EOS
    return [tokenizer.decode(ids[:-1] if eos else ids) for ids, eos in zip(completion_ids(rollout), ended, strict=True)]
