"""The tool that times configurations of the decode prologues: what it makes of its measurements, and its results."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from qerl_kernels.decode_prologue import config

STORED = Path(__file__).parents[2] / "tools" / "results" / "nvidia-h200" / "decode_prologue_configs.json"


@pytest.fixture
def tuner(tool):
    return tool("tune_decode_prologue")


def test_decode_takes_configurations_that_were_measured_to_be_good(tuner):
    """Every configuration that decode takes for 7B was timed and is within 3 % of the best."""
    found = tuner.regrets(json.loads(STORED.read_text())["rows"])
    assert len(found) == 54
    for key, (best, taken) in found.items():
        assert taken is not None and taken <= 1.03 * best, (key, best, taken)


def test_a_model_that_puts_another_first_is_seen(monkeypatch, tuner):
    """Two configurations, 3 and 2 us; without the model's choice among them there is nothing to compare with."""
    spec = tuner.spec_of("qkv_7b", 8, 32, False)
    good, bad, third = config.candidate_configs(spec)[:3]
    rows = [{**tuner.Trial("qkv_7b", 8, 32, False, how).row(), "us": us} for how, us in ((bad, 3.0), (good, 2.0))]
    for taken, expected in ((bad, (2.0, 3.0)), (good, (2.0, 2.0)), (third, (2.0, None))):
        monkeypatch.setattr(config, "best_config", lambda spec, taken=taken: taken)
        assert tuner.regrets(rows) == {("qkv_7b", 8, 32, False): expected}


def test_what_is_timed(tuner):
    """A norm never as split-K partials, x A alone never without adapters, of each the model's first."""
    trials = tuner.wanted(["gate_up_7b", "o_7b", "down_7b"], [8, 64], 32, 2)
    kinds = {(trial.case, trial.rank, trial.partials) for trial in trials}
    assert kinds == {
        ("gate_up_7b", 32, False), ("gate_up_7b", 0, False), ("o_7b", 32, False), ("o_7b", 32, True),
        ("down_7b", 32, False), ("down_7b", 32, True), ("down_7b", 0, False),
    }  # fmt: skip
    for m in (8, 64):
        of = [trial for trial in trials if trial[:4] == ("down_7b", m, 32, True)]
        assert len(of) == 2 and of[0].config == config.best_config(of[0].spec())
        (gate_up,), a = tuner.shapes_of(of[0].spec())
        assert gate_up.shape == (m, 2 * 18944) and a.shape == (18944, 32)
    inputs, none = tuner.shapes_of(tuner.spec_of("qkv_7b", 8, 0, False))
    assert [(x.shape, x.dtype) for x in inputs] == [
        ((8, 3584), jnp.float32), ((8, 3584), jnp.bfloat16), ((3584,), jnp.float32)
    ] and none is None  # fmt: skip


def test_a_configurations_time_is_the_median_of_its_own_calls(monkeypatch, tuner):
    """Kernel i of configuration p takes 1000 p + i ns; others between them do not count, nor do the first
    four of each."""
    trials = tuner.wanted(["o_7b"], [8], 32, 2)[:3]
    monkeypatch.setattr(tuner, "FLUSH_FLOATS", 4)
    monkeypatch.setattr(tuner.ahead, "compile_all", lambda build, programs, jobs: ((p, b"") for p in programs))
    monkeypatch.setattr(tuner.ahead, "load", lambda executable, *args: lambda inputs, a: (inputs[0], a))
    calls = tuner.CALLS

    def profiled(run):
        run()
        kernel = sys.modules["timing"].Kernel
        of = lambda p, i: [kernel(0.0, 9e9, "sweep"), kernel(0.0, 1000.0 * p + i, "decode_prologue_plain_lora")]  # noqa: E731
        return [kernel for p in range(3) for i in range(calls) for kernel in of(p, i)]

    monkeypatch.setattr(sys.modules["timing"], "profiled", profiled)
    middle = sum(range(tuner.SKIPPED, calls)) / (calls - tuner.SKIPPED)
    assert tuner.durations(trials, 1) == pytest.approx([(1000 * p + middle) * 1e-3 for p in range(3)])
    monkeypatch.setattr(sys.modules["timing"], "profiled", lambda run: profiled(run)[2:])
    with pytest.raises(SystemExit, match=f"{3 * calls - 1} kernels, {3 * calls} were called"):
        tuner.durations(trials, 1)
