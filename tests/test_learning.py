"""Six steps on the bundled policy make it better, and the run says and leaves what it found, did and trained."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import runs
from helpers import assert_trees_equal
from rich.console import Console

from qerl_jax import train
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.compilation import committed
from qerl_jax.evaluation import Evaluation, evaluate
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rl.state import init_state
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import with_rewards

STEPS = 6


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Directory and config of the run: no noise, 32 completions a step."""
    directory = tmp_path_factory.mktemp("learning") / "run"
    config = runs.learning(
        directory, lora_rank=8, learning_rate=6e-3, sigma_start=0.0, sigma_end=0.0, max_steps=STEPS, save_steps=2
    )
    with directory.with_name("said").open("w") as said:
        train.train(config, Console(file=said, width=200))
    return directory, config


def test_a_run_says_what_it_does_and_found(learnt):
    """Sizes, both evaluations, each step, and at the end results and files."""
    directory, config = learnt
    said = directory.with_name("said").read_text()
    results = runs.read_json(directory / "evaluation.json")
    parameters = prepare.load(config).config.parameter_count() / 1e6
    for line in (
        f"tiny: {parameters:.1f} M parameters, {runs.COUNT} problems, into {directory}",
        f"evaluating the policy on {config.eval_samples} problems before training …",
        "step 1 waits until its programs are compiled …",
        "evaluating the trained policy on the same problems …",
    ):
        assert said.splitlines().count(line) == 1, line
    for row in read_metrics(directory):
        numbers = f"step {row['step']}/{STEPS}  reward {row['reward']:.3f}  entropy {row['entropy']:.3f}"
        assert f"{numbers}  σ {row['aqn/sigma']:.1e}  length {row['completions/mean_length']:.0f}" in said
    *_, end = said.partition(f"the finished run is in {directory}\n")
    shown = [[cell.strip() for cell in line.strip("│").split("│")] for line in end.splitlines() if line[:1] == "│"]
    assert shown == [
        *([name, Evaluation.from_json(result).describe()] for name, result in results.items()),
        *(["report", "report.md"], ["metrics", "metrics.jsonl"], ["completions", "completions"]),
        *(["checkpoints", "checkpoints"], ["plots", "plots"], ["adapter", "adapter"]),
    ]
    assert list(results) == ["before", "after"]
    before, after = (Evaluation.from_json(result) for result in results.values())
    report = (directory / "report.md").read_text()
    assert f"| before | {before.describe()} |\n| after | {after.describe()} |\n" in report
    assert re.search(r"\n\| compiling \(since the last start\) \| \d+\.\d \| ", report)


def test_a_run_leaves_what_it_promises(learnt):
    directory, config = learnt
    for name in (
        "config.yaml", "metrics.jsonl", "evaluation.json", "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors", "report.md",
    ):  # fmt: skip
        assert (directory / name).stat().st_size > 0, name
    assert runs.run_config(directory) == with_rewards(config)
    for name in ("reward", "accuracy", "entropy", "length", "mismatch"):
        assert (directory / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (directory / "checkpoints").iterdir() if p.name.isdigit()) == ["4", "6"]


def test_the_reward_rises(learnt):
    """It rises by 0.6 of at most 2.2 or more from the first two steps to the last three."""
    directory, _ = learnt
    rewards = [row["reward"] for row in read_metrics(directory)]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.6, rewards


def test_the_exported_adapter_is_the_checkpoint_and_beats_the_first_policy(learnt):
    """By 0.3 of the evaluation's accuracy, which is the run's own second evaluation."""
    directory, config = learnt
    exported = load_policy(
        model_path("tiny"), "nvfp4", config.lora, jnp.float32, adapter=directory / "adapter", seed=config.seed
    )
    checkpoints = Checkpointer(directory, 2)
    resolved = runs.run_config(directory)
    state = checkpoints.restore(init_state(prepare.load(resolved), resolved))
    assert int(state.step) == STEPS
    assert_trees_equal(exported.lora, state.lora)
    problems = prepare.load_problems(config, exported.tokenizer, Console(quiet=True))[1]
    placed = committed(exported).replace(tokenizer=exported.tokenizer)  # as in the run, whose programs are at hand
    found = evaluate(placed, problems, config.eval_sampling, config.seed, engine=config.eval_engine)
    results = runs.read_json(directory / "evaluation.json")
    assert found.accuracy == results["after"]["accuracy"] > results["before"]["accuracy"] + 0.3
