"""`tools/compare_calibration.py`: one command on any model and texts."""

import json
import sys

import numpy as np
import pytest
import small
from helpers import fp32_policy, logits_of

from qerl_jax.evaluation.statistics import reduction
from qerl_jax.io import assets
from qerl_jax.io.quantize import quantize_checkpoint


@pytest.fixture
def compare(tool):
    return tool("compare_calibration")


def test_errors_are_summed_over_the_predicted_tokens_of_each_text(compare, tmp_path):
    """Against whole sequences one by one, without padding; texts come back by length."""
    source = small.bf16(tmp_path / "model", 1)
    quantize_checkpoint(source, tmp_path / "rounded")
    exact, rounded = fp32_policy(source, rank=0), fp32_policy(tmp_path / "rounded", rank=0)
    texts = [np.random.default_rng(i).integers(0, 512, n).astype(np.int32) for i, n in enumerate((9, 70, 3))]
    counts, found = compare.text_errors(exact, {"rounded": rounded}, texts)
    assert counts == [2, 8, 69]
    for i, text in enumerate(sorted(texts, key=len)):
        expected, other = (np.asarray(logits_of(policy, text[None]))[0, :-1] for policy in (exact, rounded))
        for error, values in compare.logit_errors(expected, other).items():
            assert found["rounded"][error][i] == pytest.approx(values.sum(), rel=1e-3, abs=1e-6)


def test_the_command_writes_a_row(compare, tmp_path, monkeypatch, capsys):
    """With files of texts, and with the model's own completions."""
    monkeypatch.setattr(compare, "TRAIN_TEXTS", 8)
    monkeypatch.setattr(compare, "TEST_TEXTS", 4)
    monkeypatch.setattr(compare, "NEW_TOKENS", {"arithmetic": 4})
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"Ana has {i} apples and {3 * i} pens."}) for i in range(8)))
    for files in (["--calibration", str(texts), "--heldout", str(texts)], ["--dataset", "arithmetic"]):
        arguments = [str(assets.model_path("tiny")), *files, "--sequences", "8", "--tokens", "32", "--longest", "7"]
        monkeypatch.setattr(sys, "argv", ["compare_calibration.py", *arguments, "--out", str(tmp_path)])
        compare.main()
    said = capsys.readouterr().out
    first, second = json.loads((tmp_path / "calibration.json").read_text())["rows"]
    assert (first["calibration_file"], second["calibration_file"]) == (
        "texts.jsonl",
        "own completions, arithmetic",
    )
    assert (first["compared_texts"], first["compared_tokens"]) == (8, 48)
    assert (second["compared_texts"], second["calibration_sequences"]) == (4, 8)
    for row in (first, second):
        assert row["parameters"] == 854144
        assert row["kl_reduction"] == pytest.approx(1 - row["kl_calibrated"] / row["kl_rounded"], rel=1e-9)
        assert f"{100 * row['kl_reduction']:.1f} % less" in said


def test_the_reduction_is_paired():
    """Halving every value leaves no spread; by hand; and nothing to be reduced is no reduction."""
    before = np.random.default_rng(0).lognormal(size=50).tolist()
    assert reduction(before, [value / 2 for value in before]) == pytest.approx((0.5, 0.5, 0.5))
    assert reduction([1, 3], [1, 1]).value == pytest.approx(0.5)
    estimate = reduction([1, 3], [1, 1])
    assert (estimate.low, estimate.high) == pytest.approx((0, 2 / 3))  # a quarter of the resamples each
    assert reduction([0, 0], [0, 0]) == (0, 0, 0)
