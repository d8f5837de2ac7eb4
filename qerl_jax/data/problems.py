"""Datasets to problems: a prompt, the answer that scores it, and an id on which its sampling keys depend."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qerl_jax.data import arithmetic

GSM8K_HUB_ID = "openai/gsm8k"
ARITHMETIC_TRAIN_SIZE = 4_000
ARITHMETIC_TEST_SIZE = 1_000
THINK_SYSTEM_PROMPT = (
    "Solve the problem step by step. Put your reasoning between <think> and </think>, then give only the final "
    "answer between <answer> and </answer>."
)
T = TypeVar("T")
FILE_KINDS = (".jsonl", ".json", ".parquet")


class DataError(ValueError):
    """A dataset that cannot be used; the message names the file, the line or column, and what was expected."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      id: its place in the dataset; sampling keys depend on it.
      prompt: the user's message.
      answer: the gold answer as text.
    """

    id: int
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Problems in the order of their source, and the system message that goes with them."""

    problems: list[Problem]
    system_prompt: str


def load_dataset(
    name: str, split: str, prompt_column: str = "question", answer_column: str = "answer", seed: int = 0
) -> Dataset:
    """Read a dataset by name.

    Args:
      name: "gsm8k" (Hugging Face hub), "arithmetic" (generated), or the path of a .jsonl, .json (a list of objects) or
        .parquet file.
      split: "train" or "test"; of a file it says nothing. The generated problems' "test" holds numbers and templates
        that "train" never does.
      prompt_column, answer_column: of a file.
      seed: of the generated problems.

    Raises DataError for an unknown name, an unreadable file, a missing column, an empty dataset or an answer that is
    empty.
    """
    if name == "arithmetic":
        kind, count = ("train", ARITHMETIC_TRAIN_SIZE) if split == "train" else ("heldout", ARITHMETIC_TEST_SIZE)
        rows = arithmetic.problems(kind, count, seed)
        return Dataset([Problem(i, question, str(answer)) for i, (question, answer) in enumerate(rows)], "")
    if name == "gsm8k":
        import datasets

        rows = datasets.load_dataset(GSM8K_HUB_ID, "main", split=split)
        return Dataset(_problems(rows, "question", "answer", GSM8K_HUB_ID), THINK_SYSTEM_PROMPT)
    path = Path(name)
    if path.suffix not in FILE_KINDS:
        raise DataError(
            f"dataset {name!r} is neither 'gsm8k', 'arithmetic' nor a file ending in one of {list(FILE_KINDS)}"
        )
    if not path.exists():
        raise DataError(f"dataset file {path} does not exist")
    return Dataset(_problems(read_rows(path), prompt_column, answer_column, str(path)), THINK_SYSTEM_PROMPT)


def read_rows(path: Path) -> list[Any]:
    """Rows of a JSON lines, JSON list or parquet file. Raises DataError naming file and line."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a parquet file: {error}") from error
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        if not isinstance(rows, list):
            raise DataError(f"{path} holds a {type(rows).__name__}, expected a list of objects")
        return rows
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def _problems(rows: Iterable[Any], prompt_column: str, answer_column: str, where: str) -> list[Problem]:
    problems = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}, row {i + 1} is a {type(row).__name__}, expected an object with columns")
        for column in (prompt_column, answer_column):
            if row.get(column) is None:
                raise DataError(f"{where}, row {i + 1} has no {column!r}; its columns are {sorted(row)}")
        answer = gold_answer(str(row[answer_column]))
        if not answer:
            raise DataError(f"{where}, row {i + 1} has an empty answer: {row[answer_column]!r}")
        problems.append(Problem(i, str(row[prompt_column]), answer))
    if not problems:
        raise DataError(f"{where} holds no problems")
    return problems


def gold_answer(text: str) -> str:
    """What follows the last "####", where GSM8K puts it; else the whole text."""
    return text.rsplit("####", 1)[-1].strip()


def at_cursor(items: Sequence[T], seed: int, cursor: int, count: int) -> list[T]:
    """The `count` items that follow the first `cursor` of a run: each epoch is a permutation that depends on (seed,
    epoch) alone.
    """
    epochs = range(cursor // len(items), (cursor + count - 1) // len(items) + 1)
    order = np.concatenate([np.random.default_rng([seed, epoch]).permutation(len(items)) for epoch in epochs])
    start = cursor - epochs[0] * len(items)
    return [items[index] for index in order[start : start + count]]
