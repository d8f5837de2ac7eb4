"""How a run stops: signals, a reader that went away, an output directory that is gone, updates that change nothing."""

import array
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import small
from replicas import Store, ThreadLink, on_replicas

from qerl_jax.backends.vllm_engine import VllmEngine
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer, latest_step
from qerl_jax.config import Config, ConfigError, load
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.data.stream import ProblemStream
from qerl_jax.evaluation import Evaluation
from qerl_jax.parallel import ReplicaError, Replicas
from qerl_jax.reporting.console import RunConsole
from qerl_jax.reporting.metrics import MetricsFile, read_metrics, write_evaluations
from qerl_jax.rewards.load import Rewards
from qerl_jax.rewards.outcomes import RewardError
from qerl_jax.rl.state import init_state
from qerl_jax.run import directory as run_directory
from qerl_jax.run.hooks import Hooks
from qerl_jax.run.lifecycle import begin_run
from qerl_jax.run.prepare import Run
from qerl_jax.run.recorder import Recorder
from qerl_jax.run.signals import StopSignals, interrupting
from qerl_jax.types import TrainState

SHOWN = {
    "reward": 0.5, "entropy": 1.0, "aqn/sigma": 0.0, "completions/mean_length": 20.0, "tokens_per_second": 100.0,
    "step_time": 1.0,
}  # fmt: skip


def recorder_of(run: Run, checkpoints: Checkpointer) -> Recorder:
    """After two steps, of which the progress bar shows these numbers."""
    recorder = Recorder(run, checkpoints, 2, 2, {})
    recorder._metrics = SHOWN
    return recorder


@pytest.fixture
def running(tmp_path) -> tuple[Run, Recorder, TrainState]:
    """A run after two steps, none of them real."""
    directory = tmp_path / "parent" / "run"
    model = small.bf16(tmp_path / "model", shards=1)
    config = Config(
        model=str(model), output_dir=str(directory), reward_funcs=("answer",), reward_weights=(1.0,), max_steps=50,
        num_iterations=1, save_steps=50, max_prompt_length=60, dtype="float32",
        sigma_start=1e-2, sigma_end=5e-4, num_stages=70,
    )  # fmt: skip
    policy = load_policy(model, lora=config.lora, dtype=jnp.float32)
    state = init_state(policy, config).replace(step=jnp.int32(2))
    run = Run(config, directory, RunConsole(), policy, Rewards(), ProblemStream(([],), None, 0), [])
    checkpoints = Checkpointer(directory, 1, {"model": "abc"})
    run_directory.write_config(directory, config)
    for step in (1, 2):
        MetricsFile(directory).append(step, {"num_tokens": step, "kl": float("nan")})
    return run, recorder_of(run, checkpoints), state


def assert_saved(place: Path, state: TrainState) -> None:
    again = Checkpointer(place, None, {"model": "abc"}).restore(jax.tree.map(jnp.zeros_like, state))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert (one == other).all()


def after(state: TrainState, step: int) -> TrainState:
    """The state of a later step, another in every adapter."""
    return state.replace(step=jnp.int32(step), lora=jax.tree.map(lambda leaf: leaf + step, state.lora))


def test_curves_go_on_behind_the_checkpoint(running):
    """Those of a killed run are purged from there on."""
    run, recorder, _ = running
    own = dataclasses.replace(run, config=dataclasses.replace(run.config, report_to=("tensorboard",)))
    recorder_of(own, recorder.checkpoints).curves.close()
    (file,) = (run.directory / "tensorboard").iterdir()
    assert file.name.endswith(".from2")


def test_a_run_goes_on_or_begins_anew(running, capsys):
    """From its checkpoint, with the tokens that it had seen, to another end; or, with `overwrite`, without anything of
    the run that was there.
    """
    run, recorder, state = running
    directory, result = run.directory, Evaluation(0.5, 0.4, 0.6, 0.9, 1.0, 0.0, 12.5, 200, 1)
    recorder.checkpoints.save(after(state, 2))
    write_evaluations(directory, {"before": result, "after": result})
    for name in ("notes", "report.md"):
        (directory / name).touch()
    start = state.replace(step=jnp.int32(0))

    def begun(**changes: object) -> tuple[Recorder, TrainState, str]:
        own = dataclasses.replace(run, config=dataclasses.replace(run.config, **changes))
        found = begin_run(own, start.replace(config=own.config))
        assert load(directory / "config.yaml").max_steps == own.config.max_steps
        return *found, capsys.readouterr().out

    with pytest.raises(ConfigError, match="holds a run already"):
        begun()
    there, found, said = begun(resume="auto", max_steps=60)
    assert int(found.step) == 2 and (there._first, there._tokens) == (2, 2)
    assert [row["step"] for row in there.metrics.rows] == [1, 2] and there.evaluations == {"before": result}
    assert not (directory / "report.md").exists()  # it is that of the shorter run
    parameters = run.policy.config.parameter_count() / 1e6
    assert f"{run.config.model}: {parameters:,.1f} M parameters, 0 problems, into {directory}\n" in said
    assert said.endswith("step 3 waits until its programs are compiled …\n") and "num_stages" not in said
    there, found, said = begun(overwrite=True)
    assert int(found.step) == 0 and (there._first, there._tokens) == (0, 0)
    assert (there.metrics.rows, there.evaluations, latest_step(directory)) == ([], {}, None)
    assert "50 updates are no more than num_stages 70" in said
    assert {path.name for path in directory.iterdir()} >= {"notes"} and "resuming" not in said
    assert said.startswith(
        "overwrite: deleted of the run before: checkpoints, evaluation.json, metrics.jsonl, config.yaml\n"
    )


def test_before_training_is_the_policy_that_a_run_began_with(running):
    """Not that of the checkpoint from which it goes on, where the result has to be made up for."""
    run, recorder, state = running
    config = dataclasses.replace(run.config, resume="auto", allow_changed_inputs=True, eval_dataset="arithmetic")
    recorder.checkpoints.save(after(state, 2).replace(config=config))
    seen = []

    class Interrupted(VllmEngine):
        def __init__(self) -> None:
            pass

        def generate(self, policy, *_: object) -> None:
            seen.append(policy)
            raise KeyboardInterrupt

    item = EncodedProblem(Problem(0, "?", "1"), array.array("i", [1]))
    asking = dataclasses.replace(run, config=config, eval_problems=[item], vllm=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        begin_run(asking, state.replace(config=config))
    [policy] = seen
    assert policy.lora is run.policy.lora and policy.norms is run.policy.norms


def test_replicas_with_other_problems_begin_nothing(running):
    run, _, state = running
    config = dataclasses.replace(run.config, overwrite=True)
    before = sorted(run.directory.iterdir())

    def begin(replicas: Replicas) -> None:
        items = [EncodedProblem(Problem(0, "?", str(replicas.index)), array.array("i", [1]))]
        own = dataclasses.replace(run, config=config, replicas=replicas, stream=ProblemStream((items,), None, 0))
        begin_run(own, state)

    for error in on_replicas(2, begin):
        assert str(error).startswith("the replicas differ in model, data or functions, by fingerprint: [{")
    assert sorted(run.directory.iterdir()) == before


def test_functions_of_the_first_replica_choose_problems_and_noise(running):
    """Those of others may draw at random: they would grade other problems than are recorded, under other noise."""
    run, _, state = running
    items = [EncodedProblem(Problem(i, "?", "1"), array.array("i", [1])) for i in range(2)]

    def choose(replicas: Replicas) -> tuple[list[int], float]:
        hooks = Hooks(problems=lambda step: [replicas.index], sigma=lambda step: replicas.index / 8)
        own = dataclasses.replace(run, stream=ProblemStream((items,), None, 0), hooks=hooks, replicas=replicas)
        return [item.problem.id for item in own.problems(state, 0, 1)], hooks.sigma_at(run.config, 2, replicas)

    assert on_replicas(2, choose) == [([0], 0.0)] * 2


def test_a_signal_to_one_replica_stops_all_after_the_same_step(running):
    """Of which the first saves it, and alone reports curves."""
    run, first, state = running
    reporting = dataclasses.replace(run.config, report_to=("tensorboard",))

    def end(replicas: Replicas) -> tuple[bool, int]:
        own = dataclasses.replace(run, replicas=replicas, config=run.config if replicas.is_first else reporting)
        recorder = Recorder(own, first.checkpoints if replicas.is_first else None, 2, 2)
        recorder._signals = types.SimpleNamespace(requested=signal.SIGTERM if replicas.index == 1 else 0)
        recorder._progress = types.SimpleNamespace(update=lambda *_: None)
        return recorder.end_step(after(state, 3)), recorder.stopped

    assert on_replicas(3, end) == [(True, signal.SIGTERM)] * 3
    assert_saved(run.directory, after(state, 3))
    assert not (run.directory / "tensorboard").exists()


class ComesLate:
    """A SIGTERM that is there from the second look on: one between two looks of a step ends the step after it."""

    looks = 0

    @property
    def requested(self) -> int:
        self.looks += 1
        return signal.SIGTERM if self.looks > 1 else 0


def test_a_signal_that_comes_late_stops_the_run_with_a_checkpoint_all_the_same(running):
    run, recorder, state = running
    with recorder:
        recorder._signals = ComesLate()
        assert not recorder.end_step(after(state, 3)) and latest_step(run.directory) is None
        assert recorder.end_step(after(state, 4)) and recorder.stopped == signal.SIGTERM
    assert latest_step(run.directory) == 4


def test_ten_steps_in_a_row_that_change_nothing_end_a_run(running):
    _, recorder, state = running
    for step in range(3, 13):
        recorder.metrics.append(step, {"skipped": 1.0})
    with pytest.raises(ValueError, match="steps 3 to 12 changed nothing: loss, gradient or new parameters"):
        recorder.end_step(after(state, 12))


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    ("error", "deleted"), [(ValueError("no"), "nothing"), (KeyboardInterrupt(), "checkpoints"), (Panic(), "all")]
)
def test_whatever_ends_a_run_the_newest_finished_step_is_saved(running, error, deleted):
    """Step 3 is saved, step 4 finished, step 5 raises; meanwhile somebody may have deleted what was there."""
    run, recorder, state = running
    recorder.checkpoints.save(after(state, 3))
    with pytest.raises(type(error)), recorder:
        assert not recorder.end_step(after(state, 4))
        if deleted != "nothing":
            shutil.rmtree(run.directory if deleted == "all" else run.directory / "checkpoints")
        raise error
    assert latest_step(run.directory) == 4
    assert_saved(run.directory, after(state, 4))
    assert load(run.directory / "config.yaml").model == run.config.model
    assert [row["step"] for row in read_metrics(run.directory)] == [1, 2]


@pytest.mark.parametrize("error", [RewardError("no"), ReplicaError("replica 1 failed: RewardError")])
def test_an_error_of_a_reward_on_any_replica_names_the_setting_to_resume_with(running, error, capsys):
    _, recorder, state = running
    with pytest.raises(type(error)), recorder:
        recorder.end_step(after(state, 4))
        raise error
    said = capsys.readouterr().out
    assert "--resume auto\nand with allow_changed_inputs once the reward's source is mended\n" in said


def test_an_error_that_speaks_of_a_rewards_names_no_setting(running, capsys):
    _, recorder, state = running
    with pytest.raises(ValueError), recorder:
        recorder.end_step(after(state, 4))
        raise ValueError("the log says RewardError: no")
    assert "allow_changed_inputs" not in capsys.readouterr().out


def test_a_replica_that_waits_forever_saves_the_newest_finished_step(running):
    """As its watcher has it, beside the thread that waits; the second replica writes nothing."""
    run, first, state = running
    for index, checkpoints in enumerate((first.checkpoints, None)):
        link = ThreadLink(Store(), index, 2)
        recorder = Recorder(dataclasses.replace(run, replicas=Replicas(index, 2, link)), checkpoints, 2, 2)
        with recorder:
            recorder._newest = after(state, 4 + index)
            link.last()
    assert latest_step(run.directory) == 4
    assert_saved(run.directory, after(state, 4))


def lose(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda directory: None, ""),
        (lambda directory: lose(directory / "metrics.jsonl"), "metrics.jsonl"),
        (lambda directory: (directory / "metrics.jsonl").unlink(), "metrics.jsonl"),
        (shutil.rmtree, "metrics.jsonl and config.yaml"),
    ],
)
def test_what_another_program_takes_from_a_run_is_said_and_written_again(running, capsys, change, lost):
    """The rows of earlier steps, too: else the record of the run would begin with the next step."""
    run, recorder, _ = running
    before = (run.directory / "metrics.jsonl").read_bytes()
    change(run.directory)
    recorder.mend()
    assert (run.directory / "metrics.jsonl").read_bytes() == before
    said = f"another program removed or cut {lost} in {run.directory}: written again; see whether completions/ and "
    assert capsys.readouterr().out == (f"{said}checkpoints/ are whole\n" if lost else "")
    recorder.metrics.append(3, {"num_tokens": 3})
    recorder.mend()
    assert [row["step"] for row in read_metrics(run.directory)] == [1, 2, 3] and capsys.readouterr().out == ""
    assert load(run.directory / "config.yaml").model == run.config.model


def test_a_step_that_fails_first_saves_nothing(running):
    run, recorder, _ = running
    with pytest.raises(KeyError), recorder:
        raise KeyError
    assert latest_step(run.directory) is None


def test_a_checkpoint_that_cannot_be_written_is_tried_once(running):
    """Its own error says what is saved."""
    run, _, state = running
    tries: list[int] = []

    class Full(Checkpointer):
        def save(self, state: TrainState) -> None:
            tries.append(int(state.step))
            raise OSError("checkpoint cannot be written")

    recorder = recorder_of(run, Full(run.directory, 1))
    with pytest.raises(OSError, match="checkpoint cannot be written"), recorder:
        recorder.end_step(state.replace(step=jnp.int32(run.config.max_steps)))  # the last, which is always saved
    assert tries == [run.config.max_steps]


def test_a_reader_that_goes_away_stops_the_run_with_a_checkpoint(running):
    """As `| head` does: the next line that is printed, the step's, fails."""
    run, _, state = running
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        console = RunConsole(file=closed)
        other = dataclasses.replace(run, console=console)
        recorder = recorder_of(other, Checkpointer(run.directory, 1))
        with recorder:
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


def test_another_thread_handles_no_signals():
    def requested() -> int:
        with StopSignals() as signals, interrupting():
            return signals.requested

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(requested).result() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_without_a_handler_interrupts_an_evaluation(number):
    before = signal.getsignal(number)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN, lambda *_: None):
            signal.signal(number, handler)
            with interrupting():
                expected = signal.default_int_handler if handler is signal.SIG_DFL else handler
                assert signal.getsignal(number) is expected
            assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_is_a_request_the_second_acts_and_an_ignored_one_is_none(number, capfd):
    usual = []  # calls of the handler that was there before
    before = signal.signal(number, lambda *_: usual.append(number))
    try:
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert signals.requested == number and not usual
            assert f"{signal.Signals(number).name}: the run stops after this step" in capfd.readouterr().err
            signal.raise_signal(number)
            assert usual == [number] and not capfd.readouterr().err
        signal.signal(number, signal.SIG_IGN)
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert signals.requested == 0 and not capfd.readouterr().err
    finally:
        signal.signal(number, before)


def row(step: int, **changes: float) -> dict[str, float]:
    same = {"num_tokens": step, "skipped": 0, "grad_norm": 0.0, "reward": 0.0, "reward_std": 0.0}
    return {"step": step} | same | changes


@pytest.mark.parametrize("before", [0.0, 0.5])
def test_a_resumed_run_whose_steps_trained_nothing_ends_with_an_error(running, capsys, before):
    """Steps 1 and 2 ran before the resume, with this gradient norm; step 4 is the last, of two updates each. No state
    that trained nothing is saved, and nobody told to resume from it."""
    run, _, state = running
    (run.directory / "metrics.jsonl").unlink()
    for step in (1, 2):
        MetricsFile(run.directory).append(step, row(step, grad_norm=before, frac_reward_zero_std=1.0))
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, max_steps=8, num_iterations=2))
    recorder = recorder_of(run, Checkpointer(run.directory, 1, {"model": "abc"}))
    ends = contextlib.nullcontext() if before else pytest.raises(ValueError, match="none of 4 steps trained anything")
    with ends, recorder:
        for step in (3, 4):
            recorder.metrics.rows.append(row(step, frac_reward_zero_std=1.0))
            recorder.end_step(after(state, step))
    assert latest_step(run.directory) == (4 if before else None)
    assert "resume" not in capsys.readouterr().out
