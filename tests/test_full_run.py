"""A run that trains all weights: six steps on the bundled policy make it better, and it resumes bit for bit."""

from __future__ import annotations

import dataclasses
import io
import shutil

import numpy as np
import pytest
import runs
import small
from rich.console import Console

from qerl_jax import train
from qerl_jax.config import ConfigError
from qerl_jax.export import export
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.dry_run import show_dry_run


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Directory and config of the run; little noise, 32 completions a step. What differs from a run with adapters is
    `weight_format`, and the learning rate.
    """
    directory = tmp_path_factory.mktemp("full") / "run"
    config = runs.learning(
        directory,
        weight_format="full",
        lora_rank=0,
        learning_rate=3e-4,
        sigma_start=1e-3,
        max_steps=6,
        save_steps=3,
    )
    train.train(config, Console(quiet=True))
    return directory, config


def test_the_reward_rises_and_the_policy_that_samples_is_the_one_that_is_trained(learnt):
    """By 0.5 of at most 2.2. Log-probabilities agree without noise, in the first step; then all 2 L norms are noisy."""
    rows = read_metrics(learnt[0])
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.5, rewards
    noisy = [row["aqn/norms"] for row in rows]
    assert set(noisy) == {0, 8}
    for row in rows:
        assert (row["sampling/sampling_logp_difference/max"] < 1e-4) == (row["aqn/norms"] == 0)


def test_its_accuracy_rises_by_a_fifth_and_it_leaves_a_model_to_export(learnt, tmp_path):
    directory, _ = learnt
    results = runs.read_json(directory / "evaluation.json")
    assert results["after"]["accuracy"] > results["before"]["accuracy"] + 0.2
    assert not (directory / "adapter").exists()
    export(directory, tmp_path / "out", "merged")
    assert results["after"]["accuracy"] > 0.6 and (tmp_path / "out" / "model.safetensors").exists()


def test_it_resumes_bit_for_bit(learnt, tmp_path):
    """From the checkpoint of step 3 the same masters, moments, metrics and completions."""
    directory, config = learnt
    again = tmp_path / "again"
    shutil.copytree(directory, again)
    shutil.rmtree(again / "checkpoints" / "6")
    train.train(dataclasses.replace(config, output_dir=str(again), resume="auto"), Console(quiet=True))
    runs.assert_same_run(directory, again)


def test_quantized_checkpoints_are_refused_before_anything_is_loaded(tmp_path):
    stored = small.nvfp4(tmp_path / "model")
    config = runs.config(tmp_path / "run", model=str(stored), weight_format="full", lora_rank=0)
    with pytest.raises(ConfigError, match=r"'full' trains the unquantized weights, but .*model holds quantized ones"):
        prepare.check(with_rewards(config))


def test_the_dry_run_counts_masters_and_the_copy(tmp_path):
    """0.85 M weights: 3.4 MB of masters in fp32; a copy in bf16 beside rollout and evaluation."""
    options = {"weight_format": "full", "lora_rank": 0, "dtype": "bfloat16", "eval_dataset": "arithmetic"}
    shown = io.StringIO()
    show_dry_run(runs.config(tmp_path / "run", **options), Console(file=shown, width=140))
    text = shown.getvalue()
    (masters,) = [line for line in text.splitlines() if "all but layer norms (trained)" in line]
    assert "float32" in masters and "0.003 GB" in masters
    (copy,) = [line for line in text.splitlines() if "copy of the trained weights" in line]
    assert copy.count("0.002 GB") == 2
