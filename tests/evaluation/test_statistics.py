"""Estimates and intervals: against published values, enumeration, and what the bootstrap is known to converge to."""

import itertools
import math

import numpy as np
import pytest

from qerl_jax.evaluation.statistics import _AT_ONCE, _weights, estimates, ks, pass_at_k, sampling_error, wilson


def test_shares_of_problems_have_wilsons_interval():
    """Newcombe 1998 (Statistics in Medicine 17, table I), method 3: 81 of 263, 15 of 148 and 0 of 20."""
    for right, count, bounds in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))):
        share = right / count
        found = estimates({"a": [1.0] * right + [0.0] * (count - right)})
        assert found["a"] == pytest.approx((share, *bounds), abs=5e-5)
    for count in range(1, 200):  # exactly, which the formula misses by a rounding
        assert wilson(0.0, count)[0] == 0.0 and wilson(1.0, count)[1] == 1.0


def test_equal_values_have_the_interval_of_a_few_others():
    """The bootstrap's is of zero width where all problems agree, also on another value than 0 and 1: with 95 %
    confidence at most 16.11 % of problems are others of which 20 show none. Differences have it on both sides.
    """
    found = estimates({"a": [0.0] * 20, "b": [1.0] * 20, "c": [0.25] * 20})
    assert found["a"] == pytest.approx((0, 0, 0.1611), abs=5e-5) and found["b"] == pytest.approx(
        (1, 0.8389, 1), abs=5e-5
    )
    assert found["c"] == pytest.approx((0.25, 0.25 * 0.8389, 0.25 + 0.75 * 0.1611), abs=5e-5)
    for value in (-1.0, -0.25, 0.0, 1.0):
        found = estimates({"a": [value] * 20}, least=-1)["a"]
        assert found == pytest.approx((value, value - 0.1611 * (value + 1), value + 0.1611 * (1 - value)), abs=1e-4)
        assert -1 <= found.low <= value <= found.high <= 1
    flips = estimates({"a": [1.0] * 81 + [-1.0] * 182}, least=-1)["a"]
    assert flips == pytest.approx((2 * 81 / 263 - 1, 2 * 0.2553 - 1, 2 * 0.3662 - 1), abs=1e-4)
    with pytest.raises(ValueError, match=r"a: values from -0\.25 to 0\.5, not from 0 to 1"):
        estimates({"a": [-0.25, 0.5]})


def test_sampling_error_is_the_spread_of_evaluations_of_the_same_problems():
    """Accuracies of 20,000 evaluations vary by √(Σ p (1 − p) / n) / P; problems that differ add nothing to that."""
    chances, n = np.array([0.0, 0.2, 0.5, 0.9, 1.0]), 4
    correct = (np.random.default_rng(3).random((20_000, 5, n)) < chances[:, None]).astype(float)
    exact = np.sqrt((chances * (1 - chances) / n).sum()) / 5
    assert correct.mean(axis=(1, 2)).std() == pytest.approx(exact, rel=0.02)
    assert np.mean([sampling_error(one) ** 2 for one in correct]) == pytest.approx(exact**2, rel=0.02)
    assert sampling_error(np.array([[1.0, 0.0], [1.0, 1.0]])) == 0.25  # variances 1/2 and 0
    assert sampling_error(np.array([[1.0], [0.0]])) is None


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_choices(n):
    """All ways to choose k of n completions; the estimator's product form, Chen et al. 2021, figure 3."""
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < correct for i in range(n)]
        chosen = [any(right[i] for i in choice) for choice in itertools.combinations(range(n), k)]
        assert pass_at_k(n, correct, k) == pytest.approx(np.mean(chosen), abs=1e-15)
        if n - correct >= k:
            product = 1 - np.prod(1 - k / np.arange(n - correct + 1, n + 1))
            assert pass_at_k(n, correct, k) == pytest.approx(product, abs=1e-12)


def test_pass_at_k_of_many_completions_and_bad_input():
    assert pass_at_k(1000, 1, 1) == pytest.approx(1e-3) and pass_at_k(1000, 0, 1000) == 0
    assert pass_at_k(1000, 1, 999) == pytest.approx(0.999)
    for n, correct, k in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match=f"pass@{k} of {correct} correct among {n}"):
            pass_at_k(n, correct, k)
    assert [ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_bootstrap_has_the_width_of_the_normal_approximation():
    """For many problems the percentile interval is mean ± 1.96 s / √P. Of 10,000 resamples a 2.5 % quantile has the
    standard error √(0.025 · 0.975 / 10,000) / φ(1.96) = 0.027 standard deviations of the mean; 0.1 are allowed.
    """
    random = np.random.default_rng(7)
    values = {"a": random.random(500).round(2).tolist(), "b": (random.random(500) < 0.3) / 2}
    for name, estimate in estimates(values).items():
        mean, deviation = np.mean(values[name]), np.std(values[name]) / math.sqrt(500)
        assert estimate.value == pytest.approx(mean)
        assert estimate.low == pytest.approx(mean - 1.96 * deviation, abs=0.1 * deviation)
        assert estimate.high == pytest.approx(mean + 1.96 * deviation, abs=0.1 * deviation)


def test_bootstrap_of_three_problems_is_the_exact_distribution():
    """27 resamples of (0, 0, ½): the mean is 0 with probability 8/27, ½ with 1/27, which is over 2.5 %."""
    assert estimates({"a": [0.0, 0.0, 0.5]})["a"] == (pytest.approx(1 / 6), 0.0, 0.5)
    estimate = estimates({"a": [0.0, 0.0, 0.0, 0.5]})["a"]  # ½ with 1/256: below it
    assert estimate == (0.125, 0.0, 0.375)


def test_bootstrap_draws_as_many_resamples_as_asked_for():
    count = _AT_ONCE // 3  # three at a time
    sizes = [(len(some), set(some.sum(axis=1).tolist())) for some in _weights(count, 4)]
    assert sizes == [(3, {count}), (1, {count})]


def test_bootstrap_repeats_and_does_not_depend_on_the_other_estimates():
    random = np.random.default_rng(1)
    a, b = random.random(40).tolist(), random.random(40).tolist()
    assert estimates({"a": a})["a"] == estimates({"b": b, "a": a})["a"]
