"""`tools/compare_formats.py`: errors by hand, by torch and by the float64 oracles."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from helpers import fp32_policy
from oracles import numpy_formats as oracle

from qerl_jax.io.safetensors import open_checkpoint
from qerl_jax.models.formats import mxfp4


@pytest.fixture
def compare(tool):
    return tool("compare_formats")


def test_round_trip_of_a_matrix_by_hand(compare):
    """Scale 1: 5 is a tie between 4 and 6 and goes to 4, 1.2 to 1; 6, 3 and 2 are exact."""
    weight = np.zeros((1, 32), np.float32)
    weight[0, :5] = [6, 5, 3, -2, 1.2]
    found = compare.dequantize(mxfp4.quantize(weight))
    assert found[0, :6].tolist() == [6, 4, 3, -2, 1, 0]
    expected = math.sqrt((1 + 0.2**2) / (36 + 25 + 9 + 4 + 1.2**2))
    assert compare.relative_error(weight, found) == pytest.approx(expected, rel=1e-6)


def test_logit_errors_by_hand(compare):
    """p = (1/4, 3/4) against q = (1/2, 1/2); and the same distribution, shifted by 5."""
    expected = np.array([[0, math.log(3)], [0, math.log(3)]])
    found = np.array([[0.1, 0.1], [5, 5 + math.log(3)]])
    errors = compare.logit_errors(expected, found)
    assert errors["mean_abs_dlogit"] == pytest.approx([(0.1 + math.log(3) - 0.1) / 2, 5])
    assert errors["kl"] == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0], abs=1e-12)
    assert errors["top1_agreement"].tolist() == [0, 1]


def test_weight_errors_of_a_model(compare, tiny_dir, stories_dir):
    """MXFP4 by the slow quantizer in float64, BF16 by torch's rounding of fp32 weights."""

    def mxfp4_values(weight):
        codes, exponents = oracle.quantize_mxfp4(weight)
        return oracle.E2M1[codes] * np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)

    def bf16_values(weight):
        return torch.tensor(weight).to(torch.bfloat16).double().numpy()

    for name, directory, values, bits in (
        ("mxfp4", tiny_dir, mxfp4_values, 4.25),
        ("bf16", stories_dir, bf16_values, 16),
    ):
        errors = {}
        for key, array in open_checkpoint(directory).items():
            if key.endswith("_proj.weight"):
                weight = np.array(array).astype(np.float32)
                difference = values(weight) - weight.astype(np.float64)
                errors[key] = np.linalg.norm(difference) / np.linalg.norm(weight.astype(np.float64))
        policy, found_bits = compare.in_format(str(directory), name)
        found = compare.weight_errors(fp32_policy(directory, rank=0), policy)
        worst = max(errors, key=errors.get).split(".")
        assert found_bits == bits
        assert found["weight_error_mean"] == pytest.approx(np.mean(list(errors.values())), rel=1e-9)
        assert found["weight_error_worst"] == pytest.approx(max(errors.values()), rel=1e-9)
        assert found["worst_projection"] == f"{worst[2]}.{worst[4]}"


def test_the_command_writes_a_row_for_each_format_that_fits(compare, tiny_dir, tmp_path, monkeypatch, capsys):
    """352 input features hold no whole block of 64."""
    monkeypatch.setattr(compare, "PROMPTS", 2)
    monkeypatch.setattr(compare, "NEW_TOKENS", 4)
    monkeypatch.setattr(sys, "argv", ["compare_formats.py", str(tiny_dir), "--out", str(tmp_path)])
    compare.main()
    said = capsys.readouterr().out
    assert "nf4 is left out" in said and "352 input features" in said
    rows = json.loads((tmp_path / "formats.json").read_text())["rows"]
    assert [row["format"] for row in rows] == ["bf16", "nvfp4", "mxfp4"]
    assert [row["bits_per_weight"] for row in rows] == [16, 4.5, 4.25]
    exact = rows[0]  # the checkpoint is bf16
    assert (exact["weight_error_worst"], exact["mean_abs_dlogit"], exact["kl"], exact["top1_agreement"]) == (0, 0, 0, 1)
    for row in rows[1:]:
        assert 0.08 < row["weight_error_mean"] < 0.13 and row["kl"] > 0 and row["compared_tokens"] == 8
