"""`tools/compare_qerl.py`: it passes what agrees, names what departs on purpose, and finds what was planted.

The release's code is not here; where the tool would run it, functions stand in that give what was recorded from it, or
that are written out by hand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs

from qerl_jax.reporting.metrics import append_metrics, write_completions
from qerl_jax.run import directory as run_directory

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def compare(tool):
    return tool("compare_qerl")


@pytest.fixture
def goldens(compare, tmp_path, monkeypatch) -> Path:
    """A copy of the recorded values, which the tool reads."""
    place = tmp_path / "golden"
    place.mkdir()
    for path in GOLDEN.glob("release_*.json"):
        shutil.copyfile(path, place / path.name)
    monkeypatch.setattr(compare, "GOLDEN", place)
    return place


def change(path: Path, edit) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def test_we_are_the_release_but_for_departures_on_purpose(compare, capsys):
    assert compare.main([]) == 0
    said = capsys.readouterr().out
    assert "all within the bounds" in said
    assert said.count("clipped share of tokens, not of sequences") == 6  # three losses, with and without KL
    assert "1: stage borders in integers" in said


def raised(values) -> None:
    values["runs"][1]["sigmas"][40] *= 1 + 1e-6


def one_step_late(values) -> None:
    values["runs"][0]["sigmas"] = [0.0, *values["runs"][0]["sigmas"][:-1]]


def off_gradient(values) -> None:
    values["results"][3]["gradient"][0][1] += 1e-5


def off_loss(values) -> None:
    values["results"][0]["loss"] = float("nan")


def unmasked(values) -> None:
    values["mask_truncated_completions"][2][0] = 1


def off_reward(values) -> None:
    values["cases"][0][1] += 1e-3


PLANTED = {
    "a σ": ("noise", raised, "σ, 97 rollouts of 1 updates, 10 stages"),
    "the step index": ("noise", one_step_late, "σ, 20 rollouts of 1 updates, 10 stages"),
    "a gradient": ("losses", off_gradient, "gradient: grpo, level sequence, delta 1.4, beta 0.3"),
    "a loss that is no number": ("losses", off_loss, "loss: grpo, level token"),
    "a mask": ("losses", unmasked, "mask of truncated completions"),
    "a reward": ("xml_count", off_reward, "reward xml_count"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_difference_is_found(compare, goldens, capsys, case):
    part, edit, name = PLANTED[case]
    change(goldens / f"release_{part}.json", edit)
    assert compare.main([]) == 1
    assert f"{name} is beyond its bound" in capsys.readouterr().out


def test_a_departure_is_one_only_where_it_is_meant(compare):
    """Three values differ: two within the mask, of which one by less than its bound."""
    row = compare.compared(
        "x", [1, 2, 3, 4.5], [1, 2.5, 3.1, 4], [0.2, 0.2, 0.2, 0.2], [False, True, True, False], "why"
    )
    assert (row.cases, row.difference, row.bound, row.departures) == (4, 0.5, 0.2, 1)
    assert not row.is_within
    assert compare.compared("x", [1, np.nan], [1, np.nan], 0).is_within
    assert not compare.compared("x", [1, np.nan], [1, 2], 9).is_within
    with pytest.raises(ValueError, match="x: 1 values here, 2 of the release"):
        compare.compared("x", [1], [1, 2], 9)


@pytest.fixture
def recorded_run(tmp_path) -> Path:
    """A run of 20 rollouts whose σ are those that were recorded from the release, and one file of completions."""
    noise = json.loads((GOLDEN / "release_noise.json").read_text())["runs"][0]
    config = runs.config(tmp_path / "run", max_steps=20, num_stages=10, num_iterations=1, sigma_end=5e-4)
    assert {name: getattr(config, name) for name in noise["settings"]} == noise["settings"]
    run = tmp_path / "run"
    run_directory.write_config(run, config)
    for step, sigma in enumerate(noise["sigmas"]):
        append_metrics(run, step + 1, {"aqn/sigma": sigma, "num_tokens": step})
    texts = ["<answer>5</answer>", "<answer>5.0</answer>", "<answer>6</answer>", "5"] * 2
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, float("nan")]
    four = [(1 - 0.5) / (np.sqrt(1 / 3) + 1e-4)] * 2 + [(0 - 0.5) / (np.sqrt(1 / 3) + 1e-4)] * 2
    columns = {
        "completion": texts,
        "answer": ["5"] * 8,
        "reward": rewards,
        "rewards/answer": [1.0, 1.0, 0.0, 0.0] * 2,
        "advantage": [*four, 0.0, 0.0, 0.0, 0.0],
    }
    write_completions(run, 1, columns)
    return run


@pytest.fixture
def stand_ins(compare, monkeypatch) -> None:
    """The release's functions on the recorded run, by hand: its σ; `(r − mean) / (std + 1e-4)`; equality of texts."""
    noise = json.loads((GOLDEN / "release_noise.json").read_text())["runs"][0]

    def sigmas(checkout, settings, rollouts):
        assert (settings, rollouts) == (noise["settings"], 20)
        return noise["sigmas"]

    def advantages(checkout, rewards, group, scale):
        grouped = np.reshape(rewards, (-1, group))
        centred = grouped - grouped.mean(axis=1, keepdims=True)
        return (centred / (grouped.std(axis=1, ddof=1, keepdims=True) + 1e-4)).ravel().tolist()

    def rewards(checkout, name, completions, answers):
        texts = (text.split("<answer>")[-1].split("</answer>")[0] for text in completions)
        return [2.0 * (text == answer) for text, answer in zip(texts, answers, strict=True)]

    for function in (sigmas, advantages, rewards):
        monkeypatch.setattr(compare.release, function.__name__, function)


def test_a_run_is_held_against_the_release(compare, stand_ins, recorded_run, capsys):
    """ "5.0" scores here and "5" without tags there: departures; what else differs is none."""
    arguments = ["--checkout", "there", "--run", str(recorded_run)]
    assert compare.main(arguments) == 0
    said = capsys.readouterr().out
    assert "σ of 20 rollouts" in said and "4: numbers in <answer>, not texts" in said
    run = compare.run_rows(recorded_run, None)
    assert [row.name for row in run] == ["σ of 20 rollouts", "advantages", "reward answer"]

    lines = (recorded_run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[7]["aqn/sigma"] = rows[0]["aqn/sigma"]
    (recorded_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare.main(arguments) == 1
    assert "σ of 20 rollouts is beyond its bound" in capsys.readouterr().out


def test_an_advantage_that_a_run_got_wrong_is_found(compare, stand_ins, recorded_run, capsys):
    import pyarrow.parquet

    file = recorded_run / "completions" / "step_000001.parquet"
    columns = pyarrow.parquet.read_table(file).to_pydict()
    columns["advantage"][1] += 1e-4
    columns["rewards/answer"][2] = 0.5
    write_completions(recorded_run, 1, columns)
    assert compare.main(["--checkout", "there", "--run", str(recorded_run)]) == 1
    said = capsys.readouterr().out
    assert "advantages is beyond its bound" in said
    (answer,) = [line for line in said.splitlines() if "reward answer" in line]
    assert "0.5" not in answer, "ours scores where the release does not: meant for this reward"


def test_a_schedule_over_several_epochs_departs_on_purpose(compare):
    settings = {"num_iterations": 1, "num_stages": 10, "sigma_start": 1e-2}
    ours, theirs = [0.0, 1e-2, 5e-3], [0.0, 1e-2, 1e-2]
    assert not compare.noise_row("σ", settings, ours, theirs).is_within
    row = compare.noise_row("σ", settings, ours, theirs, epochs=1.5)
    assert row.is_within and (row.departures, row.reason) == (1, "one schedule over all epochs")


def test_what_is_not_there_is_one_line(compare, tmp_path, capsys):
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    for arguments, words in (
        (["--run", str(tmp_path)], "--run and --inputs need --checkout"),
        (["--checkout", str(tmp_path), "--inputs", str(tmp_path / "none.json")], "none.json"),
        (["--checkout", str(tmp_path), "--inputs", str(empty)], "the inputs lack 'completion_ids'"),
        (["--checkout", str(tmp_path)], "No such file"),
    ):
        assert compare.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
