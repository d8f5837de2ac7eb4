"""A run with noise on the adapters: the rollout sees it, update, layer norms and evaluation do not."""

from __future__ import annotations

import dataclasses
import io
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import runs
from helpers import assert_trees_equal, logprobs_of
from rich.console import Console

from qerl_jax import train
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rl.state import init_state
from qerl_jax.run import lifecycle, prepare
from qerl_jax.run.abstract import tree_bytes
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.dry_run import show_dry_run
from qerl_jax.run.memory import memory_report

SETTINGS = {"noise_target": "lora", "sigma_start": 0.05, "sigma_end": 0.01, "num_iterations": 1, "max_steps": 4}
# A penalty keeps groups of equal rewards in the update, whose metrics are then of all rows.
SETTINGS |= {"dynamic_sampling": False, "beta": 1e-6, "eval_dataset": "arithmetic", "eval_samples": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps: its metrics, the state before each, the policies and completions of its rollouts, and the
    policies that were evaluated.
    """
    config = runs.config(tmp_path_factory.mktemp("noise") / "run", **SETTINGS)
    generate, evaluate = train.generate, lifecycle.evaluate
    sampled, evaluated, states = [], [], []

    def spy_generate(policy, *arguments, **options):
        sampled.append((len(states), policy, generate(policy, *arguments, **options)))
        return sampled[-1][2]

    def spy_evaluate(policy, *arguments, **options):
        evaluated.append(policy)
        return evaluate(policy, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate", spy_generate)
        patch.setattr(lifecycle, "evaluate", spy_evaluate)
        train.train(config, Console(quiet=True), on_step=lambda metrics, state: states.append(state))
    first = init_state(prepare.load(config), with_rewards(config))
    rows = read_metrics(Path(config.output_dir))
    return types.SimpleNamespace(
        rows=rows, before=[first, *states[:-1]], after=states[-1], sampled=sampled, evaluated=evaluated, config=config
    )


def test_the_rollouts_policy_has_noisy_adapters_and_clean_norms(finished):
    """A's and B's of the state before the step, with noise of the step's σ over the root of their rows; in the first
    step, which is the stage without noise, the same bits.
    """
    sigmas = [0, 0.05, 0.01, 0.01]
    np.testing.assert_allclose([row["aqn/sigma"] for row in finished.rows], sigmas)
    assert [place for place, *_ in finished.sampled] == list(range(4))
    for place, actor, _ in finished.sampled:
        state = finished.before[place]
        assert_trees_equal(actor.norms, state.norms)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(finished.config.seed), 1), place)
        pairs = zip(*map(jax.tree.leaves, (actor.lora, state.lora)), strict=True)
        for i, (noisy, clean) in enumerate(pairs):
            z = jax.random.normal(jax.random.fold_in(key, i), clean.shape)
            wanted = np.asarray(clean) + sigmas[place] / len(clean) ** 0.5 * np.asarray(z)
            np.testing.assert_allclose(noisy, wanted, atol=1e-7)
        if sigmas[place] == 0:
            assert_trees_equal(actor.lora, state.lora)


def test_the_sampler_used_them_and_the_trainer_did_not(finished):
    """Log-probabilities of the completions, computed again: the sampler's are those of the noisy policy, and the
    largest mismatch that the update saw is that with the clean policy.
    """
    for place, actor, rollout in finished.sampled:
        clean = actor.replace(lora=finished.before[place].lora)
        mask = np.asarray(rollout.completion_mask)[:, 1:]
        found = np.asarray(rollout.logprobs)[:, 1:][mask]
        noisy, trained = (
            np.asarray(logprobs_of(policy, rollout.tokens, rollout.attention_mask))[mask] for policy in (actor, clean)
        )
        np.testing.assert_allclose(found, noisy, atol=1e-4)
        row, largest = finished.rows[place], np.abs(found - trained).max()
        assert row["sampling/sampling_logp_difference/max"] == pytest.approx(largest, abs=1e-4)
        assert (largest > 1e-3) == (row["aqn/sigma"] > 0)


def test_the_metrics_count_the_matrices(finished):
    """Seven projections with A and B in each layer; norms are not named."""
    layers = len(finished.after.lora["layers"])
    assert [row["aqn/lora_matrices"] for row in finished.rows] == [0] + [2 * 7 * layers] * 3
    assert not any("aqn/norms" in row for row in finished.rows)
    assert [row["compilations"] for row in finished.rows[2:]] == [0] * 2


def test_evaluations_are_without_noise(finished):
    before, after = finished.evaluated
    for policy, state in ((before, finished.before[0]), (after, finished.after)):
        assert_trees_equal((policy.lora, policy.norms), (state.lora, state.norms))


def test_the_memory_estimate_counts_the_noisy_adapters(tmp_path):
    """A second copy of the fp32 adapters beside a rollout, and there alone; the table says what gets noise."""
    options = {"lora_rank": 64, "train_norms": False, "eval_dataset": "arithmetic"}
    norms, lora = (runs.config(tmp_path / "run", noise_target=target, **options) for target in ("norms", "lora"))
    usual, planned = memory_report(norms).memory, memory_report(lora).memory
    held = tree_bytes(prepare.load(lora).lora)
    assert held > 1e6 and planned.rollout - usual.rollout == held
    assert (planned.update, planned.evaluation) == (usual.update, usual.evaluation)
    shown = io.StringIO()
    show_dry_run(lora, Console(file=shown, width=140))
    (line,) = [line for line in shown.getvalue().splitlines() if "adapters with noise" in line]
    assert line.count("GB") == 1 and f"{held / 1e9:.3f} GB" in line
    assert "layer norms (frozen)" in shown.getvalue()
    assert "adapters, rank 64 (trained, noise is added)" in shown.getvalue()
    clean = dataclasses.replace(lora, sigma_start=0.0, sigma_end=0.0)
    assert not [row.name for row in memory_report(clean).parameters if "noise" in row.name]
