"""Weights on the host, before they are quantized: in NumPy, rows at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_ROWS_AT_ONCE = 1 << 22  # weights quantized together; bounds the fp32 temporaries to some 50 MB


def check_blocks(name: str, block: int, n: int, k: int) -> None:
    """Raise ValueError, with the name of the format, if the input features of a weight [n, k] are no whole blocks."""
    if k % block:
        raise ValueError(f"{name} needs input features divisible by {block}, got a weight of {n} x {k}")


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """The dtype of fused weights; fp32 where they differ."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def max_magnitude(weight: np.ndarray) -> float:
    """Largest |w|, in slices of rows. Raises ValueError if a value is NaN or infinite."""
    n, k = weight.shape
    amax = 0.0
    for start, stop in row_slices(n, k):
        largest = float(magnitudes(np.asarray(weight[start:stop])).max(keepdims=True).view(weight.dtype).item())
        if not np.isfinite(largest):
            raise ValueError(f"rows {start} to {stop - 1} hold a value that is not finite")
        amax = max(amax, largest)
    return amax


def magnitudes(values: np.ndarray) -> np.ndarray:
    """|values| as unsigned bits, which sort like the numbers (NaN above all): integer arithmetic is many times
    faster than the bf16 arithmetic of ml_dtypes.
    """
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    return values.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)


def row_slices(n: int, k: int) -> list[tuple[int, int]]:
    """Ranges of rows that hold some four million weights each."""
    rows = max(1, _ROWS_AT_ONCE // k)
    return [(start, min(n, start + rows)) for start in range(0, n, rows)]
