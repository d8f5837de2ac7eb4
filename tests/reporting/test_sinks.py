"""TensorBoard by reading its file back; W&B by a stand-in that records what it is told."""

import contextlib
import importlib
import io
import math
import struct
import sys
from pathlib import Path

import pytest
from rich.console import Console

from qerl_jax.config import Config, ConfigError
from qerl_jax.reporting import sinks
from qerl_jax.reporting.console import RunConsole

STAND_IN = """
calls, fault = [], None

class Error(Exception):
    pass

class UsageError(Exception):
    "W&B's own: neither a ValueError nor an OSError."

def login(verify):
    calls.append(("login", verify))
    if fault == "login":
        raise Error("No API key configured.")

class Run:
    id = "abc123"
    def log(self, metrics, step):
        if fault == "log":
            raise RuntimeError("no\\nnetwork")
        calls.append(("log", step, metrics))
    def finish(self):
        calls.append(("finish",))

def init(**arguments):
    if fault == "init":
        raise UsageError("api_key not configured.\\nRun wandb login")
    calls.append(("init", arguments))
    return Run()
"""
DAMAGED = ["{}", "[]", '{"id": null}', "{", "1"]
CONSOLE = Console(quiet=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("wandb")


def error_of(call, *given) -> str:
    with pytest.raises(ConfigError) as error:
        call(*given)
    return str(error.value)


@pytest.fixture(scope="module")
def told(place) -> dict:
    """What W&B is told, and what is said of its failures; the stand-in is in its place."""
    (place / "wandb.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        patch.setitem(sys.modules, "wandb", None)  # to be undone
        del sys.modules["wandb"]
        wandb = importlib.import_module("wandb")
        patch.setenv("WANDB_PROJECT", "mine")
        config = Config(model="m", report_to=("wandb",), learning_rate=3e-5)
        sinks.check(config)
        curves = sinks.Sinks(config, place / "run-7", 0, CONSOLE)
        curves.log(1, {"reward": 0.5, "kl": math.nan})
        curves.close()
        found = {"calls": wandb.calls.copy()}
        for step in (1, 0):
            sinks.Sinks(config, place / "run-7", step, CONSOLE)
        found["later"] = [(given["id"], given["resume"]) for _, given in wandb.calls[-2:]]
        found["damaged"] = []
        for text in DAMAGED:
            (place / sinks.WANDB_FILE).write_text(text)
            found["damaged"].append(error_of(sinks.Sinks, config, place, 1, CONSOLE))
        wandb.fault = "login"
        found["login"] = error_of(sinks.check, config)
        wandb.fault = "init"
        found["init"] = error_of(sinks.Sinks, config, place, 0, CONSOLE)
        wandb.fault = "log"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            curves = sinks.Sinks(Config(model="m", report_to=("tensorboard", "wandb")), place, 0, RunConsole())
            for step in (1, 2):
                curves.log(step, {"reward": 0.5})
            curves.close()
    return found | {"log": said.getvalue()}


def test_wandb_is_told_config_steps_and_end(told, place):
    login, (_, start), *rest = told["calls"]
    assert login == ("login", True)  # before anything of the run is touched
    assert (start["project"], start["name"], start["dir"]) == ("mine", "run-7", str(place / "run-7"))
    assert start["config"]["learning_rate"] == 3e-5 and start["id"] is start["resume"] is None
    assert rest == [("log", 1, {"reward": 0.5}), ("finish",)]


def test_a_resumed_run_continues_the_same_curve(told):
    """One that was killed before its first checkpoint begins another."""
    assert told["later"] == [("abc123", "allow"), (None, None)]


def test_wandb_that_does_not_know_the_user_or_does_not_start_is_one_line(told):
    assert told["login"] == "report_to 'wandb': Error: No API key configured."
    assert told["init"].endswith("W&B does not start: UsageError: api_key not configured. Run wandb login")


def test_wandb_that_fails_in_a_run_is_said_once_and_left_out(told, place):
    """The other curves go on."""
    assert told["log"] == "report_to 'wandb' failed and is left out from here on: RuntimeError: no network\n"
    (file,) = (place / "tensorboard").iterdir()
    assert [event.step for event in events(file) if event.summary.value] == [1, 2]


def test_a_damaged_wandb_file_is_named(told):
    said = "wandb.json holds no id of a W&B run: delete the file to begin a new one there"
    assert len(told["damaged"]) == len(DAMAGED) and all(error.endswith(said) for error in told["damaged"])


def events(file) -> list:
    """Records of a TFRecord file: u64 length, its crc, bytes, their crc."""
    from tensorboardX.proto.event_pb2 import Event

    raw, found = file.read_bytes(), []
    while raw:
        (length,) = struct.unpack("<Q", raw[:8])
        found.append(Event.FromString(raw[12 : 12 + length]))
        raw = raw[12 + length + 4 :]
    return found


def test_tensorboard_file_holds_the_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    config = Config(model="m", report_to=("tensorboard",))
    sinks.check(config)
    curves = sinks.Sinks(config, tmp_path, 0, CONSOLE)
    curves.log(1, {"reward": 0.5, "rewards/answer/mean": 0.25, "kl": math.inf})
    curves.log(2, {"reward": 0.75})
    curves.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars = [(e.step, v.tag, v.simple_value) for e in events(file) for v in e.summary.value]
    assert scalars == [(1, "reward", 0.5), (1, "rewards/answer/mean", 0.25), (2, "reward", 0.75)]
    sinks.Sinks(config, tmp_path, 1, CONSOLE).close()  # after a kill: step 2 will come again, the old one is purged
    (again,) = set((tmp_path / "tensorboard").iterdir()) - {file}
    purged = [[e.step for e in events(each) if e.HasField("session_log")] for each in (file, again)]
    assert purged == [[0], [2]]  # those from 0 on by a run that began, or begins anew after a kill without a checkpoint


def test_unknown_sink_is_refused():
    with pytest.raises(ConfigError, match=r"report_to 'mlflow' is not one of \['tensorboard', 'wandb'\]"):
        Config(model="m", report_to=("mlflow",))


def test_nothing_asked_for_nothing_written(tmp_path):
    curves = sinks.Sinks(Config(model="m"), tmp_path, 0, CONSOLE)
    curves.log(1, {"reward": 0.5})
    curves.close()
    assert list(tmp_path.iterdir()) == []
