"""A run that trains all weights: it samples from, saves, resumes and exports what it trains."""

from __future__ import annotations

import dataclasses
import io
import shlex
import shutil

import chex
import jax
import numpy as np
import pytest
import runs
import small
from helpers import fp32_policy
from rich.console import Console

from qerl_jax import train
from qerl_jax.checkpoint.safetensors import open_checkpoint
from qerl_jax.config import ConfigError
from qerl_jax.export import export
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.dry_run import show_dry_run

pytestmark = pytest.mark.usefixtures("nothing_drawn")
FULL = {"weight_format": "full", "lora_rank": 0, "sigma_start": 1e-3}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Directory, config and last state of a run of four steps, all but the first with noise."""
    directory, said = tmp_path_factory.mktemp("full") / "a run", io.StringIO()
    settings = {"num_iterations": 1, "max_steps": 4, "dynamic_sampling": False, "beta": 0.0, "train_norms": False}
    settings |= runs.on_small(directory.parent, quantized=False) | FULL | {"sigma_start": 1e-2, "sigma_end": 1e-2}
    config = runs.config(directory, **settings)
    state = train.train(config, Console(file=said, width=300))
    command = f"python -m qerl_jax.export {shlex.quote(str(directory))} OUT --as merged"
    assert f"the trained model: {command}\n" in said.getvalue()
    return directory, config, state


def test_the_policy_that_samples_is_the_one_that_is_trained(short):
    """Log-probabilities agree without noise, in the first step; then all 2 L norms are noisy."""
    rows = read_metrics(short[0])
    assert [row["aqn/norms"] for row in rows] == [0, 4, 4, 4]
    for row in rows:
        assert (row["sampling/sampling_logp_difference/max"] < 1e-4) == (row["aqn/norms"] == 0)


def test_it_resumes_bit_for_bit(short, tmp_path):
    """From the checkpoint of step 3 the same masters, moments, metrics and completions."""
    directory, config, _ = short
    again = tmp_path / "again"
    shutil.copytree(directory, again)
    shutil.rmtree(again / "checkpoints" / "4")
    train.train(dataclasses.replace(config, output_dir=str(again), resume="auto"), Console(quiet=True))
    runs.assert_same_run(directory, again)


def test_its_weights_are_the_model_that_is_exported(short, tmp_path):
    """In place of an adapter; another model than the one it began with."""
    directory, config, state = short
    assert not (directory / "adapter").exists()
    told: list[tuple[str, int, int]] = []
    export(directory, tmp_path / "out", "merged", progress=lambda *call: told.append(call))
    assert told[-1] == ("check", *[len(open_checkpoint(tmp_path / "out"))] * 2)
    exported, first = (fp32_policy(place, rank=0) for place in (tmp_path / "out", config.model))
    trained = state.weights, state.norms
    chex.assert_trees_all_close((exported.frozen, exported.norms), trained, rtol=2.0**-8)  # the file may hold bf16
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), trained, (first.frozen, first.norms))
    assert min(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.nightly
def test_the_reward_and_the_accuracy_rise(tmp_path):
    """The reward by 0.5 of at most 2.2, the accuracy by a fifth. What differs from `test_learning` is `weight_format`
    and the learning rate.
    """
    config = runs.learning(tmp_path / "run", **FULL, learning_rate=3e-4, max_steps=6, save_steps=3)
    train.train(config, Console(quiet=True))
    rewards = [row["reward"] for row in read_metrics(tmp_path / "run")]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.5, rewards
    results = runs.read_json(tmp_path / "run" / "evaluation.json")
    assert results["after"]["accuracy"] > max(0.6, results["before"]["accuracy"] + 0.2)


def test_quantized_checkpoints_are_refused_before_anything_is_loaded(tmp_path):
    stored = small.nvfp4(tmp_path / "model")
    config = runs.config(tmp_path / "run", model=str(stored), weight_format="full", lora_rank=0)
    with pytest.raises(ConfigError, match=r"'full' trains the unquantized weights, but .*model holds quantized ones"):
        prepare.check(with_rewards(config))


def test_the_dry_run_counts_masters_and_the_copy(tmp_path):
    """0.85 M weights: 3.4 MB of masters in fp32; a copy in bf16 beside rollout and evaluation."""
    options = {"weight_format": "full", "lora_rank": 0, "dtype": "bfloat16", "eval_dataset": "arithmetic"}
    options |= {"max_steps": -1, "batch_size": 20, "dynamic_sampling": False, "data_order": "sequential"}
    shown = io.StringIO()
    show_dry_run(runs.config(tmp_path / "run", **options), Console(file=shown, width=140))
    text = shown.getvalue()
    assert "num_train_epochs 1 of 96 problems: max_steps 38\n" in text  # 2 updates for each 5
    assert "data_order sequential: 19 rollouts of 5 leave out the last 1 of 96 problems\n" in text
    (masters,) = [line for line in text.splitlines() if "all but layer norms (trained)" in line]
    assert "float32" in masters and "0.003 GB" in masters
    (copy,) = [line for line in text.splitlines() if "copy of the trained weights" in line]
    assert copy.count("0.002 GB") == 2
