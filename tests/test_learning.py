"""Six steps on the bundled policy make it better, and what a run leaves is the policy that it trained."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import runs
from helpers import assert_trees_equal
from rich.console import Console

from qerl_jax import train
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.compilation import committed
from qerl_jax.evaluation import evaluate
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rl.state import init_state
from qerl_jax.run import prepare

STEPS = 6


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Directory and config of the run: no noise, 32 completions a step."""
    directory = tmp_path_factory.mktemp("learning") / "run"
    config = runs.learning(
        directory,
        lora_rank=8,
        learning_rate=6e-3,
        sigma_start=0.0,
        sigma_end=0.0,
        max_steps=STEPS,
        save_steps=STEPS,
    )
    train.train(config, Console(quiet=True))
    return directory, config


def test_the_reward_rises(learnt):
    """It rises by 0.6 of at most 2.2 or more from the first two steps to the last three."""
    directory, _ = learnt
    rewards = [row["reward"] for row in read_metrics(directory)]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.6, rewards


def test_the_policy_that_samples_is_the_one_that_is_trained(learnt):
    """Without noise rollout and trainer agree at every step, long after the adapter has moved."""
    directory, _ = learnt
    for row in read_metrics(directory)[2:]:
        assert row["sampling/sampling_logp_difference/max"] < 1e-3, row["step"]
        assert abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4


def test_every_step_has_problems_of_its_own(learnt):
    directory, config = learnt
    seen = []
    for step in range(1, STEPS + 1):
        table = pyarrow.parquet.read_table(directory / "completions" / f"step_{step:06d}.parquet").to_pydict()
        seen.append(frozenset(table["problem_id"]))
        assert len(seen[-1]) == config.num_prompts
    for one, other in itertools.combinations(seen, 2):
        assert not one & other


def test_the_exported_adapter_is_the_checkpoint_and_beats_the_first_policy(learnt):
    """By 0.3 of the evaluation's accuracy, which is the run's own second evaluation."""
    directory, config = learnt
    exported = load_policy(
        model_path("tiny"), "nvfp4", config.lora, jnp.float32, adapter=directory / "adapter", seed=config.seed
    )
    checkpoints = Checkpointer(directory, 2)
    resolved = runs.run_config(directory)
    state = checkpoints.restore(init_state(prepare.load(resolved), resolved))
    checkpoints.close()
    assert int(state.step) == STEPS
    assert_trees_equal(exported.lora, state.lora)
    problems = prepare.load_problems(config, exported.tokenizer, Console(quiet=True))[1]
    placed = committed(exported).replace(tokenizer=exported.tokenizer)  # as in the run, whose programs are at hand
    found = evaluate(placed, problems, config.eval_sampling, config.seed, engine=config.eval_engine)
    results = runs.read_json(directory / "evaluation.json")
    assert found.accuracy == results["after"]["accuracy"] > results["before"]["accuracy"] + 0.3
