"""Values that users gave: how a message shows them, and JSON whose every key counts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

IN_MEMORY = ("train_dataset", "eval_dataset")
"""What a config names in the place of records that were given to `train`."""


class Given(str):
    """The name that stands in a config for an object that `train` was given: records in memory, or a function. A copy
    of the config as plain values, or what another process is sent, has the name alone.
    """

    value: Any

    def __new__(cls, name: str, value: Any) -> Given:
        given = super().__new__(cls, name)
        given.value = value
        return given

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def shown(value: Any) -> str:
    """A value in a message: its repr, the middle of a long one left out."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= 100 else f"{text[:60]}…{text[-20:]} ({len(text)} characters)"


def one_line(error: BaseException) -> str:
    """Kind and message of a library's error, line breaks and the middle of a long text left out."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else f"{text[:200]} … {text[-200:]}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The nearest known name, behind a message that `name` is none; "" where none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def below(path: str) -> str:
    """Where a relative path was looked for, behind a message that it is missing."""
    return "" if Path(path).is_absolute() else f" in {Path.cwd()}"


def is_unicode(text: str) -> bool:
    """Whether a text can be written to a file: a byte of a command line that is not UTF-8 becomes half of a surrogate
    pair, and so may an escape in JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError for what is no JSON, and for a key that an object has twice, of which Python
    takes the last; RecursionError for what is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is given twice")
        found[key] = value
    return found
