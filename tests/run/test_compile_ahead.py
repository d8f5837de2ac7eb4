"""Programs compiled from config.json alone, while the weights are read: those that the run then calls."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import jax
import pytest
import small
from command_lines import lines, training
from rich.console import Console

from qerl_jax import train
from qerl_jax.compilation import CompilationCounter, Program, committed, compile_programs
from qerl_jax.rl.state import init_state
from qerl_jax.run import lifecycle, prepare
from qerl_jax.run.abstract import abstract_run
from qerl_jax.run.compile_ahead import ROLLOUT, UPDATE, CompileAhead, run_programs
from qerl_jax.run.hooks import Hooks
from qerl_jax.train import parse

SETTINGS = {
    "bf16": [],
    "nvfp4, trained norms, KL": ["--weight-format", "nvfp4", "--train-norms", "--beta", "0.1"],
    "one adapter": ["--lora-target-modules", "down_proj"],
    "full": ["--weight-format", "full", "--lora-rank", "0", "--beta", "0.1"],
}


def config_of(place: Path, *more: str):
    return parse(training(place, *more))


@pytest.mark.parametrize("part", [ROLLOUT, UPDATE])
@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_programs_are_known_before_the_weights(tmp_path, flags, part):
    small.bf16(tmp_path / "model")
    config = config_of(tmp_path, *flags)
    policy = committed(prepare.load(config))
    real = run_programs(part, config, Hooks(), policy, init_state(policy, config))
    known = run_programs(part, config, Hooks(), *committed(abstract_run(config)))
    assert [program.name for program in known] == [program.name for program in real]
    assert {program.signature() for program in known} == {program.signature() for program in real}


def test_what_the_weights_decide_is_compiled_after_them(tmp_path, monkeypatch):
    """ModelOpt's scales multiply and llm-compressor's divide: config.json does not say which, and every program that
    reads them is another one.
    """
    small.modelopt(tmp_path / "model")
    config = config_of(tmp_path)
    policy = committed(prepare.load(config))
    state = init_state(policy, config)
    ahead, after = {}, {}

    def start(programs, pool, cancelled):
        running = {Future(): program for program in programs}
        for future in running:
            future.set_result(None)
        ahead[len(ahead)] = {program.name for program in running.values()}
        return running

    monkeypatch.setattr("qerl_jax.run.compile_ahead.start_compiling", start)
    monkeypatch.setattr(
        "qerl_jax.run.compile_ahead.compile_programs",
        lambda programs: after.setdefault(len(after), {program.name for program in programs}),
    )
    ahead_of_run = CompileAhead(config, Hooks())
    for part in (ROLLOUT, UPDATE):
        count = ahead_of_run.finish(part, config, Hooks(), policy, state, Console(quiet=True))
        assert count == len(after[len(after) - 1]) > 0
        assert ahead_of_run.finish(part, config, Hooks(), policy, state, Console(quiet=True)) == 0
    assert {"layer forward", "layer backward"} <= after[1] < ahead[1] and "optimizer" not in after[1]
    assert any(name.startswith("decode") for name in after[0]) and after[0] < ahead[0]


def test_the_slowest_programs_come_first(tmp_path):
    small.bf16(tmp_path / "model")
    config = config_of(tmp_path)
    policy, state = committed(abstract_run(config))
    names = {
        part: [program.name for program in run_programs(part, config, Hooks(), policy, state)]
        for part in (ROLLOUT, UPDATE)
    }
    assert names[ROLLOUT][0].startswith("prefill of") and names[ROLLOUT][1].startswith("decode of")
    assert names[UPDATE].index("layer backward") < names[UPDATE].index("embed")


def test_the_first_rollout_does_not_wait_for_the_update(tmp_path, monkeypatch, capsys):
    """The update's programs begin when the rollout's are lowered, and only the update waits for them."""
    small.bf16(tmp_path / "model")
    config, update_may_begin = config_of(tmp_path), threading.Event()

    def programs_of(part, *arguments, original=run_programs):
        if part == UPDATE and threading.current_thread() is not threading.main_thread():
            assert update_may_begin.wait(60)
        return original(part, *arguments)

    monkeypatch.setattr("qerl_jax.run.compile_ahead.run_programs", programs_of)
    policy = committed(prepare.load(config))
    ahead, state = CompileAhead(config, Hooks()), init_state(policy, config)
    assert ahead.finish(ROLLOUT, config, Hooks(), policy, state, Console()) == 0
    update_may_begin.set()
    with CompilationCounter() as counter:
        assert ahead.finish(UPDATE, config, Hooks(), policy, state, Console()) == 0
        assert counter.take()
    rollout, update = capsys.readouterr().out.splitlines()
    assert "programs of the rollout in" in rollout and "after loading" in rollout
    assert "programs of the update in" in update and "after the rollout" in update


@pytest.fixture
def nothing_frozen():
    """`conftest` freezes what was imported."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_collections_pass_over_what_is_compiled_while_the_run_lasts(tmp_path, nothing_frozen):
    """But not over the garbage of compiling, which is collected first. What the process has frozen itself stays so."""
    small.bf16(tmp_path / "model")
    config, console = config_of(tmp_path), Console(quiet=True)
    policy = committed(prepare.load(config))
    state = init_state(policy, config)
    with CompileAhead(config, Hooks()) as ahead:
        ahead.finish(ROLLOUT, config, Hooks(), policy, state, console)
        assert gc.get_freeze_count() < 1000
        cycle = type("Cycle", (), {})()
        cycle.itself, garbage = cycle, weakref.ref(cycle)
        del cycle
        ahead.finish(UPDATE, config, Hooks(), policy, state, console)
        assert gc.get_freeze_count() > 50_000 and garbage() is None
    assert gc.get_freeze_count() < 1000 and gc.isenabled()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with CompileAhead(config, Hooks()) as ahead:
        ahead.finish(UPDATE, config, Hooks(), policy, state, console)
    assert gc.get_freeze_count() > 0.9 * frozen


def test_an_update_whose_programs_fail_ahead_compiles_them_itself(tmp_path, monkeypatch):
    small.bf16(tmp_path / "model")
    config = config_of(tmp_path)
    monkeypatch.setattr("qerl_jax.run.compile_ahead.abstract_run", lambda *_: 1 / 0)
    policy = committed(prepare.load(config))
    ahead, state = CompileAhead(config, Hooks()), init_state(policy, config)
    programs = run_programs(UPDATE, config, Hooks(), policy, state)
    assert ahead.finish(UPDATE, config, Hooks(), policy, state, Console(quiet=True)) == len(programs)


def test_a_cancelled_compilation_begins_no_further_program():
    calls = [Program(str(i), jax.jit(lambda x, i=i: x + i), (1.0,)) for i in range(3)]
    cancelled = threading.Event()
    with CompilationCounter() as counter:
        told = lambda name, count: cancelled.set()  # noqa: E731
        assert compile_programs(calls[:1], done=told, cancelled=cancelled) == 1
        assert compile_programs(calls, cancelled=cancelled) == 0
        assert len(counter.take()) == 1


def test_the_first_evaluation_compiles_nothing(tmp_path, monkeypatch, capfd, nothing_compiled_ahead):
    small.bf16(tmp_path / "model", shards=1)
    (tmp_path / "rows.jsonl").write_text(lines([{"question": f"What is {i}?", "answer": str(i)} for i in range(20)]))
    evaluated = []

    def counted(run, state, evaluate=lifecycle.evaluate_state):
        with CompilationCounter() as counter:
            result = evaluate(run, state)
            evaluated.append(counter.take())
        raise RuntimeError(f"{result.problems} problems")

    monkeypatch.setattr(lifecycle, "evaluate_state", counted)
    config = config_of(tmp_path, "--eval-dataset", str(tmp_path / "rows.jsonl"), "--compilation-cache-dir", "none")
    with pytest.raises(RuntimeError, match="20 problems"):
        train.train(config, Console(quiet=True))
    assert evaluated == [["jit(subtract)"]], "lengths of the completions; nothing of the rollout"
