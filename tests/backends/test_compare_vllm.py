"""`tools/compare_vllm.py`: its figures against NumPy, and its program against the stand-in."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from helpers import randomized

from qerl_jax import LoraConfig, Prompts, Sampling, generate, load_policy, policy_logits
from qerl_jax.io.adapter import export_adapter


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
    delta = np.abs(np.asarray(rollout.logprobs)[:, 1:] - own)[drawn]  # of the distribution at 1.4 and at 1
    assert found[1.4]["mean_abs_dlogp"] == pytest.approx(delta.mean(), rel=1e-4)
    assert found[1.4]["max_abs_dlogp"] == pytest.approx(delta.max(), rel=1e-4)
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
        assert row["layer_norms_read_back"] == 4 and row["equal"] <= 16
        assert all(abs(row[name]["z"]) < 4 and 0 < row[name]["mean_abs_dlogp"] < 0.05 for name in ("vllm", "ours"))
    assert report["vllm"] == "0.22.1" and "greedy completions equal" in capsys.readouterr().out
