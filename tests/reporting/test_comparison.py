"""Several runs side by side: intervals against published values, groups by hand, the tool as a person runs it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qerl_jax.config import Config, ConfigError, dump
from qerl_jax.evaluation import Evaluation
from qerl_jax.reporting import metrics as sink
from qerl_jax.reporting.comparison import curve, group_runs, mean_interval, read_run, summary
from qerl_jax.reporting.metrics import EvaluationResults

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compare_runs.py"


def run(root: Path, name: str, rewards: list[float], accuracy: float, **changes: object) -> Path:
    """A run directory as training leaves it."""
    directory = root / name
    directory.mkdir()
    (directory / "config.yaml").write_text(dump(Config(model="m", output_dir=str(directory), **changes)))
    for step, reward in enumerate(rewards, 1):
        # The second seed's run stands for one of before `accuracy` was recorded.
        correct = "rewards/answer/mean" if changes.get("seed") else "accuracy"
        row = {"reward": reward, correct: reward / 2, "entropy": 1.0, "completions/mean_length": 9.0}
        sink.append_metrics(directory, step, row | {"num_tokens": step})
    EvaluationResults(directory).put("after", Evaluation(accuracy, 0, 1, accuracy, 1, 0, 9, 100, 1))
    return directory


def test_interval_of_a_mean():
    """Student's sleep data, the drug's second group (R's `t.test(extra)` gives 0.8976775 … 3.7623225)."""
    mean = mean_interval([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    assert (mean.mean - mean.half, mean.mean + mean.half) == pytest.approx((0.8976775, 3.7623225), abs=2e-4)
    assert mean.describe() == "2.3 ± 1.4"
    alone = mean_interval([0.5])
    assert math.isnan(alone.half) and alone.describe(100) == "50.0"
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


@pytest.fixture
def four(tmp_path):
    """Two groups of two seeds, named by the learning rate; the last run is a step shorter."""
    return [
        run(tmp_path, "a0", [0.0, 1.0, 2.0], 0.5, seed=0),
        run(tmp_path, "b0", [0.0, 0.2, 0.4], 0.2, seed=0, learning_rate=1e-6),
        run(tmp_path, "a1", [0.0, 2.0, 4.0], 0.7, seed=1, save_steps=7),  # what may differ on resume tells no groups
        run(tmp_path, "b1", [0.0, 0.4], 0.4, seed=1, learning_rate=1e-6),
    ]


def test_groups_differ_in_more_than_the_seed(four):
    first, second = group_runs([read_run(path) for path in four])
    assert (first.name, second.name) == ("learning_rate 1e-05", "learning_rate 1e-06")
    assert [r.directory.name for r in first.runs] == ["a0", "a1"]
    assert [r.directory.name for r in second.runs] == ["b0", "b1"]
    steps, mean, half = curve(first, "reward")
    np.testing.assert_array_equal(steps, [1, 2, 3])
    np.testing.assert_allclose(mean, [0, 1.5, 3])
    np.testing.assert_allclose(half, 12.706 * np.std([[0, 0], [1, 2], [2, 4]], axis=1, ddof=1) / np.sqrt(2))
    np.testing.assert_array_equal(curve(second, "reward")[0], [1, 2])  # steps that both have
    rows = summary(first)
    assert rows["accuracy after"].mean == pytest.approx(0.6) and rows["reward, last tenth"].mean == 3
    assert rows["accuracy, last tenth"].mean == pytest.approx(1.5)
    assert "accuracy before" not in rows


def test_what_cannot_be_compared_is_refused(four, tmp_path):
    runs = [read_run(path) for path in four]
    with pytest.raises(ConfigError, match=r"a0 and .*a0 are the same run: seed 0 in both"):
        group_runs([*runs, runs[0]])
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no finished step"):
        read_run(run(tmp_path, "empty", [], 0.1))


def test_the_tool(four, tmp_path):
    figure = tmp_path / "out" / "figure.png"
    command = [sys.executable, str(TOOL), *map(str, four), "--output", str(figure)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "learning_rate 1e-06" in done.stdout
        and "60.0 ± 127.1" in done.stdout
        and figure.read_bytes().startswith(b"\x89PNG")
    )
    done = subprocess.run([sys.executable, str(TOOL), str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 2 and "is no run" in done.stderr
