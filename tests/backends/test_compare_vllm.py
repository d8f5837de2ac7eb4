"""`tools/compare_vllm.py`: its figures on numbers by hand, and its program against the stand-in."""

from __future__ import annotations

import json
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import small
from helpers import randomized

from qerl_jax import LoraConfig, load_policy
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


def test_the_program_compares_base_adapter_and_noise(tool, stand_in, tmp_path, monkeypatch, capsys):
    base = small.nvfp4(tmp_path / "base")
    policy = randomized(load_policy(base, lora=LoraConfig(rank=4), dtype=jnp.float32), seed=0)
    export_adapter(policy, tmp_path / "adapter", norms=False, base_model=str(base))
    flags = ["--adapter", str(tmp_path / "adapter"), "--new-tokens", "5", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare_vllm.py", str(base), *flags, "--sigma", "0.1"])
    tool("compare_vllm").main()
    report = json.loads((tmp_path / "out" / "vllm-base.json").read_text())
    assert [row["variant"] for row in report["rows"]] == ["base", "adapter", "adapter, sigma 0.1"]
    assert [entry["lora"] for entry in stand_in("generate")] == [None, 1001, 1001]
    for row in report["rows"]:  # bf16 here, fp32 there
        assert row["layer_norms_read_back"] == 4 and 0 < row["mean_abs_dlogp"] < 0.05
    assert report["vllm"] == "0.22.1" and "greedy completions equal" in capsys.readouterr().out
