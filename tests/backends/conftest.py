"""A stand-in for vLLM, found by this process and by the worker."""

import json
import os
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="session")
def install_stand_in():
    """Puts the stand-in before all packages; returns a function that reads from a file what it was asked."""

    def install(monkeypatch, log):
        log.touch()
        monkeypatch.syspath_prepend(str(STAND_IN))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("STAND_IN_LOG", str(log))
        monkeypatch.delenv("STAND_IN_FAULT", raising=False)

        def asked(event):
            entries = [json.loads(line) for line in log.read_text().splitlines()]
            return [entry for entry in entries if entry["event"] == event]

        return asked

    return install


@pytest.fixture
def stand_in(install_stand_in, monkeypatch, tmp_path):
    """The stand-in, installed; a function that reads what it was asked."""
    return install_stand_in(monkeypatch, tmp_path / "stand-in.jsonl")
