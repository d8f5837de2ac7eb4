"""Estimates over problems and their 95 % intervals.

Axes: P problems, n completions of each, M estimates, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int

_Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution
RESAMPLES = 10_000
_AT_ONCE = 4_000_000  # weights of resamples held at a time, 8 bytes each


class Estimate(NamedTuple):
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k completions is correct, from n of which `correct` are:
    `1 − C(n − c, k) / C(n, k)` (Chen et al. 2021, arXiv 2107.03374, equation 1). Computed in integers.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} correct among {n} completions: needs 0 <= correct <= n, 1 <= k <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def ks(n: int) -> list[int]:
    """The k of pass@k that n completions are reported with: powers of two up to n, and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def estimates(
    values: Mapping[str, Sequence[float]], resamples: int = RESAMPLES, least: float = 0.0
) -> dict[str, Estimate]:
    """Mean of each list of P values from `least` to 1, one a problem, with its interval over problems: Wilson's where
    all of them are `least` or 1, else the percentile bootstrap's (Efron & Tibshirani 1993, chapter 13), for which all
    lists are resampled together, from one fixed seed. Of equal values that would have no width: their interval's ends
    are the means where as many problems as Wilson's bound allows of which none was seen are `least`, or 1. Differences
    of two shares have a `least` of −1.

    Raises ValueError for a value below `least` or above 1.
    """
    columns = {name: np.array(column, np.float64) for name, column in values.items()}
    for name, column in columns.items():
        if not ((column >= least) & (column <= 1)).all():
            raise ValueError(f"{name}: values from {column.min():g} to {column.max():g}, not from {least:g} to 1")
    count = len(next(iter(columns.values())))
    means: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    for weights in _weights(count, resamples):
        for name, column in columns.items():
            means[name].append(weights @ column / count)
    found = {}
    for name, column in columns.items():
        if np.isin(column, (least, 1.0)).all():
            share = (float(column.mean()) - least) / (1 - least)
            low, high = (least + (1 - least) * end for end in wilson(share, count))
        elif (column == column[0]).all():
            others = wilson(0.0, count)[1]
            low, high = (column[0] + others * (end - column[0]) for end in (least, 1))
        else:
            low, high = np.quantile(np.concatenate(means[name]), (0.025, 0.975))
        found[name] = Estimate(float(column.mean()), float(low), float(high))
    return found


def _weights(count: int, resamples: int) -> Iterator[Int[np.ndarray, "R P"]]:
    """How often each of `count` problems is in each resample, some of the resamples at a time, from one fixed seed."""
    random, step = np.random.default_rng(0), max(1, _AT_ONCE // count)
    for start in range(0, resamples, step):
        yield random.multinomial(count, np.full(count, 1 / count), size=min(step, resamples - start))


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of `count` independent trials."""
    centre = (mean + _Z95**2 / (2 * count)) / (1 + _Z95**2 / count)
    half = _Z95 / (1 + _Z95**2 / count) * math.sqrt(mean * (1 - mean) / count + _Z95**2 / (4 * count**2))
    return centre - half if mean > 0 else 0.0, centre + half if mean < 1 else 1.0  # which rounding misses


def sampling_error(correct: Float64[np.ndarray, "P n"]) -> float | None:
    """Standard error of the mean over other completions of the same problems, `√(Σ_p s_p² / n) / P` with the unbiased
    variance s_p² of a problem's completions; None for n = 1, which shows no variance. It is smaller than the error over
    problems, and the one by which two evaluations on the same problems differ.
    """
    count, n = correct.shape
    return float(np.sqrt(correct.var(axis=1, ddof=1).sum() / n) / count) if n > 1 else None
