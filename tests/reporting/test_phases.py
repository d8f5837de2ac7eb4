"""Times of the phases of a run, and its heartbeat."""

from __future__ import annotations

import io
import json
import os
import time

import pytest
from rich.console import Console

from qerl_jax.reporting.phases import HEARTBEAT_FILE, Phases


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_heartbeat_says_what_is_running(tmp_path, console):
    phases = Phases(tmp_path, console)
    phases.step = 3
    with phases("grading"):
        beat = json.loads((tmp_path / HEARTBEAT_FILE).read_text())
    assert (beat["step"], beat["phase"], beat["pid"]) == (3, "grading", os.getpid())
    assert beat["time"].endswith("+00:00")


def test_times_add_up_until_they_are_taken(tmp_path, console):
    phases = Phases(tmp_path, console)
    for _ in range(2):  # as refills do
        with phases("rollout"):
            time.sleep(0.05)
    with pytest.raises(KeyError), phases("update"):  # a phase that fails is counted, too
        raise KeyError
    taken = phases.take("rollout", "grading")
    assert taken["time/grading"] == 0 and 0.1 <= taken["time/rollout"] == phases.totals["rollout"]
    assert phases.take("rollout")["time/rollout"] == 0
    assert set(phases.totals) == {"rollout", "update"}


def test_a_heartbeat_that_cannot_be_written_is_told_once_and_stops_nothing(tmp_path, console):
    """Its directory cannot be made, because a file stands there."""
    (tmp_path / "file").touch()
    phases = Phases(tmp_path / "file", console)
    for _ in range(2):
        with phases("rollout"):
            time.sleep(0.02)
    said = console.file.getvalue()
    assert said.count("cannot be written") == 1 and f"{tmp_path}/file/heartbeat.json cannot be written" in said
    assert phases.totals["rollout"] > 0.03
