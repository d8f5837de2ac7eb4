"""`tools/claims.py`: statistics by hand, an experiment with a stand-in for the trainer, and the bundled plans."""

import functools
import json
import sys

import numpy as np
import pytest
import yaml

from qerl_jax.config import load

# Writes two steps and an evaluation from which cell, seed and settings can be told; runs of σ = 9 fail at first, that
# of seed 4 with the process.
TRAINER = """
import json, os, pathlib, sys, yaml
def run(flags):
    assert flags[0] == "--config" and flags[2:] == ["--resume", "auto"]
    config = yaml.safe_load(open(flags[1]))
    out = pathlib.Path(config["output_dir"])
    out.mkdir(exist_ok=True)
    if config["sigma_start"] == 9 and not (out / "begun").exists():
        (out / "begun").touch()
        if config["seed"] == 4:
            sys.exit(3)
        return 1
    accuracy = config["learning_rate"] + config["seed"] ** 2 * (1 + config["sigma_start"])
    rows = [
        {"step": step, "accuracy": accuracy + step, "sampling/entropy": 0.5 * step, "entropy": None, "sampling/kl": 0.0,
         "completions/mean_length": 10 * step, "reward": 0, "aqn/sigma": config["sigma_start"], "pid": os.getpid()}
        for step in (1, 2)
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    scores = {"before": {"accuracy": 0.25, "pass_at_k": 0.5}, "after": {"accuracy": accuracy, "pass_at_k": None}}
    (out / "evaluation.json").write_text(json.dumps(scores))
    return 0
for line in sys.stdin:
    print(run(json.loads(line)[0]), flush=True)
"""
PLAN = {
    "config": "tiny",
    "common": {"learning_rate": 10.0, "sigma_start": 0.0},
    "seeds": [1, 2, 4],
    "cells": {"plain": {}, "fast": {"learning_rate": 20.0}, "noisy": {"sigma_start": 9}},
    "compare": [["noisy", "plain"], ["fast", "plain"]],
}


@pytest.fixture
def claims(tool):
    return tool("claims")


@pytest.fixture
def experiment(claims, tmp_path):
    """Runs the plan by the stand-in with some flags; returns the exit code and claims.json."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN, sort_keys=False))
    runner = functools.partial(claims.Runner, program=(sys.executable, str(tmp_path / "trainer.py")))

    def run(*flags: str) -> tuple[int, dict]:
        code = claims.main([str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), *flags], runner)
        file = tmp_path / "out" / "claims.json"
        return code, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_intervals_by_hand(claims):
    """1, 2, 3: t of 2 degrees is 4.3027, s = 1, t statistic 2 √3 = 3.4641, p = 1 − t / √(2 + t²)."""
    found = claims.interval(np.array([1.0, 2.0, 3.0]))
    assert found["mean"] == 2 and found["high"] == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)
    assert found["low"] == pytest.approx(4 - found["high"]) and found["p"] == pytest.approx(1 - (12 / 14) ** 0.5)
    assert (found["bootstrap_low"], found["bootstrap_high"]) == (1, 3)  # three seeds: their whole range
    many = claims.interval(np.random.default_rng(1).normal(0.3, 1.0, 400))
    assert many["bootstrap_low"] == pytest.approx(many["low"], abs=0.01)
    assert many["bootstrap_high"] == pytest.approx(many["high"], abs=0.01)


def test_an_experiment_goes_on_where_it_failed(experiment, tmp_path, capsys):
    """Settings reach their cell, pairs share a seed, the runs of a GPU share a process, which is replaced when it dies,
    failed runs are run again and finished ones are not.
    """
    code, found = experiment("--at-once", "2")
    files = tmp_path.glob("out/*/metrics.jsonl")
    assert len({json.loads(line)["pid"] for file in files for line in file.read_text().splitlines()}) in (2, 3)
    assert code == 1 and {row["cell"] for row in found["rows"]} == {"plain", "fast"}
    assert {row["figure"] for row in found["differences"] if row["treatment"] == "noisy"} == set()
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/plain-*/metrics.jsonl")}
    code, found = experiment()
    assert code == 0 and len(found["rows"]) == 9 and len(found["steps"]) == 18
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}
    after = {(row["cell"], row["seed"]): row["accuracy_after"] for row in found["rows"]}
    assert after == {
        **{("plain", seed): 10 + seed**2 for seed in (1, 2, 4)},
        **{("fast", seed): 20 + seed**2 for seed in (1, 2, 4)},
        **{("noisy", seed): 10 + 10 * seed**2 for seed in (1, 2, 4)},
    }
    row = next(row for row in found["rows"] if (row["cell"], row["seed"]) == ("noisy", 2))
    assert (row["set/sigma_start"], row["mean_accuracy"], row["first_entropy"], row["mean_entropy"]) == (
        9, 51.5, 0.5, 0.75,
    )  # fmt: skip
    assert (row["accuracy_before"], row["pass_at_k_before"], row["model"], row["last_length"]) == (
        0.25, 0.5, "tiny", 15,
    )  # fmt: skip
    assert {"commit", "gpu", "command", "seconds"} <= set(row) and row["command"].endswith("noisy-2.yaml --resume auto")
    differences = {(d["treatment"], d["figure"]): d for d in found["differences"]}
    assert differences["noisy", "accuracy_after"]["mean"] == 9 * (1 + 4 + 16) / 3  # and not with seeds mixed
    assert (
        differences["fast", "accuracy_after"] | {"mean": 10, "low": 10, "high": 10, "p": 0.0}
        == (differences["fast", "accuracy_after"])
    )
    assert ("noisy", "pass_at_k_after") not in differences  # no run has it
    assert (tmp_path / "out" / "claims.png").stat().st_size > 0
    assert "| accuracy_after | fast − plain | 3 | 27, 17 | +10 " in capsys.readouterr().out


def test_the_bundled_plans_are_configs(claims, tmp_path):
    """Every run of them, by the program's own reader."""
    plans = sorted((claims.ROOT / "tools" / "plans").glob("*.yaml"))
    assert plans
    for path in plans:
        jobs, pairs = claims.read_plan(path, tmp_path / path.stem)
        assert pairs
        for job in jobs:
            claims.write_config(job)
            config = load(job.file("yaml"))
            assert (config.seed, config.output_dir) == (job.seed, str(job.directory))
            assert all(getattr(config, name) == value for name, value in job.overrides.items()), job
