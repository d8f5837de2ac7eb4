"""Buckets: the sizes that programs are compiled for. A run with other limits finds the programs of another run in the
compilation cache where both limits lie in one bucket.
"""

from __future__ import annotations

_ROWS, _COLUMNS = 1024, 1024  # arrays of a number for each token of a batch are small: 4 MB


def bucket(size: int) -> int:
    """The smallest of 2ᵏ and 1.5 · 2ᵏ that is at least `size`, which is 1 or more: 17 % more on average, 50 at most."""
    power = power_of_two(size)
    return 3 * power // 4 if size <= 3 * power // 4 else power


def bucket_of_rows(rows: int) -> int:
    """The bucket of so many sequences of a batch, with room for 1024: those beyond are masked."""
    return max(_ROWS, bucket(rows))


def bucket_of_columns(tokens: int) -> int:
    """The bucket of so many tokens of a row, with room for 1024: those beyond are masked."""
    return max(_COLUMNS, bucket(tokens))


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple
