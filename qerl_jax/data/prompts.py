"""Problems to token ids through the tokenizer's chat template, and completions back to text."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import datetime
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from qerl_jax.data.files import DataError
from qerl_jax.data.problems import MAX_CHARACTERS, Dataset, Problem, load_dataset
from qerl_jax.messages import shown
from qerl_jax.types import FinishReason, Prompts, Rollout

OVERLONG = ("drop", "truncate_left", "error")
_TEXTS_AT_ONCE = 1024
_DIRECTIVES = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdDeFGHIjmMpSuUVwWxXyYzZ"]
_BLOCK_TOKENS = 16
_ORDINARY = re.compile(r"\s+|\s?\w+")  # what a message is made of
"""No fewer than `<think>` and the white space behind it take."""


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
        asks_itself=asks_for_answer(tokenizer),
        limit=limit,
        first_id=first_id,
    )
    if need_answers and not dataset.problems[0].answer:
        raise DataError(f"dataset {name!r} has no answers to evaluate by: name their column in answer_column")
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
    problems: list[Problem],
    tokenizer: Any,
    system_prompt: str,
    max_prompt_length: int,
    overlong: str = "drop",
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
    if not any(lengths):
        raise DataError(f"of {len(problems)} problems none has a prompt of a token or more")
    if not kept:
        raise DataError(
            f"all {len(problems)} prompts are longer than max_prompt_length {max_prompt_length}; "
            f"the shortest has {min(lengths)} tokens"
        )
    return kept, sum(length > max_prompt_length for length in lengths)


def encode(problems: list[Problem], tokenizer: Any, system_prompt: str) -> list[list[int]]:
    """Token ids of each prompt, ready for the assistant's turn. A conversation brings its own system message or none.
    Without a chat template: all messages with a blank line between them, behind the BOS that
    the tokenizer begins texts with, if any; never with the EOS that it may end them with. The text of a control token
    inside a message, such as `<|im_end|>`, is encoded as text: only the template makes turns.

    Raises DataError where the chat template fails, or drops a message of the user or the system.
    """
    system = (("system", system_prompt),) if system_prompt else ()
    # The tokenizer is called without `verbose`: prompts that are too long are counted elsewhere.
    conversations = [problem.messages or (*system, ("user", problem.prompt)) for problem in problems]
    if not tokenizer.chat_template:
        texts = ["\n\n".join(content for _, content in messages) for messages in conversations]
        found = tokenizer(texts, verbose=False, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        begin = _begin_ids(tokenizer)
        return [begin + ids for ids in found]
    conversations, cut = _cut_controls(conversations, tokenizer)
    turns = [[{"role": role, "content": content} for role, content in messages] for messages in conversations]
    try:
        texts = apply_template(tokenizer, turns)
    except Exception as error:  # a template is a program and may raise anything
        raise DataError(f"the model's chat template fails on {shown(turns[0])}: {shown(error)}") from error
    for messages, text in zip(conversations, texts, strict=True):
        if len(text) > 2 * sum(len(content) for _, content in messages) + MAX_CHARACTERS:
            raise DataError(f"the model's chat template makes {len(text):,} characters of {shown(messages)}")
        for role, content in messages:
            if role in ("system", "user") and content.strip() not in text:
                raise DataError(
                    f"the model's chat template drops the {role}'s turn: {content[:60]!r} is not in {text[:200]!r}"
                )
    return _token_ids(texts, tokenizer, cut)


def _begin_ids(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before a text."""
    found = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(found["input_ids"], found["special_tokens_mask"], strict=True)
    return [number for number, _ in itertools.takewhile(lambda pair: pair[1], pairs)]


def asks_for_answer(tokenizer: Any) -> bool:
    """Whether the chat template itself asks for an answer's form, as those of Qwen2.5-Math and the bundled policy."""
    template = _template(tokenizer)
    return "boxed{" in template or "<answer>" in template


def _template(tokenizer: Any) -> str:
    """The chat template, of several by name that for conversations without tools; "" without one."""
    template = getattr(tokenizer, "chat_template", None)
    return (template.get("default") if isinstance(template, dict) else template) or ""


def apply_template(tokenizer: Any, turns: list[list[dict[str, str]]], add_generation_prompt: bool = True) -> list[str]:
    """The tokenizer's chat template on several conversations, by default up to the start of the assistant's turn.
    Raises whatever the template raises.
    """
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)


def freeze_date(tokenizer: Any, date: datetime.date) -> bool:
    """Have the tokenizer's chat template write this date where it writes that of today by `strftime_now(FORMAT)`, as
    Llama 3.2's does: a macro of the template's own goes before the function of that name. Returns whether it does.
    """
    template, given = _template(tokenizer), getattr(tokenizer, "chat_template", None)
    if is_dated := "strftime_now" in template:
        written = "".join(f".replace({directive!r}, {date.strftime(directive)!r})" for directive in _DIRECTIVES)
        dated = (
            "{%- macro strftime_now(format) -%}{%- for part in format.split('%%') -%}"
            "{{ '' if loop.first else '%' }}{{ part" + written + " }}{%- endfor -%}{%- endmacro +%}" + template
        )
        tokenizer.chat_template = given | {"default": dated} if isinstance(given, dict) else dated
    return is_dated


Conversation = Sequence[tuple[str, str]]


def _cut_controls(conversations: list[Conversation], tokenizer: Any) -> tuple[list[Conversation], str]:
    """The conversations with a mark behind the first character of every control token's text, and the mark; "" where
    no message holds such a text.
    """
    tokens = _control_tokens(tokenizer)
    controls = re.compile("|".join(map(re.escape, tokens)))
    contents = [content for messages in conversations for _, content in messages]
    if not tokens or not any(map(controls.search, contents)):
        return conversations, ""
    mark = "\ue5a1\uf2c3"  # private use
    while any(mark in content for content in contents):
        mark += "\ue5a1"

    def cut(content: str) -> str:
        return controls.sub(lambda match: match[0][0] + mark + match[0][1:], content)

    return [[(role, cut(content)) for role, content in messages] for messages in conversations], mark


def _control_tokens(tokenizer: Any) -> list[str]:
    """Texts of the special tokens, and of the other added ones that the chat template puts around turns, such as the
    `<｜User｜>` of DeepSeek's. (`<think>` is an added token, too, and a message may hold it, as may the system message
    that a template has of its own. Words and white space are no control tokens either.)
    """
    around = ""
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        turns = [{"role": role, "content": "a"} for role in roles]
        with contextlib.suppress(Exception):  # of a template, which may raise anything; those of a problem's are said
            [around] = apply_template(tokenizer, [turns], add_generation_prompt=False)
            break
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return [
        token.content
        for token in added
        if token.special or (token.content in around and _ORDINARY.fullmatch(token.content) is None)
    ]


def _token_ids(texts: list[str], tokenizer: Any, cut: str) -> list[list[int]]:
    """Token ids of each text of a template, whose pieces between the marks `cut` are encoded by themselves."""
    pieces = [text.split(cut) if cut else [text] for text in texts]
    found = tokenizer(list(itertools.chain(*pieces)), verbose=False, add_special_tokens=False)["input_ids"]
    ids = iter(found)
    return [list(itertools.chain(*itertools.islice(ids, len(part)))) for part in pieces]


def to_prompts(encoded: list[EncodedProblem], length: int) -> Prompts:
    """Prompts padded to a fixed length, so that no step compiles again."""
    return Prompts.from_lists([list(item.tokens) for item in encoded], [item.problem.id for item in encoded], length)


def completion_texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """The `completion_text` of every completion."""
    arrays = rollout.tokens, rollout.prompt_lengths, rollout.lengths, rollout.finish
    tokens, starts, ends, finish = jax.device_get(arrays)
    rows = zip(tokens, starts, ends, (finish == FinishReason.EOS).tolist(), strict=True)
    return [completion_text(row[:start], row[start:end], has_eos, tokenizer) for row, start, end, has_eos in rows]


def completion_text(prompt: array.array | np.ndarray, ids: np.ndarray, has_eos: bool, tokenizer: Any) -> str:
    """Text of a completion without its final EOS; other special tokens stay, because rewards look for them. It begins
    with the `<think>` that its prompt ends in, as those of DeepSeek-R1's chat template do, whose end it holds.
    """
    opened = re.search(r"<think>\s*\Z", tokenizer.decode(np.asarray(prompt[-_BLOCK_TOKENS:])))
    return (opened[0] if opened else "") + tokenizer.decode(ids[:-1] if has_eos else ids)


class Remembering:
    """A tokenizer that decodes the same ids once, as an array: of a list, transformers checks the type of each id."""

    def __init__(self, tokenizer: Any):
        self._text = functools.cache(lambda ids: tokenizer.decode(np.frombuffer(ids, np.int32)))

    def decode(self, ids: Int32[np.ndarray, " T"]) -> str:
        """The tokenizer's text of these ids."""
        return self._text(ids.tobytes())
