"""Every program of `tools` starts and explains itself; those that are cheap do a little of their work."""

import contextlib
import inspect
import json
import sys
from pathlib import Path

import jax
import pytest
import what_fits
from helpers import fp32_policy
from replicas import on_replicas

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.compilation import committed
from qerl_jax.run import prepare

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if "ArgumentParser(" in path.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, tool, monkeypatch, capsys):
    """The program can be imported, and its flags are described."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        tool(name).main()
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out


def test_every_planted_bug_occurs_in_the_code(tool):
    """A change of the code that leaves a bug of `tools/mutations.toml` behind has to mend it."""
    assert len(tool("mutate").load()) >= 30


def test_the_ptx_of_many_kernels_is_compared(tool):
    """Each case is made into the config of its kernel."""
    kernels = {case.kernel for case in tool("compare_ptx").all_cases()}
    assert kernels == {"gemm", "skinny", "prologue", "attention", "rope"}


GPUS = [name if name == "RTX 4090" else pytest.param(name, marks=pytest.mark.nightly) for name in what_fits.GPUS]


@pytest.mark.parametrize("name", GPUS)
def test_the_readme_says_what_fits_a_gpu(name):
    row = what_fits.row_of(name, what_fits.parser_of().parse_args([]))
    assert row in (ROOT / "README.md").read_text().splitlines()


ONLY = ("seed", "learning_rate", "yaml ", "reward ", "flag ")


@pytest.mark.parametrize("only", [*ONLY, pytest.param("", marks=pytest.mark.nightly)])
def test_hostile_inputs_are_read_as_stated_or_refused(tool, only):
    failed, passed = tool("hostile_inputs").failures(only)
    assert not failed and passed > (350 if only == "" else 15)


def test_random_weights_are_loaded_by_the_arguments_of_stored_ones(tool):
    """`prepare` passes them all by place."""
    arguments = inspect.signature(prepare.load).parameters
    with contextlib.ExitStack() as stack:
        tool("bench_run").stand_in(stack, "0.5B", model_path("tiny"), 0.0)
        assert inspect.signature(prepare.load).bind(*arguments)


@pytest.mark.nightly
def test_a_run_of_random_weights_is_measured(tool, monkeypatch, tmp_path):
    """Two steps of four groups with rewards 0 and 1 in turn, or equal in half of them: those do not train."""
    monkeypatch.setitem(tool("make_checkpoint").SIZES, "micro", (32, 64, 2, 4, 2, 8, 512, True))
    flags = ["--out", str(tmp_path), "--random", "micro", "--tokenizer", str(model_path("tiny")), "--equal", "0.5"]
    flags += ["--dataset", "arithmetic", "--max-prompt-length", "200", "--max-completion-length", "12"]
    flags += ["--batch-size", "16", "--num-generations", "4", "--max-steps", "2", "--weight-format", "bf16"]
    tool("bench_run").main([*flags, "--dtype", "float32", "--reward-workers", "0", "--lora-rank", "4"])
    [row] = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert (tmp_path / "run.png").stat().st_size > 0
    assert (row["name"], row["steps"], row["batch"], row["random"]) == ("micro", 2, 16, True)
    assert row["equal_groups"] == 0.5
    assert row["trained_share"] == pytest.approx(1 - row["equal_groups"], abs=0.1)
    assert 0 < row["step_seconds"] < row["first_step_seconds"] < row["seconds"]
    assert sum(row["run_seconds"].values()) == pytest.approx(row["seconds"]) and min(row["run_seconds"].values()) >= 0
    phases = sum(row[f"{phase}_seconds"] for phase in ("rollout", "grading", "update"))
    assert 0 < phases <= row["step_seconds"] and row["compiled"] + row["cached"] > 10


@pytest.mark.nightly
def test_trl_does_the_same_job(tool, tmp_path):
    """Two steps of the bundled policy on a CPU, TRL without vLLM: a row and a bar each."""
    rows = [json.dumps({"problem": f"What is {i} + {i}?", "answer": str(2 * i)}) for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = ["--formats", "bf16", "--no-vllm", "--coin", "0.5", "--steps", "2", "--batch", "8", "--group", "4"]
    places = [str(model_path("tiny")), str(tmp_path / "rows.jsonl"), "--out", str(tmp_path)]
    tool("bench_trl").main([*places, *flags, "--micro-batch", "4", "--length", "12", "--rank", "4"])
    ours, trl = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert ours["name"] == "tiny-qwen2" and trl["name"].startswith("TRL ")
    for row in (ours, trl):
        assert (row["steps"], row["batch"], row["completion_len"]) == (2, 8, 12) and 0 < row["tokens"] <= 96
        assert 0 < row["step_seconds"] < row["first_step_seconds"] < row["seconds"]
    assert (tmp_path / "run.png").stat().st_size > 0


@pytest.mark.nightly
def test_the_scaling_of_a_step_is_measured_and_shown(tool, micro_dir, tmp_path, capsys):
    bench = tool("bench_scaling")
    shape = {"weak": 4, "group": 2, "prompt-len": 16, "completion-len": 4, "lora-rank": 2, "repeats": 1}
    words = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    args, policy = bench.parse(["0.5B", "--out", str(tmp_path), *words]), committed(fp32_policy(micro_dir, rank=2))
    rows = on_replicas(2, lambda replicas: bench.measure(args, policy, replicas, "weak", 4))
    for row in rows:
        assert (row["devices"], row["batch"]) == (2, 8) and row["step_seconds"] > row["rollout_seconds"] > 0
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(2 * 4 * 4)
        assert row["update_seconds"] > 0 and row["gather_seconds"] > 0 and row["all_reduce_seconds"] > 0
        assert all(row[name] > 0 for name in bench.PARTS)
        adapters = jax.tree.leaves(policy.lora)
        assert row["all_reduce_arrays"] == len(adapters) and row["all_reduce_bytes"] == 4 * sum(
            a.size for a in adapters
        )
        assert {name: len(each) for name, each in row["each"].items()} == {"rollout": 1, "update": 1, "step": 1}
    alone = rows[0] | {"kind": "one", "devices": 1, "batch": 4, "step_seconds": 3.0}
    others = [alone | {"batch": 8}, alone | {"lengths": "gsm8k"}]
    found = bench.compared([alone, *others, rows[0] | {"step_seconds": 2.0}])
    bench.show(found)
    bench.draw_curves(found, tmp_path)
    assert (tmp_path / "scaling.png").stat().st_size > 0
    assert "weak, 2 devices, batch 8: rollout 1.000, update 1.000, step 1.500; " in capsys.readouterr().out


def test_scaling_has_a_panel_for_each_case_with_all_of_its_points(tool, tmp_path, monkeypatch):
    """NVFP4 and BF16 on one and two devices, which make 0.9 and 0.5 of one device's work a second each."""
    bench, figures, rows = tool("bench_scaling"), [], []
    monkeypatch.setattr(bench.plt, "close", figures.append)
    shape = {"group": 2, "prompt_len": 8, "completion_len": 8, "lengths": "fixed", "lora_rank": 2}
    for kind, speed in (("nvfp4", 0.9), ("bf16", 0.5)):
        for scaling, devices, seconds in (("one", 1, 1.0), ("weak", 2, 1 / speed)):
            case = {"model": "7b", "format": kind, "kind": scaling, "devices": devices, "batch": 4 * devices, **shape}
            times = {f"{name}_seconds": seconds for name in bench.RATIOS}
            rows.append({**case, **times, "each": {name: [seconds] for name in bench.RATIOS}})
    bench.draw_curves(bench.compared(rows), tmp_path)
    [figure] = figures
    for axis, (name, speed) in zip(figure.axes, (("NVFP4", 0.9), ("BF16", 0.5)), strict=True):
        assert axis.get_title() == f"7B {name}, 4 completions a GPU, fixed"
        points = [list(curve.lines[0].get_ydata()) for curve in axis.containers]
        assert points == [pytest.approx([1, speed])] * len(bench.RATIOS)
        low, high = axis.get_ylim()
        assert low <= speed < 1 <= high


def test_stored_results_have_meta_and_flat_rows():
    for path in (ROOT / "tools" / "results").glob("*/*.json"):
        content = json.loads(path.read_text())
        assert {"meta", "rows"} <= set(content), path
        assert all(isinstance(row, dict) for row in content["rows"]), path
