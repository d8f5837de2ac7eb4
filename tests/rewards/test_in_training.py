"""A reward with every kind of failure, in a training run."""

from __future__ import annotations

import math

import pyarrow.parquet
import pytest
import runs

from qerl_jax import train
from qerl_jax.config import dump
from qerl_jax.reporting.metrics import read_metrics

# Counts its calls in a folder, whatever worker it runs in; a step makes two, one for each prompt.
REWARD = """
import os, pathlib, time

def flaky(prompts, completions, answer, **columns):
    assert len(set(prompts)) == 1 and len(completions) == 4
    number = 0
    while True:
        try:
            os.close(os.open(pathlib.Path(__file__).parent / f"call{number}", os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            number += 1
    if number == 2:
        time.sleep(1000)
    if number == 4:
        os._exit(1)
    if number >= 6:
        raise ValueError("no more")
    return [float(length) for length in columns["completion_lengths"]]
"""


def test_a_run_outlives_a_reward_that_hangs_and_dies_and_ends_well_when_it_raises(tmp_path, capfd):
    """Step 1 is graded, in step 2 one group hangs, in step 3 one worker dies, in step 4 the reward raises: three steps
    of metrics, exit code 2 with the reason, and the checkpoints from before.
    """
    (tmp_path / "mine.py").write_text(REWARD)
    name = f"{tmp_path}/mine.py:flaky"
    config = runs.config(
        tmp_path / "run", num_iterations=1, beta=0.0,
        dynamic_sampling=False, reward_funcs=(name, "overlong"), reward_weights=(1.0, 1.0), reward_workers=2,
        reward_timeout=3.0,
    )  # fmt: skip
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    code, said = train.main(["--config", str(file)]), capfd.readouterr()
    text = " ".join((said.out + said.err).split())
    assert code == 2 and f"error: reward '{name}' raised ValueError('no more')" in text
    assert text.count("met the time limit (reward_timeout)") == 1 and "4 of 8 completions met" in text
    rows = read_metrics(tmp_path / "run")
    assert [row[f"rewards/{name}/timeout_rate"] for row in rows] == [0, 0.5, 0]
    assert [row[f"rewards/{name}/crash_rate"] for row in rows] == [0, 0, 0.5]
    assert [row[f"rewards/{name}/parse_failure_rate"] for row in rows] == [0, 0, 0]
    assert [row["accuracy"] for row in rows] == [1, 1, 1]  # of what is graded: every length is above 0
    assert all(math.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step_000002.parquet").to_pydict()
    assert [math.isnan(value) for value in table["reward"]] == [late == 1 for late in table[f"rewards/{name}/timeout"]]
    for total, length, late in zip(table["reward"], table["length"], table[f"rewards/{name}/timeout"], strict=True):
        # max_completion_length 24, its fifth 4 tokens: the penalty begins after 20
        assert late or total == pytest.approx(length - max(length - 20, 0) / 4)
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()} == {"2", "3"}
