"""A stand-in for vLLM, found by this process and by the worker."""

import json
import os
import shutil
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="session")
def install_stand_in():
    """Puts a copy of the stand-in before all packages; returns a function that reads what it was asked."""

    def install(monkeypatch, place):
        shutil.copytree(STAND_IN, place)
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))

        def asked(event):
            log = place / "asked.jsonl"
            entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            return [entry for entry in entries if entry["event"] == event]

        return asked

    return install


@pytest.fixture
def stand_in(install_stand_in, monkeypatch, tmp_path):
    """The stand-in, installed; a function that reads what it was asked."""
    return install_stand_in(monkeypatch, tmp_path / "stand-in")
