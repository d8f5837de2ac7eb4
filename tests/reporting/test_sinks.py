"""TensorBoard by reading its file back; W&B by a stand-in that records what it is told."""

from __future__ import annotations

import math
import struct
import sys

import pytest
from rich.console import Console

from qerl_jax.config import Config, ConfigError
from qerl_jax.reporting import sinks
from qerl_jax.reporting.console import RunConsole

STAND_IN = """
calls = []

class Error(Exception):
    pass

def login(verify):
    calls.append(("login", verify))

class Run:
    id = "abc123"
    def log(self, metrics, step):
        calls.append(("log", step, metrics))
    def finish(self):
        calls.append(("finish",))

def init(**arguments):
    calls.append(("init", arguments))
    return Run()
"""


CONSOLE = Console(quiet=True)


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    package = tmp_path / "site" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb
    monkeypatch.delitem(sys.modules, "wandb")


def test_wandb_is_told_config_steps_and_end(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = tmp_path / "run-7"
    config = Config(model="m", report_to=("wandb",), learning_rate=3e-5)
    sinks.check(config)
    curves = sinks.Sinks(config, run, 0, CONSOLE)
    curves.log(1, {"reward": 0.5, "kl": math.nan})
    curves.close()
    login, (_, start), *rest = wandb.calls
    assert login == ("login", True)  # before anything of the run is touched
    assert (start["project"], start["name"], start["dir"], start["id"]) == ("mine", "run-7", str(run), None)
    assert start["config"]["learning_rate"] == 3e-5 and start["resume"] is None
    assert rest == [("log", 1, {"reward": 0.5}), ("finish",)]
    sinks.Sinks(config, run, 1, CONSOLE)  # a resumed run continues the same curve
    assert (wandb.calls[-1][1]["id"], wandb.calls[-1][1]["resume"]) == ("abc123", "allow")
    sinks.Sinks(config, run, 0, CONSOLE)  # one that was killed before its first checkpoint begins another
    assert wandb.calls[-1][1]["id"] is None


def test_wandb_that_does_not_know_the_user_is_bad_input(wandb, monkeypatch):
    def unknown(verify):
        raise wandb.Error("No API key configured.")

    monkeypatch.setattr(wandb, "login", unknown)
    with pytest.raises(ConfigError, match=r"report_to 'wandb': Error: No API key configured\."):
        sinks.check(Config(model="m", report_to=("wandb",)))


def test_wandb_that_does_not_start_is_one_line(tmp_path, wandb, monkeypatch):
    class UsageError(Exception):
        """W&B's own: neither a ValueError nor an OSError."""

    def init(**_):
        raise UsageError("api_key not configured.\nRun wandb login")

    config = Config(model="m", report_to=("wandb",))
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ConfigError) as error:
        sinks.Sinks(config, tmp_path, 0, CONSOLE)
    assert str(error.value).endswith("W&B does not start: UsageError: api_key not configured. Run wandb login")


def test_wandb_that_fails_in_a_run_is_said_once_and_left_out(tmp_path, wandb, capsys):
    """The other curves go on."""
    curves = sinks.Sinks(Config(model="m", report_to=("tensorboard", "wandb")), tmp_path, 0, RunConsole())
    wandb.Run.log = wandb.Run.finish = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no\nnetwork"))
    for step in (1, 2):
        curves.log(step, {"reward": 0.5})
    curves.close()
    said = "report_to 'wandb' failed and is left out from here on: RuntimeError: no network\n"
    assert capsys.readouterr().out == said
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert [event.step for event in events(file) if event.summary.value] == [1, 2]


@pytest.mark.parametrize("text", ["{}", "[]", '{"id": null}', "{", "1"])
def test_a_damaged_wandb_file_is_named(tmp_path, wandb, text):
    (tmp_path / sinks.WANDB_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"wandb\.json holds no id of a W&B run: delete the file"):
        sinks.Sinks(Config(model="m", report_to=("wandb",)), tmp_path, 1, CONSOLE)
    assert wandb.calls == []


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
    assert [e.step for e in events(again) if e.HasField("session_log")] == [2]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_says_what_to_install(monkeypatch, tmp_path, name, module):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / module).mkdir()  # a directory of that name, as W&B leaves one, is no package
    with pytest.raises(ConfigError, match=rf'report_to .{name}. needs .* {module}.*pip install "qerl-jax\[{name}\]"'):
        sinks.check(Config(model="m", report_to=(name,)))


def test_unknown_sink_is_refused():
    with pytest.raises(ConfigError, match=r"report_to 'mlflow' is not one of \['tensorboard', 'wandb'\]"):
        Config(model="m", report_to=("mlflow",))


def test_nothing_asked_for_nothing_written(tmp_path):
    curves = sinks.Sinks(Config(model="m"), tmp_path, 0, CONSOLE)
    curves.log(1, {"reward": 0.5})
    curves.close()
    assert list(tmp_path.iterdir()) == []
