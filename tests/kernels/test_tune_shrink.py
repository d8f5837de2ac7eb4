"""What the tool that times plans of the fused operations makes of its measurements, and what it has found."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from qerl_kernels.lora_shrink import plan

STORED = Path(__file__).parents[2] / "tools" / "results" / "nvidia-h200" / "shrink_plans.json"


@pytest.fixture
def tune_shrink(tool):
    return tool("tune_shrink")


def test_decode_takes_plans_that_were_measured_to_be_good(tune_shrink):
    """All that decode takes for 7B at these numbers of tokens was timed, and is within 3 % of the best of its plans."""
    found = tune_shrink.regrets(json.loads(STORED.read_text())["rows"])
    assert len(found) == 54
    for key, (best, taken) in found.items():
        assert taken is not None and taken <= 1.03 * best, (key, best, taken)


def test_a_model_that_puts_another_first_is_seen(monkeypatch, tune_shrink):
    """Two plans, 3 and 2 us; without the model's choice among them there is nothing to compare with."""
    task = tune_shrink.task_of("qkv_7b", 8, 32, False)
    good, bad, third = plan.plans(task)[:3]
    rows = [{**tune_shrink.Trial("qkv_7b", 8, 32, False, how).row(), "us": us} for how, us in ((bad, 3.0), (good, 2.0))]
    for taken, expected in ((bad, (2.0, 3.0)), (good, (2.0, 2.0)), (third, (2.0, None))):
        monkeypatch.setattr(plan, "plan_for", lambda task, taken=taken: taken)
        assert tune_shrink.regrets(rows) == {("qkv_7b", 8, 32, False): expected}


def test_what_is_timed(tune_shrink):
    """A norm never in parts, x A alone never without adapters, of each the model's first."""
    trials = tune_shrink.wanted(["gate_up_7b", "o_7b", "down_7b"], [8, 64], 32, 2)
    kinds = {(trial.case, trial.rank, trial.in_parts) for trial in trials}
    assert kinds == {
        ("gate_up_7b", 32, False), ("gate_up_7b", 0, False), ("o_7b", 32, False), ("o_7b", 32, True),
        ("down_7b", 32, False), ("down_7b", 32, True), ("down_7b", 0, False),
    }  # fmt: skip
    for m in (8, 64):
        of = [trial for trial in trials if trial[:4] == ("down_7b", m, 32, True)]
        assert len(of) == 2 and of[0].how == plan.plan_for(of[0].task())
        (gate_up,), a = tune_shrink.shapes_of(of[0].task())
        assert gate_up.shape == (m, 2 * 18944) and a.shape == (18944, 32)
    inputs, none = tune_shrink.shapes_of(tune_shrink.task_of("qkv_7b", 8, 0, False))
    assert [(x.shape, x.dtype) for x in inputs] == [
        ((8, 3584), jnp.float32), ((8, 3584), jnp.bfloat16), ((3584,), jnp.float32)
    ] and none is None  # fmt: skip


def test_a_plans_time_is_the_median_of_its_own_calls(monkeypatch, tune_shrink):
    """Kernel i of plan p takes 1000 p + i ns; others between them do not count, nor do the first four of a plan."""
    trials = tune_shrink.wanted(["o_7b"], [8], 32, 2)[:3]
    monkeypatch.setattr(tune_shrink, "FLUSH_FLOATS", 4)
    monkeypatch.setattr(tune_shrink.ahead, "compile_all", lambda build, programs, jobs: ((p, b"") for p in programs))
    monkeypatch.setattr(tune_shrink.ahead, "load", lambda executable, *args: lambda inputs, a: (inputs[0], a))
    calls = tune_shrink.CALLS

    def profiled(run):
        run()
        kernel = sys.modules["record"].Kernel
        of = lambda p, i: [kernel(0.0, 9e9, "sweep"), kernel(0.0, 1000.0 * p + i, "lora_plain_shrink")]  # noqa: E731
        return [kernel for p in range(3) for i in range(calls) for kernel in of(p, i)]

    monkeypatch.setattr(sys.modules["record"], "profiled", profiled)
    middle = sum(range(tune_shrink.SKIPPED, calls)) / (calls - tune_shrink.SKIPPED)
    assert tune_shrink.durations(trials, 1) == pytest.approx([(1000 * p + middle) * 1e-3 for p in range(3)])
    monkeypatch.setattr(sys.modules["record"], "profiled", lambda run: profiled(run)[2:])
    with pytest.raises(SystemExit, match=f"{3 * calls - 1} kernels, {3 * calls} were called"):
        tune_shrink.durations(trials, 1)
