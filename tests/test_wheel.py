"""The built wheel works from another directory: model, configs and kernels travel in it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


PROGRAM = """
import qerl_jax, qerl_kernels
from qerl_jax.train import main
assert main(["--dry-run"]) == 0
policy = qerl_jax.load_policy("tiny")
tokens = policy.tokenizer.encode("What is 2 + 3?")
print(qerl_jax.__file__, qerl_kernels.__file__, len(tokens), len(policy.frozen["layers"]))
"""


def test_the_default_of_the_wheel(tmp_path, monkeypatch):
    backend = pytest.importorskip("hatchling.build", reason="needs hatchling (of '.[dev]') to build the wheel")
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / backend.build_wheel(str(tmp_path))
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert not [name for name in names if name.startswith(("tests", "tools", "kernels/"))]
    assert {"qerl_jax/configs/tiny.yaml", "qerl_jax/assets/tiny-qwen2/model.safetensors"} <= set(names)
    assert wheel.stat().st_size < 10e6
    command = [sys.executable, "-P", "-c", PROGRAM]
    environment = os.environ | {"PYTHONPATH": str(site)}
    run = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    dry_run, _, last = run.stdout.strip().rpartition("\n")
    assert "Dry run: no weights were loaded" in " ".join(dry_run.split())
    *paths, tokens, layers = last.split()
    assert all(path.startswith(str(site)) for path in paths) and int(tokens) > 2 and int(layers) == 4
