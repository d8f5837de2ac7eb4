"""`tools/compare_noise.py`: KL against float64 logits, and rows from the command line."""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fp32_policy

from qerl_jax import Sampling, aqn, generate, keys
from qerl_jax.rl.logprobs import policy_logits


@pytest.fixture
def compare(tool):
    return tool("compare_noise")


@pytest.mark.parametrize("target", ["norms", "lora"])
def test_kl_of_a_policy_against_float64(compare, tiny_dir, target):
    """Two completions of different lengths: the mean over their tokens, prompts and padding left out."""
    policy = fp32_policy(tiny_dir, rank=8)
    rollout = generate(
        policy,
        [[5, 6, 7], [20, 21, 22, 23, 24]],
        Sampling(7, temperature=1.0),
        keys.for_step(0, keys.Purpose.SAMPLE, 0),
    )
    key = keys.for_step(0, keys.Purpose.AQN, 0)
    noisy = policy.replace(**{target: aqn.PERTURBATIONS[target](getattr(policy, target), 0.1, key)})
    found = []
    for tokens, start, end in zip(rollout.tokens, rollout.prompt_lengths, rollout.lengths, strict=True):
        start, end = int(start), int(end)
        logits = [np.asarray(policy_logits(each, tokens[None, :end]), np.float64)[0] for each in (policy, noisy)]
        p, q = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in logits)
        found += (np.exp(p) * (p - q)).sum(-1)[start - 1 : end - 1].tolist()
    assert np.mean(found) > 1e-5
    assert compare.mean_kl(policy, rollout, target, 0.1, key) == pytest.approx(np.mean(found), rel=2e-3)
    assert compare.mean_kl(policy, rollout, target, 0.0, key) == 0


def test_rows_of_the_command(compare, tmp_path, monkeypatch):
    """KL grows with σ²; the factor of σ is the root of the ratio at the same σ."""
    flags = {"--prompts": 2, "--max-completion-length": 8, "--draws": 2, "--rank": 4, "--out": tmp_path}
    arguments = [str(word) for pair in flags.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["compare_noise.py", "tiny", *arguments, "--sigmas", "0.01", "0.02"])
    compare.main()
    rows = json.loads((tmp_path / "noise.json").read_text())["rows"]
    assert [(row["noise_target"], row["sigma"]) for row in rows] == [
        (target, sigma) for sigma in (0.01, 0.02) for target in ("norms", "lora")
    ]
    for first, second in zip(rows[:2], rows[2:], strict=True):
        assert second["kl"] == pytest.approx(4 * first["kl"], rel=0.1)
    assert [row["sigma_factor"] for row in rows[::2]] == [1, 1]
    assert rows[1]["sigma_factor"] == pytest.approx(jnp.sqrt(rows[0]["kl"] / rows[1]["kl"]))
    assert rows[0]["draws"] == 2 and rows[0]["rank"] == 4 and rows[0]["compared_tokens"] <= 16
