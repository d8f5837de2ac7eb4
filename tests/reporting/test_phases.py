"""The watchdog: a phase that sleeps too long leaves every thread's stack, and the run continues."""

from __future__ import annotations

import io
import json
import os
import threading
import time

import pytest
from rich.console import Console

from qerl_jax.reporting.phases import HEARTBEAT_FILE, STACKS_FILE, Phases


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_a_slow_phase_leaves_the_stacks_of_all_threads(tmp_path, console):
    phases, release = Phases(tmp_path, 0.3, console), threading.Event()

    def waits_in_the_background():
        release.wait()

    thread = threading.Thread(target=waits_in_the_background)
    thread.start()
    phases.step = 7
    with phases("rollout"):
        time.sleep(0.6)
    release.set()
    thread.join()
    text = (tmp_path / STACKS_FILE).read_text()
    assert "waits_in_the_background" in text and "test_a_slow_phase_leaves_the_stacks_of_all_threads" in text
    assert "step 7: rollout is running longer than watchdog_seconds 0.3" in text
    assert "step 7: rollout took 0." in console.file.getvalue() and phases.overdue == 1
    with phases("update"):  # the run continues, and a fast phase adds nothing
        pass
    assert (tmp_path / STACKS_FILE).read_text() == text and phases.overdue == 1


def test_fast_phases_leave_no_stacks(tmp_path, console):
    phases = Phases(tmp_path, 60, console)
    with phases("rollout"):
        pass
    assert not (tmp_path / STACKS_FILE).exists()
    with Phases(tmp_path, None, console)("rollout"):  # no watchdog at all
        time.sleep(0.01)
    assert not (tmp_path / STACKS_FILE).exists()


def test_heartbeat_says_what_is_running(tmp_path, console):
    phases = Phases(tmp_path, None, console)
    phases.step = 3
    with phases("grading"):
        beat = json.loads((tmp_path / HEARTBEAT_FILE).read_text())
    assert (beat["step"], beat["phase"], beat["pid"]) == (3, "grading", os.getpid())
    assert beat["time"].endswith("+00:00")


def test_times_add_up_until_they_are_taken(tmp_path, console):
    phases = Phases(tmp_path, None, console)
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
    """Its directory cannot be made, because a file stands there; the same for the stacks."""
    (tmp_path / "file").touch()
    phases = Phases(tmp_path / "file", 0.05, console)
    for _ in range(2):
        with phases("rollout"):
            time.sleep(0.2)
    said = console.file.getvalue()
    assert said.count("cannot be written") == 1 and f"{tmp_path}/file/heartbeat.json cannot be written" in said
    assert phases.overdue == 2 and phases.totals["rollout"] > 0.3
