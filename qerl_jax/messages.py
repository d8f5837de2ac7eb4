"""Values that users gave, in messages and files."""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """A value in a message: its repr, the middle of a long one left out."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= 100 else f"{text[:60]}…{text[-20:]} ({len(text)} characters)"


def is_unicode(text: str) -> bool:
    """Whether a text can be written to a file: a byte of a command line that is not UTF-8 becomes half of a surrogate
    pair, and so may an escape in JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
