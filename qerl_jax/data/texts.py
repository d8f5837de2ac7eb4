"""Texts of a file as token ids: the calibration data of a quantizer, and held-out text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from qerl_jax.data.files import DataError, open_file
from qerl_jax.data.problems import ROLES
from qerl_jax.data.prompts import apply_template
from qerl_jax.untrusted import shown

COLUMNS = ("text", "messages", "prompt", "completion")


def load_texts(path: Path, tokenizer: Any, count: int, longest: int) -> list[Int32[np.ndarray, " _"]]:
    """The first texts of a file as token ids; later rows are not read.

    A row has `text`; or `messages`, a conversation in the tokenizer's chat template; or `prompt`, with or without
    `completion`, both strings, which are joined, or both lists of messages (TRL's formats).

    Args:
      path: .jsonl, .json (a list of objects) or .parquet.
      tokenizer: a tokenizer of transformers.
      count: most texts that are read; those of a single token are passed over.
      longest: tokens after which a text is cut.

    Raises DataError for a model without a tokenizer, a file that cannot be read, and a row without any of these
    columns, with the row's place.
    """
    if tokenizer is None:
        raise DataError(f"{path} holds text, and the model directory has no tokenizer")
    if not path.is_file():
        raise DataError(f"{path} is no file: texts are read from .jsonl, .json or .parquet")
    found: list[np.ndarray] = []
    for place, row in open_file(path, COLUMNS).records:
        if len(found) == count:
            break
        is_chat, content = _content(row, f"{path}, {place}")
        text = _rendered(content, tokenizer, f"{path}, {place}") if is_chat else content
        ids = tokenizer(text, verbose=False, add_special_tokens=not is_chat)["input_ids"][:longest]
        if len(ids) > 1:
            found.append(np.asarray(ids, np.int32))
    return found


def _content(row: dict[str, Any], where: str) -> tuple[bool, Any]:
    """Whether a row is a conversation, and its messages or its text."""
    present = [column for column in COLUMNS if row.get(column) is not None]
    if not set(present) - {"completion"}:
        raise DataError(f"{where} has the columns {shown(sorted(row))}, expected 'text', 'messages' or 'prompt'")
    values = [row["text"]] if "text" in present else [row["messages"]] if "messages" in present else []
    if not values:
        values = [row[column] for column in ("prompt", "completion") if column in present]
    if all(isinstance(value, str) for value in values):
        return False, "".join(values)
    if all(isinstance(value, list) for value in values):
        return True, [message for value in values for message in value]
    raise DataError(f"{where}: {shown(values)} is neither text nor a list of messages")


def _rendered(messages: list[Any], tokenizer: Any, where: str) -> str:
    """A conversation in the chat template, without the start of another turn."""
    for message in messages:
        if not (isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)):
            raise DataError(
                f"{where}: the message {shown(message)} has no role of {json.dumps(ROLES)} or no content as text"
            )
    if not tokenizer.chat_template:
        raise DataError(f"{where} is a conversation, and the model's tokenizer has no chat template")
    turns = [[{"role": message["role"], "content": message["content"]} for message in messages]]
    try:
        return apply_template(tokenizer, turns, add_generation_prompt=False)[0]
    except Exception as error:  # a template is a program and may raise anything
        raise DataError(f"{where}: the model's chat template fails: {shown(error)}") from error
