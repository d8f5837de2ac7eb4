"""`tools/reproduce.py`: statistics by hand, by simulation and by scipy; an experiment with stand-ins for the runs."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy import stats

from qerl_jax.config import Config, load
from qerl_jax.data.problems import load_dataset
from qerl_jax.io.assets import model_path
from qerl_jax.io.hf_config import model_config, stored_format
from qerl_jax.io.names import STORED_FORMAT

SMALL = ["--set", "max_steps=30", "batch_size=8", "num_generations=4"]


@pytest.fixture(scope="module")
def tools():
    """The program and its modules."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
    import reproduce
    from reproduction import analysis, metrics, plan, report, runs

    yield SimpleNamespace(reproduce=reproduce, analysis=analysis, metrics=metrics, plan=plan, report=report, runs=runs)
    sys.path.pop(0)


def stand_in(directory: Path, config: dict, accuracy: float, entropy: float = 0.5, steps: int | None = None) -> None:
    """A finished run: accuracy rises linearly from 0 to `accuracy`, which the evaluation finds too."""
    count = config["max_steps"] if steps is None else steps
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": i + 1,
            "num_tokens": i,
            "accuracy": accuracy * i / (count - 1),
            "sampling/entropy": entropy,
            "entropy": entropy + 1,
            "aqn/sigma": config.get("sigma_start", 0) * (i >= count // 2),
            "sampling/kl": 1.0 + (i >= count // 2),
        }
        for i in range(count)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = json.loads(TEMPLATE) | {"accuracy": accuracy, "pass_at_k": min(1.0, 2 * accuracy)}
    if steps is None:
        (directory / "evaluation.json").write_text(json.dumps({"after": evaluation}))


TEMPLATE = json.dumps(
    {
        "accuracy": 0, "low": 0, "high": 1, "pass_at_k": 0, "format": 1, "truncated": 0, "mean_length": 9,
        "problems": 4, "generations": 8, "failed": 0, "maj_at_k": None, "ties": 0, "unreadable": 0, "ungradable": 0,
        "ungraded": [], "estimates": {},
    }
)  # fmt: skip


def workers_that(tools, monkeypatch, run) -> None:
    """`run(config, environment)`, an exit code, takes the place of a run of the training program."""

    class StandIn(tools.runs.Worker):
        def run(self, config_file):
            load(str(config_file))  # raises what the program would refuse
            return run(yaml.safe_load(config_file.read_text()), self._environment)

    monkeypatch.setattr(tools.runs, "Worker", StandIn)


def end_with(tools, monkeypatch, code: int, name: str) -> None:
    """The run of that name ends with an exit code and does nothing."""
    whole = tools.runs.Worker.run

    def run(worker, config_file):
        return code if config_file.stem == name else whole(worker, config_file)

    monkeypatch.setattr(tools.runs.Worker, "run", run)


@pytest.fixture
def trainer(tools, monkeypatch):
    """Replaces the training program by stand-ins: AQN is better by 0.1, seeds differ by 0.01; returns the calls."""
    calls = []

    def calibrate(command, stdout, stderr, env, check):
        assert "calibrated.py" in command[1]
        Path(command[-1]).mkdir()  # raises where it is made twice
        (Path(command[-1]) / "made_from").write_text(" ".join(command[2:4]))
        return SimpleNamespace(returncode=0)

    def run(config, environment):
        calls.append((config, environment))
        noisy = config["sigma_start"] > 0
        wiggle = 0.001 * ((7 * config["seed"]) % 3 - 1) * noisy
        stand_in(Path(config["output_dir"]), config, 0.3 + 0.1 * noisy + 0.01 * config["seed"] + wiggle)
        return 0

    monkeypatch.setattr(tools.runs, "subprocess", SimpleNamespace(run=calibrate))
    workers_that(tools, monkeypatch, run)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # a run within this process sets one
        monkeypatch.delenv(name, raising=False)
    return calls


def test_the_plan_names_existing_cells_metrics_and_settings(tools):
    plan = tools.plan
    for comparison in plan.COMPARISONS:
        assert {comparison.treatment, comparison.baseline} <= set(
            plan.CELLS
        ) and comparison.metric in tools.metrics.METRICS
        assert comparison.margin > 0 and comparison.treatment != comparison.baseline
    assert len(set(plan.COMPARISONS)) == len(plan.COMPARISONS)
    assert set(plan.cells_of(list(plan.COMPARISONS))) == set(plan.CELLS)
    for cell in plan.CELLS:
        Config(
            **{**plan.config_of(cell, plan.COMMON), "model": "tiny"}
        )  # raises for an unknown or contradictory setting
    assert plan.config_of("aqn-rate3", {**plan.COMMON, "learning_rate": 2e-5})["learning_rate"] == pytest.approx(6e-5)
    assert plan.config_of("aqn", plan.COMMON)["learning_rate"] == plan.COMMON["learning_rate"]


def test_the_page_states_the_plan(tools):
    """Every comparison stands in the table of docs/claims.md, with its margin and family."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "claims.md").read_text()
    page = " ".join(page.split())
    for c in tools.plan.COMPARISONS:
        sign = {1: "> 0", -1: "< 0", 0: "≈ 0"}[c.direction]
        mark = {"primary": "*", "secondary": "", "amended": "+"}[c.family]
        assert f"| {c.claim}{mark} | {c.metric} | `{c.treatment}` − `{c.baseline}` | {sign} | {c.margin:g} |" in page
    assert page.count("` − `") == len(tools.plan.COMPARISONS)
    for name, value in tools.plan.COMMON.items():
        assert f"`{name}: {value!r}`".replace("'", "") in page


def test_interval_covers_the_mean(tools):
    """500 samples of 8 normal values: the mean lies in the 95 % interval in 95 % of them, within 3 standard errors."""
    samples = np.random.default_rng(0).normal(3, 2, (500, 8))
    found = [tools.analysis.interval(sample) for sample in samples]
    covered = np.mean([low <= 3 <= high for low, high in found])
    assert abs(covered - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 500)
    exact = [stats.t.interval(0.95, 7, sample.mean(), stats.sem(sample)) for sample in samples]
    assert np.mean([b - a for a, b in found]) == pytest.approx(np.mean([b - a for a, b in exact]), rel=0.1)
    assert tools.analysis.interval(np.array([1.0])) == (-math.inf, math.inf)


def comparison(tools, direction: int, margin: float = 0.1):
    return tools.plan.Comparison(4, "aqn", "bf16", tools.plan.FINAL, direction, margin)


def test_p_values(tools):
    """Against formulas of the t distribution, written out."""
    values = np.array([0.3, 0.1, 0.25, 0.2])
    t = values.mean() / (values.std(ddof=1) / 2)
    assert tools.analysis.p_value(values, comparison(tools, 1)) == pytest.approx(2 * stats.t.sf(t, 3))
    assert tools.analysis.p_value(-values, comparison(tools, 1)) == pytest.approx(2 * stats.t.sf(t, 3))
    small = np.array([0.02, -0.01, 0.0, 0.01])
    t = (0.1 - small.mean()) / (small.std(ddof=1) / 2)  # the upper margin is the nearer one
    assert tools.analysis.p_value(small, comparison(tools, 0)) == pytest.approx(stats.t.sf(t, 3))
    same = np.full(4, 0.05)
    assert [tools.analysis.p_value(same, comparison(tools, d)) for d in (1, 0)] == [0.0, 0.0]
    assert [tools.analysis.p_value(np.zeros(4), comparison(tools, d)) for d in (1, 0)] == [1.0, 0.0]
    assert tools.analysis.p_value(np.full(4, 0.2), comparison(tools, 0)) == 1.0


def test_holm_by_hand(tools):
    assert tools.analysis.holm([0.01, 0.04, 0.03], 3) == pytest.approx([0.03, 0.06, 0.06])
    assert tools.analysis.holm([0.01, 0.04], 5) == pytest.approx([0.05, 0.16])
    assert tools.analysis.holm([0.5, 0.9], 3) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("direction", "mean", "low", "high", "p", "expected"),
    [
        (1, 0.2, 0.1, 0.3, 0.01, "supported"),
        (1, 0.2, 0.1, 0.3, 0.06, "undecided"),  # not after correction
        (1, 0.05, 0.02, 0.08, 0.01, "not supported"),  # real, but smaller than what matters
        (1, 0.05, 0.01, 0.2, 0.01, "undecided"),
        (1, -0.2, -0.3, -0.1, 0.01, "reversed"),
        (1, -0.2, -0.3, -0.1, 0.06, "not supported"),
        (1, 0.0, -0.05, 0.05, 0.9, "not supported"),
        (1, 0.0, -0.5, 0.5, 0.9, "undecided"),
        (-1, -0.2, -0.3, -0.1, 0.01, "supported"),
        (-1, 0.2, 0.1, 0.3, 0.01, "reversed"),
        (0, 0.0, -0.05, 0.05, 0.01, "supported"),
        (0, 0.0, -0.05, 0.05, 0.06, "undecided"),
        (0, 0.2, 0.12, 0.3, 1.0, "not supported"),
        (0, 0.1, 0.05, 0.3, 1.0, "undecided"),
    ],
)  # fmt: skip
def test_verdicts(tools, direction, mean, low, high, p, expected):
    assert tools.analysis.verdict(comparison(tools, direction), mean, low, high, p) == expected


def run_of(tools, tmp_path, name, accuracy, **changes):
    stand_in(tmp_path / name, {"max_steps": 30}, accuracy, **changes)
    return tools.metrics.read_finished(tmp_path / name, 30)


def test_metrics_by_hand(tools, tmp_path):
    plan, values = tools.plan, tools.metrics.METRICS
    slow, fast = run_of(tools, tmp_path, "slow", 0.29, entropy=0.25), run_of(tools, tmp_path, "fast", 0.58)
    assert values[plan.FINAL](slow, slow) == 0.29 and values[plan.PASS_AT_K](slow, slow) == 0.58
    assert values[plan.MEAN_ACCURACY](slow, slow) == pytest.approx(0.145)
    assert values[plan.FIRST_ENTROPY](slow, slow) == values[plan.MEAN_ENTROPY](slow, slow) == 0.25
    assert values[plan.TRAINER_ENTROPY](slow, slow) == 1.25
    # slow: step s has accuracy 0.01 (s - 1); the middle of its first and last tenth of steps is 0.145, the mean of
    # steps s - 9 to s is 0.01 (s - 5.5): reached at s = 20. fast has twice that: 0.02 (s - 5.5) >= 0.145 at s = 13.
    assert values[plan.STEPS](slow, slow) == 20 and values[plan.STEPS](fast, slow) == 13
    assert values[plan.STEPS](slow, run_of(tools, tmp_path, "far", 2.9)) == 31


def test_an_unfinished_run_is_none(tools, tmp_path):
    assert run_of(tools, tmp_path, "short", 0.3, steps=12) is None
    assert tools.metrics.read_finished(tmp_path / "nowhere", 30) is None


def test_an_experiment_from_runs_to_verdict(tools, trainer, tmp_path, capsys):
    """Claim 8 has two cells, both with noise: no difference. Of claim 4 AQN is better by 0.1, the formats are equal."""
    flags = ["8", "4", "--model", "tiny", "--dataset", "arithmetic", "--out", str(tmp_path), "--seeds", "4", *SMALL]
    assert tools.reproduce.main([*flags, "--at-once", "2"]) == 0
    assert len(trainer) == 4 * 8  # aqn, aqn-uncorrected, bf16, full, nf4, mxfp4, nvfp4, nvfp4-calibrated
    models = {Path(config["output_dir"]).name[:-2]: config["model"] for config, _ in trainer}
    assert models.pop("nvfp4-calibrated") == str(tmp_path / "calibrated") and set(models.values()) == {"tiny"}
    assert (tmp_path / "calibrated" / "made_from").read_text() == "tiny arithmetic"
    config, environment = trainer[0]
    assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.250" and "CUDA_VISIBLE_DEVICES" not in environment
    assert {
        "model": "tiny",
        "dataset": "arithmetic",
        "eval_dataset": "arithmetic",
        "max_steps": 30,
    }.items() <= config.items()
    found = json.loads((tmp_path / "claims.json").read_text())
    assert found["meta"]["changes"] == {"max_steps": 30, "batch_size": 8, "num_generations": 4}
    rows = {(row["treatment"], row["baseline"], row["metric"]): row for row in found["rows"]}
    better, same = rows["aqn", "bf16", "final pass@1"], rows["aqn", "aqn-uncorrected", "final pass@1"]
    assert better["differences"] == pytest.approx([0.099, 0.1, 0.101, 0.099]) and better["seeds"] == 4
    assert better["verdict"] == "supported" and better["mean"] == pytest.approx(0.09975) and better["effect"] > 50
    assert same["verdict"] == "not supported" and same["mean"] == 0 and same["effect"] is None
    primary = sum(c.family == "primary" for c in tools.plan.COMPARISONS)
    assert better["adjusted"] == pytest.approx(primary * better["p"])
    calibrated = rows["nvfp4-calibrated", "nvfp4", "final pass@1"]  # both 0.3: p is 1, and stays it
    assert calibrated["family"] == "amended" and calibrated["verdict"] == "not supported"
    for name in ("claims.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "| 4* | final pass@1: aqn − bf16 |" in capsys.readouterr().out

    (run,) = [
        row
        for row in json.loads((tmp_path / "runs.json").read_text())["rows"]
        if (row["cell"], row["seed"]) == ("aqn", 2)
    ]
    figures = [run[name] for name in ("pass_at_1_after", "last_accuracy", "mean_accuracy", "mean_entropy")]
    last = np.mean(0.421 * np.arange(20, 30) / 29)
    assert figures == pytest.approx([0.421, last, 0.421 / 2, 0.5]) and run["pass_at_1_before"] is None
    assert (run["kl"], run["sigma"], run["first_trainer_entropy"]) == (2.0, 0.01, 1.5)  # KL where the noise is largest

    trainer.clear()  # the same command again: nothing is left to run, and the result is the same
    assert tools.reproduce.main(flags) == 0 and trainer == []
    assert json.loads((tmp_path / "claims.json").read_text())["rows"] == found["rows"]
    flags[flags.index("--seeds") + 1] = "5"
    assert tools.reproduce.main(flags) == 0 and {call[0]["seed"] for call in trainer} == {4}  # one more seed


def test_cells_run_alone_and_all_that_are_finished_are_analysed(tools, trainer, tmp_path, capsys):
    flags = ["8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", *SMALL]
    assert tools.reproduce.main([*flags, "--cells", "aqn-uncorrected"]) == 0
    assert {Path(config["output_dir"]).name for config, *_ in trainer} == {"aqn-uncorrected-0", "aqn-uncorrected-1"}
    assert "for a verdict: final pass@1: aqn − aqn-uncorrected" in capsys.readouterr().out
    trainer.clear()
    assert tools.reproduce.main([*flags, "--cells", "aqn"]) == 0 and len(trainer) == 2
    [row] = json.loads((tmp_path / "claims.json").read_text())["rows"]
    assert (row["treatment"], row["baseline"], row["seeds"]) == ("aqn", "aqn-uncorrected", 2)


@pytest.mark.parametrize("cell", ["bf16", "fp8"])
def test_cells_of_no_claim_are_refused(tools, trainer, tmp_path, cell, capsys):
    flags = ["8", "--model", "tiny", "--out", str(tmp_path), "--cells", "aqn", cell]
    assert tools.reproduce.main(flags) == 2 and not trainer
    assert f"--cells {cell}: not among the claims' cells, aqn aqn-uncorrected" in capsys.readouterr().err


def test_failed_runs_leave_their_comparisons_open(tools, trainer, tmp_path, monkeypatch, capsys):
    end_with(tools, monkeypatch, 3, "aqn-uncorrected-1")
    flags = ["8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "3", *SMALL]
    assert tools.reproduce.main(flags) == 1
    out = capsys.readouterr().out
    assert "aqn-uncorrected-1 ended with 3" in out and "for a verdict: final pass@1: aqn − aqn-uncorrected" in out
    assert json.loads((tmp_path / "claims.json").read_text())["rows"] == []


def test_a_run_that_is_stopped_is_the_last(tools, trainer, tmp_path, monkeypatch):
    end_with(tools, monkeypatch, 130, "aqn-uncorrected-0")
    flags = ["8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "3", *SMALL]
    assert tools.reproduce.main(flags) == 1
    assert [Path(config["output_dir"]).name for config, _ in trainer] == ["aqn-0", "aqn-1"]


def job(tools, directory: Path, cell: str, seed: int):
    """A run of the plan."""
    [found] = tools.runs.jobs_of([cell], [seed], {**tools.plan.COMMON, "model": "tiny"}, directory)
    return found


def test_each_gpu_has_its_workers_and_they_go_on_with_runs_of_the_same_programs(tools, trainer, tmp_path, monkeypatch):
    """Two GPUs, one run at a time on each: the ranks differ in their programs, noise and seed do not."""
    together = threading.Barrier(2, timeout=60)
    whole = tools.runs.Worker.run

    def in_step(worker, config_file):
        together.wait()
        return whole(worker, config_file)

    monkeypatch.setattr(tools.runs.Worker, "run", in_step)
    flags = ["7", "5", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", "--gpus", "0", "3", *SMALL]
    assert tools.reproduce.main([*flags, "--cells", "aqn", "lora-noise", "aqn-rank8", "aqn-rank16"]) == 0
    order = {gpu: [] for gpu in "03"}
    for config, environment in trainer:
        assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.940"
        order[environment["CUDA_VISIBLE_DEVICES"]].append(
            (config["lora_rank"], config.get("noise_target", "norms"), config["seed"])
        )
    of_32 = [(32, target, seed) for seed in (0, 1) for target in ("norms", "lora")]
    assert sorted(order.values()) == sorted([of_32, [(rank, "norms", seed) for rank in (8, 16) for seed in (0, 1)]])


def test_programs_are_compiled_by_one_process_first(tools, tmp_path):
    """Others with the same programs begin with others', or wait for its first step or its end."""
    jobs = [job(tools, tmp_path, cell, 0) for cell in ("aqn", "aqn-cosine", "nf4", "aqn-linear")]
    jobs[0].directory.mkdir()
    metrics = jobs[0].directory / "metrics.jsonl"
    metrics.write_text("a step of a run that was interrupted\na step after its checkpoint\n")
    waiting = tools.runs.Waiting(jobs)
    assert [waiting.next_after(None).cell for _ in range(2)] == ["aqn", "nf4"]
    metrics.write_text("a step of a run that was interrupted\n")
    found = []
    thread = threading.Thread(target=lambda: found.append(waiting.next_after(None).cell))
    thread.start()
    thread.join(3 * tools.runs.POLL_SECONDS)
    assert found == [] and thread.is_alive()
    metrics.write_text(metrics.read_text() + "a step\n")
    thread.join(60)
    assert found == ["aqn-cosine"]
    assert waiting.next_after(jobs[0]).cell == "aqn-linear" and waiting.next_after(None) is None

    waiting = tools.runs.Waiting(jobs[:2])
    first = waiting.next_after(None)
    assert waiting.next_after(first).cell == "aqn-cosine"  # it ended, with or without a step


def test_programs_that_have_made_a_step_hold_up_no_process(tools, tmp_path):
    """One process has begun its next run of a kind whose first made a step; another kind's process gets the third."""
    jobs = [job(tools, tmp_path, "aqn", seed) for seed in range(4)]
    waiting = tools.runs.Waiting(jobs)
    first = waiting.next_after(None)
    first.directory.mkdir()
    (first.directory / "metrics.jsonl").write_text("a step\n")
    assert [waiting.next_after(last).seed for last in (None, first, None)] == [1, 2, 3]


def test_a_process_that_cannot_be_started_ends_the_experiment(tools, trainer, tmp_path, monkeypatch):
    """Another that waits for the first step of its run waits no longer."""

    def run(worker, config_file):
        time.sleep(2 * tools.runs.POLL_SECONDS)
        raise OSError("no memory for a process")

    monkeypatch.setattr(tools.runs.Worker, "run", run)
    flags = ["8", "--cells", "aqn", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", "--at-once", "2", *SMALL]
    with pytest.raises(OSError, match="no memory for a process"):
        tools.reproduce.main(flags)


def test_no_process_runs_far_ahead_of_the_runs_that_wait(tools, tmp_path):
    """One process, cells of two kinds of programs: its next run is at most one seed ahead of the first that waits."""
    jobs = [job(tools, tmp_path, cell, seed) for seed in range(6) for cell in ("bf16", "aqn-rank8")]
    waiting, last, order = tools.runs.Waiting(jobs), None, []
    while (last := waiting.next_after(last)) is not None:
        order.append((last.cell, last.seed))
    bf16, rank8 = ([(cell, seed) for seed in range(6)] for cell in ("bf16", "aqn-rank8"))
    assert order == [*bf16[:2], *rank8[:4], *bf16[2:6], *rank8[4:]]


def test_a_worker_does_one_run_after_the_other_and_survives_failures(tools, tmp_path):
    """The real program: two refused configs in two processes, each told in its own log."""
    worker = tools.runs.Worker(os.environ)
    for name in ("a.b-0", "c-1"):
        (tmp_path / f"{name}.yaml").write_text(f"model: {tmp_path / name}\n")
        assert worker.run(tmp_path / f"{name}.yaml") == 2
        log = (tmp_path / f"{name}.log").read_text()
        assert log.startswith("error: ") and name in log
    worker.close()


def test_an_experiment_keeps_its_settings(tools, trainer, tmp_path, capsys):
    flags = ["8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2"]
    assert tools.reproduce.main([*flags, *SMALL]) == 0
    assert tools.reproduce.main([*flags, *SMALL, "learning_rate=2e-4"]) == 2
    assert "begun with learning_rate 0.0001, now it is 0.0002" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["sigma_start=1", "seed=3", "weight-format=bf16", "max_steps"])
def test_what_the_plan_sets_cannot_be_set(tools, tmp_path, flag, capsys):
    with pytest.raises(SystemExit):
        tools.reproduce.main(["8", "--model", "tiny", "--out", str(tmp_path), "--set", flag])
    assert flag.partition("=")[0].replace("-", "_") in capsys.readouterr().err


def test_the_pilot_chooses_the_learning_rate_of_bf16(tools, trainer, tmp_path, monkeypatch, capsys):
    whole = tools.runs.Worker.run

    def best_at_3e4(worker, config_file):
        code = whole(worker, config_file)
        config = trainer[-1][0]
        stand_in(Path(config["output_dir"]), config, 0.5 - abs(config["learning_rate"] - 3e-4))
        return code

    monkeypatch.setattr(tools.runs.Worker, "run", best_at_3e4)
    assert tools.reproduce.main(["--pilot", "--model", "tiny", "--out", str(tmp_path), *SMALL]) == 0
    assert capsys.readouterr().out.endswith("--set learning_rate=0.0003\n")
    assert {call[0]["seed"] for call in trainer} == {100} and {call[0]["weight_format"] for call in trainer} == {"bf16"}
    assert sorted(call[0]["learning_rate"] for call in trainer) == [3e-5, 1e-4, 3e-4, 1e-3]


def test_list_runs_nothing(tools, trainer, tmp_path, capsys):
    assert tools.reproduce.main(["8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[0] == f"{tmp_path / 'aqn-0'} to do" and not trainer


def test_report_analyses_what_was_run_elsewhere(tools, trainer, tmp_path, capsys):
    """Same rows from a moved directory and another path of the model, nothing run, and `meta` still of the runs."""
    here, there = tmp_path / "here", tmp_path / "there"
    common = ["8", "--seeds", "2", *SMALL]
    assert tools.reproduce.main([*common, "--model", "elsewhere/tiny", "--out", str(here)]) == 0
    found = json.loads((here / "claims.json").read_text())
    found["meta"]["commit"] = "of the runs"
    (here / "claims.json").write_text(json.dumps(found))
    here.rename(there)
    trainer.clear()
    flags = [*common, "--model", "tiny", "--out", str(there), "--report"]
    assert tools.reproduce.main(flags) == 0 and trainer == []
    again = json.loads((there / "claims.json").read_text())
    assert [row | {"model": "tiny"} for row in found["rows"]] == again["rows"]
    assert again["meta"]["commit"] == "of the runs" and again["meta"]["report_commit"] not in ("", "of the runs")

    assert tools.reproduce.main([*flags, *SMALL, "learning_rate=2e-4"]) == 2
    assert "begun with learning_rate 0.0001, now it is 0.0002" in capsys.readouterr().err
    (there / "aqn-0.yaml").unlink()
    assert tools.reproduce.main(flags) == 2
    assert "aqn-0.yaml, the settings of a finished run, is missing" in capsys.readouterr().err


def test_report_leaves_out_what_was_not_run(tools, trainer, tmp_path, capsys):
    flags = ["8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", "--report", *SMALL]
    assert tools.reproduce.main(flags) == 0 and trainer == []
    assert "for a verdict: final pass@1: aqn − aqn-uncorrected" in capsys.readouterr().out


def test_fewest_admits_comparisons_on_the_first_seeds_that_both_cells_have(tools, trainer, tmp_path, capsys):
    """Seeds end at the first that is missing; later ones are not analysed."""
    flags = ["4", "8", "--model", "tiny", "--out", str(tmp_path), "--seeds", "5", "--report", *SMALL]
    finished = {"aqn": (0, 1, 2, 3, 4), "aqn-uncorrected": (0, 1, 2, 4), "full": (0, 1), "nvfp4": (1, 2)}
    changes = {"max_steps": 30, "batch_size": 8, "num_generations": 4}
    common = {"model": "tiny", "dataset": "word_problems", "eval_dataset": "word_problems"}
    for cell, seed in [(cell, seed) for cell, seeds in finished.items() for seed in seeds]:
        config = tools.plan.config_of(cell, tools.plan.COMMON | changes | common) | {"seed": seed}
        (tmp_path / f"{cell}-{seed}.yaml").write_text(yaml.safe_dump(config))
        stand_in(tmp_path / f"{cell}-{seed}", config, 0.3 + 0.01 * seed + (cell == "aqn"))
    assert tools.reproduce.main([*flags, "--fewest", "3"]) == 0
    rows = json.loads((tmp_path / "claims.json").read_text())["rows"]
    assert [(row["treatment"], row["baseline"], row["seeds"]) for row in rows] == [("aqn", "aqn-uncorrected", 3)]
    assert rows[0]["differences"] == pytest.approx([1.0] * 3)
    assert "for a verdict: " in (out := capsys.readouterr().out) and "aqn − full" in out

    assert tools.reproduce.main([*flags, "--fewest", "2"]) == 0
    rows = json.loads((tmp_path / "claims.json").read_text())["rows"]
    assert json.loads((tmp_path / "claims.json").read_text())["meta"]["fewest_seeds"] == 2
    found = {(row["baseline"], row["seeds"]) for row in rows}
    assert found == {("aqn-uncorrected", 3), ("full", 2)}  # nvfp4 lacks seed 0
    assert tools.reproduce.main(flags) == 0  # without it all five seeds are needed
    assert json.loads((tmp_path / "claims.json").read_text())["rows"] == []
    for fewest in ("1", "6"):
        with pytest.raises(SystemExit):
            tools.reproduce.main([*flags, "--fewest", fewest])
        assert f"--fewest {fewest}: 2 to 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cells", "panels"),
    [
        (["bf16", "aqn"], [["bf16", "aqn"]]),
        (["aqn", "aqn-rank8"], [["aqn", "aqn-rank8"]]),
        (["bf16", "aqn-rank8", "lora-noise"], [["bf16"], ["lora-noise"], ["aqn-rank8"]]),
        (["bf16", "aqn", "aqn-sigma3"], [["bf16", "aqn"], ["aqn", "aqn-sigma3"]]),
        (["nf4", "aqn", "aqn-sigma3", "aqn-rank8"], [["nf4", "aqn"], ["aqn", "aqn-sigma3"], ["aqn", "aqn-rank8"]]),
    ],
)
def test_curves_of_noises_and_ranks_stand_apart(tools, tmp_path, monkeypatch, cells, panels):
    """The legends name each cell, and a line is the mean over the cell's own seeds."""
    import matplotlib.pyplot as plt

    runs = {}
    for cell in cells:
        for seed in range(3 if cell == "aqn" else 2):
            stand_in(tmp_path / f"{cell}-{seed}", {"max_steps": 30}, 0.3 + 0.1 * seed, entropy=0.5 + seed)
            runs[cell, seed] = tools.metrics.read_finished(tmp_path / f"{cell}-{seed}", 30)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    tools.report.draw_curves(runs, range(8), 2, tmp_path / "curves.png")
    axes = drawn[0].axes
    assert [[line.get_label() for line in panel.lines] for panel in axes[1::2]] == panels
    entropies = {line.get_label(): line.get_ydata()[0] for panel in axes[1::2] for line in panel.lines}
    assert entropies == {cell: 1.5 if cell == "aqn" else 1.0 for cell in cells}


def test_only_the_runs_of_the_calibrated_model_wait_for_it(tools, trainer, tmp_path, monkeypatch):
    """The calibration, which gets a part of the GPU, ends when the four other runs have."""
    whole, others = tools.runs.subprocess.run, threading.Event()

    def calibrate(command, env, **options):
        assert others.wait(60) and env["XLA_CLIENT_MEM_FRACTION"] == "0.375" and env["CUDA_VISIBLE_DEVICES"] == "3"
        return whole(command, env=env, **options)

    def run(worker, config_file):
        code = of_stand_in(worker, config_file)
        if len(trainer) == 4:
            others.set()
        return code

    of_stand_in = tools.runs.Worker.run
    monkeypatch.setattr(tools.runs.Worker, "run", run)
    monkeypatch.setattr(tools.runs, "subprocess", SimpleNamespace(run=calibrate))
    flags = ["1", "4", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", "--gpus", "0", "3", *SMALL]
    assert tools.reproduce.main([*flags, "--cells", "bf16", "nvfp4-calibrated", "nvfp4"]) == 0
    last = [Path(config["model"]).name for config, _ in trainer[4:]]
    assert last == ["calibrated"] * 2 and len(trainer) == 6
    assert {environment["XLA_CLIENT_MEM_FRACTION"] for _, environment in trainer} == {"0.375"}


def test_a_failed_calibration_fails_the_experiment(tools, trainer, tmp_path, monkeypatch, capsys):
    """The other runs are made and kept."""
    monkeypatch.setattr(tools.runs, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1)))
    flags = ["1", "--model", "tiny", "--out", str(tmp_path), "--seeds", "2", *SMALL]
    assert tools.reproduce.main([*flags, "--cells", "bf16", "nvfp4-calibrated"]) == 2
    assert [Path(config["output_dir"]).name for config, _ in trainer] == ["bf16-0", "bf16-1"]
    assert f"tiny was not calibrated, see {tmp_path / 'calibrated.log'}" in capsys.readouterr().err


def test_calibration_reads_the_models_own_completions(tools, tmp_path, monkeypatch):
    from reproduction import calibrated

    def calibrate(model, out, texts, sequences):
        lines = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
        assert sequences == len(lines)
        calls.append((model, out, lines))

    calls = []
    monkeypatch.setattr(calibrated, "TRAIN_TEXTS", 3)
    monkeypatch.setattr(calibrated, "calibrate_checkpoint", calibrate)
    calibrated.main("tiny", "arithmetic", str(tmp_path / "calibrated"))
    ((model, out, lines),) = calls
    assert model == model_path("tiny") and out == str(tmp_path / "calibrated") and len(lines) == 3
    questions = [problem.prompt for problem in load_dataset("arithmetic", "train", limit=3).problems]
    for question, line in zip(questions, lines, strict=True):
        assert question in line and "<think>" in line


@pytest.mark.slow
def test_the_calibrated_model_is_nvfp4_of_the_model(tools, tmp_path, monkeypatch):
    """On eight texts: a checkpoint of the model's shapes, stored in NVFP4, with the report of its calibration."""
    from reproduction import calibrated

    monkeypatch.setattr(calibrated, "TRAIN_TEXTS", 8)
    calibrated.main("tiny", "arithmetic", str(tmp_path / "calibrated"))
    config = model_config(tmp_path / "calibrated")
    assert config == model_config(model_path("tiny"))
    assert STORED_FORMAT[stored_format(tmp_path / "calibrated")] == "nvfp4"
    assert (tmp_path / "calibrated" / "calibration.json").exists()


@pytest.mark.slow
def test_with_real_runs(tools, tmp_path):
    """Four runs of one step on the bundled policy, and once more, when nothing is left to do."""
    settings = "max_steps=2 batch_size=8 num_generations=4 max_prompt_length=80 max_completion_length=24 lora_rank=4"
    settings += " eval_samples=4 eval_num_generations=2 dtype=float32"
    flags = ["8", "--model", str(model_path("tiny")), "--dataset", "arithmetic", "--out", str(tmp_path), "--seeds", "2"]
    for _ in range(2):
        assert tools.reproduce.main([*flags, "--at-once", "2", "--set", *settings.split()]) == 0
    (row,) = json.loads((tmp_path / "claims.json").read_text())["rows"]
    assert len(row["differences"]) == 2
    assert Config(**yaml.safe_load((tmp_path / "aqn-0" / "config.yaml").read_text())).lora_rank == 4


RESULTS = Path(__file__).resolve().parent.parent / "tools" / "results"


def test_noise_on_the_adapters_has_the_kl_of_that_on_the_norms(tools):
    """Its σ is that of `aqn` times the factor that was measured, with the same schedule; and 0.3 and 3 times that."""
    rows = json.loads((RESULTS / "cpu" / "noise.json").read_text())["rows"]
    norms, lora = ({row["noise_target"]: row for row in rows}[target] for target in ("norms", "lora"))
    factor = math.sqrt(norms["kl"] / lora["kl"])
    assert lora["sigma"] == norms["sigma"] == 0.01 and round(factor, 1) == tools.plan.LORA_SIGMA
    for name, multiple in (("lora-noise", 1), ("lora-noise-sigma0.3", 0.3), ("lora-noise-sigma3", 3)):
        cell = tools.plan.CELLS[name]
        assert cell["noise_target"] == "lora" and cell["weight_format"] == "nvfp4"
        sigmas = [cell["sigma_start"], cell["sigma_end"]]
        assert sigmas == pytest.approx([multiple * tools.plan.LORA_SIGMA * sigma for sigma in (1e-2, 5e-4)])
    assert {"noise_target", "sigma_start"} <= {key for own in tools.plan.CELLS.values() for key in own}


def test_the_datasets_of_the_choice_are_those_that_the_plan_allows(tools):
    """word_problems:2-6 and every range with lower pass@1 that is between 15 and 40 %, pass@64 below 95 %: means over
    its operations, each as often, of the figures that pretraining recorded.
    """
    (row, *_) = json.loads((RESULTS / "nvidia-h200" / "pretrain_30m.json").read_text())["rows"]
    figures = row["heldout"]

    def mean(name, low, high):
        return np.mean([figures[f"{name}_of_{n}"] for n in range(low, high + 1)])

    ranges = [(low, high) for low in range(2, 11) for high in range(low, 11)]
    allowed = {
        f"word_problems:{low}-{high}"
        for low, high in ranges
        if 0.15 <= mean("pass_at_1", low, high) <= min(0.4, mean("pass_at_1", 2, 6))
        and mean("pass_at_64", low, high) < 0.95
    }
    assert allowed == set(tools.plan.FITNESS_DATASETS)
    for name in allowed:
        assert load_dataset(name, "test", limit=1).problems
    assert not {*range(tools.plan.SEEDS), tools.plan.PILOT_SEED} & set(tools.plan.FITNESS_SEEDS)


GAINS = {"word_problems:2-6": 0.009, "word_problems:2-7": 0.02, "word_problems:3-5": 0.03, "word_problems:3-6": 0.015}
FITNESS = ["--fitness", "--model", "tiny", "--set", "max_steps=150", "batch_size=8", "num_generations=4"]


@pytest.fixture
def two_lengths(tools, monkeypatch):
    """Stand-ins for runs that gain `GAINS` between 100 and 150 steps, give or take 0.001; on word_problems:3-5 with
    little entropy. Returns the configs.
    """
    configs = []

    def run(config, environment):
        configs.append(config)
        directory, name, long = Path(config["output_dir"]), config["dataset"], config["max_steps"] == 150
        gain = GAINS[name] + 0.001 * (config["seed"] - 102)
        stand_in(directory, config, 0.3 + long * gain, 0.1 if name.endswith("3-5") else 0.4)
        evaluations = json.loads((directory / "evaluation.json").read_text())
        evaluations["before"] = evaluations["after"] | {"accuracy": 0.2}
        (directory / "evaluation.json").write_text(json.dumps(evaluations))
        return 0

    workers_that(tools, monkeypatch, run)
    return configs


def test_the_fitness_runs_choose_the_dataset_on_which_longer_bf16_runs_gain_most(tools, two_lengths, tmp_path, capsys):
    """3-5 gains most but has too little entropy, 2-6 gains less than a point: it is 2-7."""
    assert tools.reproduce.main([*FITNESS, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("--dataset word_problems:2-7\n")
    assert "| word_problems:2-7 | 20.0 % | 30.0 % | 32.0 % | +2.00 (+1.9, +2.0, +2.1) | 0.400 | yes |" in out
    assert len(two_lengths) == 4 * 3 * 2
    for config in two_lengths:
        assert config["eval_dataset"] == config["dataset"] and config["max_steps"] in (100, 150)
        assert config["weight_format"] == "bf16" and config["sigma_start"] == 0 and config["seed"] in (101, 102, 103)
    rows = {row["dataset"]: row for row in json.loads((tmp_path / "fitness.json").read_text())["rows"]}
    assert [rows[name]["is_fit"] for name in GAINS] == [False, True, False, True]
    assert [rows[name]["gain"] for name in GAINS] == pytest.approx(list(GAINS.values()))
    two_lengths.clear()  # nothing is left to run
    assert tools.reproduce.main([*FITNESS, "--out", str(tmp_path), "--report"]) == 0 and not two_lengths


def test_no_dataset_is_chosen_where_none_is_fit(tools, two_lengths, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(GAINS, "word_problems:2-7", 0.005)
    monkeypatch.setitem(GAINS, "word_problems:3-6", -0.02)
    assert tools.reproduce.main([*FITNESS, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("none of the datasets is fit for the plan with this policy\n")


def test_the_choice_waits_for_all_runs(tools, two_lengths, tmp_path, monkeypatch, capsys):
    end_with(tools, monkeypatch, 3, "fitness-word_problems-3-6-150-102")
    assert tools.reproduce.main([*FITNESS, "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not complete" in out and "--dataset" not in out and "| word_problems:3-6 |" not in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset", "arithmetic"], "not --dataset arithmetic"),
        (["--pilot"], "not allowed with argument"),
        (["--set", "max_steps=100"], "max_steps 100 is not above the 100"),
    ],
)
def test_what_the_choice_refuses(tools, two_lengths, tmp_path, capsys, flags, words):
    try:
        code = tools.reproduce.main([*FITNESS, "--out", str(tmp_path), *flags])
    except SystemExit as end:
        code = end.code
    assert code == 2 and words in capsys.readouterr().err and not two_lengths
