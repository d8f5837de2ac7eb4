"""Generated datasets by name: they need no download, and their splits are different problems."""

from __future__ import annotations

import re

from qerl_jax.data import arithmetic, word_problems
from qerl_jax.data.files import DataError

ARITHMETIC, WORD_PROBLEMS = "arithmetic", "word_problems"
SIZES = {ARITHMETIC: {"train": 4_000, "test": 1_000}, WORD_PROBLEMS: {"train": 20_000, "test": 1_000}}
"""Problems of each split."""
GENERATED = tuple(SIZES)
_RANGE = re.compile(r"(\d{1,3})-(\d{1,3})")


def is_generated(name: str) -> bool:
    """Whether a dataset is generated. Raises DataError for a range of operations that it cannot have."""
    base, colon, text = name.partition(":")
    if base == WORD_PROBLEMS and colon:
        _bounds(name, text)
    return name == ARITHMETIC or base == WORD_PROBLEMS


def generated_rows(name: str, split: str, seed: int, limit: int | None) -> list[tuple[str, str]]:
    """(question, answer) of the first problems, of all without a limit.

    Args:
      name: "arithmetic", "word_problems", or "word_problems:LOW-HIGH", where problems take so many operations.
      split: "train" or "test".
      seed: seed of the problems.
      limit: most problems.

    Raises DataError for an unknown split or an impossible range.
    """
    base, colon, text = name.partition(":")
    if split not in SIZES[base]:
        raise DataError(f"dataset {base!r} has no split {split!r}, only {list(SIZES[base])}")
    count = SIZES[base][split] if limit is None else min(SIZES[base][split], limit)
    if base == ARITHMETIC:
        return arithmetic.problems({"train": "train", "test": "heldout"}[split], count, seed)
    return word_problems.problems(split, count, seed, *(_bounds(name, text) if colon else ()))


def _bounds(name: str, text: str) -> tuple[int, int]:
    """The range of operations LOW-HIGH. Raises DataError."""
    found = _RANGE.fullmatch(text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= high <= word_problems.HIGH:
        raise DataError(f"dataset {name!r}: operations are given as LOW-HIGH, 1 <= LOW <= HIGH <= {word_problems.HIGH}")
    return low, high
