"""Paired differences between cells: interval, p-value, correction for many comparisons, verdict.

Axes: S seeds, R resamples.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64
from reproduction.metrics import METRICS, Run
from reproduction.plan import COMPARISONS, Comparison
from scipy import stats

RESAMPLES = 20_000
LEVEL = 0.05
SUPPORTED, NOT_SUPPORTED, REVERSED, UNDECIDED = "supported", "not supported", "reversed", "undecided"


@dataclasses.dataclass(frozen=True)
class Result:
    """A comparison's outcome.

    Attributes:
      treatment_mean, baseline_mean: means of the cells.
      differences: one for each seed.
      mean: mean difference.
      low, high: its 95 % interval.
      effect: mean difference over the standard deviation of the differences (Cohen's d_z); None where that is 0.
      p: p-value of the paired t test; for a claim of no difference, of the two one-sided tests.
      adjusted: p after Holm's correction, over all comparisons of the family.
      verdict: one of the four.
    """

    comparison: Comparison
    treatment_mean: float
    baseline_mean: float
    differences: list[float]
    mean: float
    low: float
    high: float
    effect: float | None
    p: float
    adjusted: float
    verdict: str


def interval(differences: Float64[np.ndarray, " S"]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean, its quantiles moved outwards for few seeds: at Φ(±t √(S/(S − 1)))
    with the t quantile of S − 1 degrees of freedom ("expanded percentile", Hesterberg 2015, arXiv 1411.5279).
    """
    count = len(differences)
    if count < 2:
        return -math.inf, math.inf
    draws = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    means = differences[draws].mean(axis=1)
    tail = stats.norm.cdf(stats.t.ppf(LEVEL / 2, count - 1) * math.sqrt(count / (count - 1)))
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)


def p_value(differences: Float64[np.ndarray, " S"], comparison: Comparison) -> float:
    """Two-sided p of the paired t test against 0; for `direction` 0 the larger p of the two one-sided tests against
    ±margin (Schuirmann 1987).
    """
    if len(differences) < 2:
        return 1.0
    if comparison.direction:
        return _t_test(differences, 0.0, "two-sided")
    margin = comparison.margin
    return max(_t_test(differences, -margin, "greater"), _t_test(differences, margin, "less"))


def _t_test(differences: Float64[np.ndarray, " S"], mean: float, alternative: str) -> float:
    if np.ptp(differences) == 0:  # no spread: the t statistic is infinite, or 0 / 0
        above = differences[0] > mean
        wanted = differences[0] != mean if alternative == "two-sided" else above == (alternative == "greater")
        return 0.0 if wanted and differences[0] != mean else 1.0
    return float(stats.ttest_1samp(differences, mean, alternative=alternative).pvalue)


def holm(p_values: Sequence[float], family: int) -> list[float]:
    """Holm's adjusted p-values (1979) of some comparisons of a family; those missing are taken as the larger ones of
    their number, which makes the result at most too cautious.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (family - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def verdict(comparison: Comparison, mean: float, low: float, high: float, adjusted: float) -> str:
    """Supported: significant, the interval on the claim's side of 0 and the mean at least the margin. Reversed: the
    same on the other side. Not supported: the interval holds no effect of the margin or more in the claim's direction.
    Undecided: anything else. A claim of no difference is supported where the interval lies within the margins and the
    equivalence test is significant, and not supported where the interval lies beyond one of them.
    """
    margin = comparison.margin
    if comparison.direction == 0:
        if -margin < low and high < margin and adjusted < LEVEL:
            return SUPPORTED
        return NOT_SUPPORTED if low > margin or high < -margin else UNDECIDED
    if comparison.direction < 0:
        mean, low, high = -mean, -high, -low
    if low > 0 and mean >= margin and adjusted < LEVEL:
        return SUPPORTED
    if high < 0 and mean <= -margin and adjusted < LEVEL:
        return REVERSED
    return NOT_SUPPORTED if high < margin else UNDECIDED


def finished_seeds(
    runs: Mapping[tuple[str, int], Run], cells: Sequence[str], seeds: Sequence[int], fewest: int
) -> list[int]:
    """The seeds up to the first of which a cell has no run; none where these are fewer than `fewest`."""
    found = list(itertools.takewhile(lambda seed: all((cell, seed) in runs for cell in cells), seeds))
    return found if len(found) >= fewest else []


def analyse(
    runs: Mapping[tuple[str, int], Run], comparisons: Sequence[Comparison], seeds: Sequence[int], fewest: int
) -> list[Result]:
    """Results of the comparisons of which both cells have the runs of the first `fewest` seeds or more.

    Args:
      runs: (cell, seed) -> run.
      comparisons: those to make.
      seeds: the plan's; a comparison takes those up to the first that one of its cells lacks.
      fewest: number of seeds that a comparison needs.
    """
    results = []
    for comparison in comparisons:
        cells = comparison.treatment, comparison.baseline
        if paired := finished_seeds(runs, cells, seeds, fewest):
            results.append(_compare(comparison, [(runs[cells[0], seed], runs[cells[1], seed]) for seed in paired]))
    sizes = collections.Counter(comparison.family for comparison in COMPARISONS)
    for family, size in sizes.items():
        places = [i for i, result in enumerate(results) if result.comparison.family == family]
        for place, adjusted in zip(places, holm([results[i].p for i in places], size), strict=True):
            found = results[place]
            decided = verdict(found.comparison, found.mean, found.low, found.high, adjusted)
            results[place] = dataclasses.replace(found, adjusted=adjusted, verdict=decided)
    return results


def _compare(comparison: Comparison, pairs: Sequence[tuple[Run, Run]]) -> Result:
    metric = METRICS[comparison.metric]
    values = np.array([[metric(run, baseline), metric(baseline, baseline)] for run, baseline in pairs], np.float64)
    differences = values[:, 0] - values[:, 1]
    spread = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    mean, (low, high) = float(differences.mean()), interval(differences)
    treatment, baseline = map(float, values.mean(axis=0))
    return Result(
        comparison,
        treatment,
        baseline,
        differences.tolist(),
        mean,
        low,
        high,
        mean / spread if spread else None,
        p_value(differences, comparison),
        1.0,
        UNDECIDED,
    )
