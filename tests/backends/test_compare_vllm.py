"""`tools/compare_vllm.py`: its figures on numbers by hand, and its program against the stand-in."""

from __future__ import annotations

import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from helpers import randomized

from qerl_jax import LoraConfig, Prompts, Sampling, generate, load_policy, policy_logits
from qerl_jax.io.adapter import export_adapter


def told(**logps):
    """{"t5": -0.1} as vLLM tells it."""
    return {int(name[1:]): value for name, value in logps.items()}


def test_a_first_difference_is_explained_by_the_rounding_of_both_tokens(tool):
    """Ours finds 7 by 0.02 likelier than 8, vLLM 8 by 0.05 likelier than 7; elsewhere they differ by 0.04 at most."""
    theirs = [([5, 8, 9], [told(t5=-0.10, t6=-3.0), told(t8=-1.00, t7=-1.05), told(t9=-0.50)], "length")]
    ours, our_logps = [[5, 7, 9]], [np.array([-0.11, -1.01, -0.2])]
    their_logps = [np.array([-0.11, -1.03, -0.54])]  # the trainer's of 5, 8 and 9
    row = tool("compare_vllm").compare(ours, our_logps, theirs, their_logps)
    (found,) = row["first_differences"]
    assert (found["position"], found["ours"], found["vllm"], found["explained"]) == (1, 7, 8, True)
    assert math.isclose(found["our_gap"], 0.02, abs_tol=1e-12) and math.isclose(found["vllm_gap"], 0.05, abs_tol=1e-12)
    assert math.isclose(row["max_abs_dlogp"], 0.04, abs_tol=1e-12) and row["equal"] == 0
    assert math.isclose(row["mean_abs_dlogp"], (0.01 + 0.03 + 0.04) / 3, abs_tol=1e-12)
    assert [(part["from"], part["to"], part["tokens"]) for part in row["by_position"]] == [(0, 0, 1), (1, 3, 2)]


@pytest.mark.parametrize("second", [told(t8=-1.0, t7=-1.2), told(t8=-1.0, t6=-1.01)])
def test_a_larger_gap_or_a_token_that_vllm_does_not_tell_is_not(second, tool):
    theirs = [([5, 8], [told(t5=-0.1), second], "length")]
    logps = [np.array([-0.11, -1.01])]
    row = tool("compare_vllm").compare([[5, 7]], [np.array([-0.11, -1.0])], theirs, logps)
    assert [found["explained"] for found in row["first_differences"]] == [False]


def test_samples_of_another_temperature_surprise_the_policy(tool):
    """The bundled policy is nearly sure of most tokens: z is within 4 at its own temperature, far above 4 at a higher
    one and far below −4 at a lower one; the sums are those of float64 by NumPy.
    """
    policy = load_policy("tiny", dtype=jnp.float32)
    prompts = Prompts.from_lists([policy.tokenizer.encode("A box has 12 pens. How many pens are in 3 boxes?")] * 4)
    found = {}
    for temperature in (0.7, 1.0, 1.4):
        sampling = Sampling(40, temperature=temperature, num_generations=8)
        rollout = generate(policy, prompts, sampling, jax.random.key(0))
        found[temperature] = tool("compare_vllm").surprisal_of(policy, rollout)
    assert found[0.7]["z"] < -4 < abs(found[1.0]["z"]) < 4 < found[1.4]["z"]
    logits = np.asarray(policy_logits(policy, rollout.tokens, rollout.attention_mask), np.float64)[:, :-1]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1)
    drawn = np.asarray(rollout.completion_mask)[:, 1:]
    own = np.take_along_axis(logp, np.asarray(rollout.tokens)[:, 1:, None], -1)[..., 0]
    variance = (np.exp(logp) * (logp + entropy[..., None]) ** 2).sum(-1)
    excess = (-own - entropy)[drawn]
    assert found[1.4]["tokens"] == drawn.sum()
    assert found[1.4]["mean_excess"] == pytest.approx(excess.mean(), rel=1e-4)
    assert found[1.4]["z"] == pytest.approx(excess.sum() / np.sqrt(variance[drawn].sum()), rel=1e-4)


def test_the_program_compares_base_adapter_and_noise(tool, stand_in, tmp_path, monkeypatch, capsys):
    base = small.nvfp4(tmp_path / "base")
    policy = randomized(load_policy(base, lora=LoraConfig(rank=4), dtype=jnp.float32), seed=0)
    export_adapter(policy, tmp_path / "adapter", norms=False, base_model=str(base))
    flags = ["--adapter", str(tmp_path / "adapter"), "--new-tokens", "5", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare_vllm.py", str(base), *flags, "--sigma", "0.1", "--samples", "2"])
    tool("compare_vllm").main()
    report = json.loads((tmp_path / "out" / "vllm-base.json").read_text())
    assert [row["variant"] for row in report["rows"]] == ["base", "adapter", "adapter, sigma 0.1"]
    generated = stand_in("generate")  # greedily and at temperature 1
    assert [entry["lora"] for entry in generated] == [None, None, 1001, 1001, 1001, 1001]
    assert [len(entry["prompts"]) for entry in generated] == [16, 32] * 3
    for row in report["rows"]:  # bf16 here, fp32 there
        assert row["layer_norms_read_back"] == 4 and 0 < row["mean_abs_dlogp"] < 0.05
        assert all(abs(found["z"]) < 4 and found["tokens"] > 32 for found in row["surprisal"].values())
    assert report["vllm"] == "0.22.1" and "greedy completions equal" in capsys.readouterr().out
