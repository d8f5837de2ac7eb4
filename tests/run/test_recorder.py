"""How a run stops: signals, a reader that went away, an output directory that is gone, updates that change nothing."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import small

from qerl_jax.config import Config
from qerl_jax.data.stream import ProblemStream
from qerl_jax.io.checkpoint import Checkpointer, latest_step
from qerl_jax.io.load import load_policy
from qerl_jax.reporting.console import RunConsole
from qerl_jax.reporting.metrics import append_metrics, read_metrics
from qerl_jax.rewards.load import Rewards
from qerl_jax.rl.state import init_state
from qerl_jax.run import directory as run_directory
from qerl_jax.run.prepare import Run
from qerl_jax.run.recorder import MAX_SKIPPED_STEPS, Recorder, Skips
from qerl_jax.run.signals import StopSignals
from qerl_jax.types import TrainState


@pytest.fixture
def running(tmp_path) -> tuple[Run, Recorder, TrainState]:
    """A run after two steps, none of them real."""
    directory = tmp_path / "parent" / "run"
    model = small.bf16(tmp_path / "model", shards=1)
    config = Config(
        model=str(model), output_dir=str(directory), reward_funcs=("answer",), reward_weights=(1.0,), max_steps=50,
        num_iterations=1, save_steps=50, dtype="float32",
    )  # fmt: skip
    policy = load_policy(model, lora=config.lora, dtype=jnp.float32)
    state = init_state(policy, config).replace(step=jnp.int32(2))
    run = Run(config, directory, RunConsole(), policy, Rewards(), ProblemStream(([],), None, 0), [])
    checkpoints = Checkpointer(directory, 1, {"model": "abc"})
    run_directory.write_config(directory, config)
    for step in (1, 2):
        append_metrics(directory, step, {"num_tokens": step, "kl": float("nan")})
    return run, Recorder(run, checkpoints, 2, 2), state


def saved(place: Path, state: TrainState) -> None:
    again = Checkpointer(place, None, {"model": "abc"}).restore(jax.tree.map(jnp.zeros_like, state))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert (one == other).all()
    assert [(row["step"], row["num_tokens"], row["kl"]) for row in read_metrics(place)] == [(1, 1, None), (2, 2, None)]


def test_a_deleted_output_directory_ends_the_run_with_its_state_saved_beside(running):
    run, recorder, state = running
    with recorder.step(state):
        shutil.rmtree(run.directory)
        recorder.phases.beat("update")  # makes the directory again
    said = "was deleted during the run; the state after step 2 is saved"
    with pytest.raises(OSError, match=said) as caught, recorder.step(state):
        raise AssertionError("the step must not begin")
    (place,) = run.directory.parent.glob("run-rescued-*")
    saved(place, state)
    assert str(caught.value).endswith(f"--config {place}/config.yaml --resume auto")


@pytest.mark.parametrize("moment", ["before the metrics", "after the metrics", "at the checkpoint"])
def test_an_output_directory_that_is_deleted_within_a_step(running, monkeypatch, moment):
    """The step fails at the first file that it cannot write: its error says nothing of the state, which must be that
    before the step, with the metrics before it."""
    run, recorder, state = running
    with pytest.raises(OSError, match="was deleted during the run; the state after step 2 is saved"):
        if moment == "at the checkpoint":

            def save(self, state):
                shutil.rmtree(run.directory)
                monkeypatch.undo()
                self.save(state)

            monkeypatch.setattr(Checkpointer, "save", save)
            monkeypatch.setattr("qerl_jax.run.recorder.checkpoint_is_due", lambda *_: True)
            with recorder:
                monkeypatch.setattr(recorder._progress, "update", lambda *_: None)
                recorder.end_step(state)
        else:
            with recorder.step(state):
                if moment == "after the metrics":
                    recorder._rows.append({"step": 3, "num_tokens": 3, "kl": None})
                shutil.rmtree(run.directory)
                raise FileNotFoundError("completions/step_000003.parquet cannot be written")
    (place,) = run.directory.parent.glob("run-rescued-*")
    saved(place, state)


def test_a_state_that_can_be_saved_nowhere_is_said_lost(running, monkeypatch):
    run, recorder, state = running
    shutil.rmtree(run.directory.parent)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/proc/none")
    with pytest.raises(OSError, match=re.escape("the state after step 2 is lost: FileNotFoundError")):
        recorder.end_step(state)


def test_a_reader_that_goes_away_stops_the_run_with_a_checkpoint(running, monkeypatch):
    """As `| head` does: the next line that is printed fails."""
    run, _, state = running
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        console = RunConsole(file=closed)
        other = dataclasses.replace(run, console=console)
        recorder = Recorder(other, Checkpointer(run.directory, 1), 2, 2)
        with recorder:
            monkeypatch.setattr(recorder._progress, "update", lambda *_: console.print("step 3 of 50"))
            assert not console.is_closed and recorder.end_step(state)
            console.print("nothing")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    assert recorder.stopped == signal.SIGPIPE and latest_step(run.directory) == 2


HEAD = """
import sys
from qerl_jax.reporting.console import RunConsole
console = RunConsole()
while not console.is_closed:
    console.print("line")
console.print("quiet")
print("to nowhere")
sys.stderr.write("ended well")
"""


def test_a_closed_pipe_ends_no_program():
    process = subprocess.Popen([sys.executable, "-c", HEAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"ended well" and process.wait(timeout=60) == 0
    process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_is_a_request_the_second_acts_and_an_ignored_one_is_none(number):
    usual = []  # calls of the handler that was there before
    before = signal.signal(number, lambda *_: usual.append(number))
    try:
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert signals.requested == number and not usual
            signal.raise_signal(number)
            assert usual == [number]
        signal.signal(number, signal.SIG_IGN)
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert signals.requested == 0
    finally:
        signal.signal(number, before)


def test_only_skipped_updates_are_an_error_at_the_limit_or_the_end():
    skips = Skips()
    for step in range(1, MAX_SKIPPED_STEPS):
        skips.count(step, True)
        skips.check(is_over=False)
    with pytest.raises(ValueError, match=f"steps 1 to {MAX_SKIPPED_STEPS - 1} changed nothing"):
        skips.check(is_over=True)
    skips.count(MAX_SKIPPED_STEPS, False)
    for step in range(MAX_SKIPPED_STEPS + 1, 2 * MAX_SKIPPED_STEPS):
        skips.count(step, True)
        skips.check(is_over=True)  # it has trained before
    skips.count(2 * MAX_SKIPPED_STEPS + 1, True)
    with pytest.raises(ValueError, match=f"steps {MAX_SKIPPED_STEPS + 1} to"):
        skips.check(is_over=False)
