"""Intervals of an accuracy against published values, and the description people read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qerl_jax.evaluation import Evaluation, interval
from qerl_jax.reporting.metrics import EvaluationResults


def test_wilson_interval():
    # Newcombe 1998 (Statistics in Medicine 17, table I), method 3: 81 of 263, and 0 of 20.
    low, high = interval(np.repeat([1.0, 0.0], [81, 182])[:, None])
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = interval(np.zeros((20, 1)))
    assert (low, high) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_interval_over_problems_treats_completions_as_dependent():
    correct = np.repeat([[1.0], [0.0], [1.0], [1.0]], 100, axis=1)
    mean, half = 0.75, 1.959964 * np.std([1, 0, 1, 1], ddof=1) / 2
    assert interval(correct) == pytest.approx((mean - half, min(1, mean + half)), abs=1e-6)


def test_results_survive_the_process(tmp_path):
    result = Evaluation(0.5, 0.4, 0.6, 0.9, 1.0, 0.0, 12.5, 200, 1)
    EvaluationResults(tmp_path).put("before", result)
    assert EvaluationResults(tmp_path).get("before") == result and EvaluationResults(tmp_path).get("after") is None
    assert result.describe() == "pass@1 50.0 % (95 % interval 40.0–60.0, 200 problems)"
    broken = dataclasses.replace(result, failed=3).describe()
    assert broken == result.describe()[:-1] + ", 3 completions whose largest logit was not finite)"
