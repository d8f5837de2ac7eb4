"""Compiling for an H200 on a machine without a GPU: what it takes, and running the scripts that do it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax

PACKAGES = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")


def missing(*files: str) -> str | None:
    """What keeps this machine from compiling for a GPU; None where it can. `files`: of NVIDIA's compiler packages, for
    those who call a tool themselves (XLA also finds CUDA where the system has it).
    """
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11):
        return f"compiling for a GPU needs jax 0.11 or later (this is {jax.__version__})"
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"compiling for a GPU needs {package} (jax-cuda13-plugin, nvidia-cuda-nvcc, nvidia-nvvm)"
    for file in files:
        if not (cuda_dir() / file).is_file():
            return f"reading what the assembler says needs {cuda_dir() / file} (nvidia-cuda-nvcc)"
    return None


def cuda_dir() -> Path:
    """Where NVIDIA's Python packages lie."""
    return Path(next(iter(importlib.util.find_spec("nvidia.cu13").submodule_search_locations)))


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A script in a process of its own, because XLA's flags are read once; fails with the end of what it said."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran
