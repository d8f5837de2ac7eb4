"""Processes that lower the programs of a run beside it. Lowering is serial Python: of a first start with a GPU of 16
cores it took half.

They start before the run has read anything, import what they need, and wait. Once the run's process lacks a program
(`LoweredPrograms`) it says what they cannot know without its GPU; each then rehearses the run as that does, and lowers
what nobody else has begun. None starts a GPU: a program is lowered for one by its facts (`dispatch.lowering_for`). One
that fails is not missed, because the run lowers whatever is not there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from qerl_kernels import dispatch
from qerl_kernels.gpu import Gpu

from qerl_jax import driver
from qerl_jax.config import Config
from qerl_jax.lowered import LoweredPrograms, are_as_begun, are_kept
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.programs import record
from qerl_jax.run.hooks import Hooks
from qerl_jax.run.rehearsal import rehearse_run

_CORES_OF_ONE, _MOST = 4, 4


@dataclass(frozen=True)
class _Task:
    """What a worker is told.

    Attributes:
      directory, environment: of the run's `LoweredPrograms`.
      gpu: to lower for; None: the CPU.
      settings: JAX's, by name.
      config, device_bytes: arguments of `rehearse_run`.
    """

    directory: Path
    environment: bytes
    gpu: Gpu | None
    settings: dict[str, Any]
    config: Config
    device_bytes: float | None


def useful_workers(
    hooks: Hooks, replicas: Replicas, gpus: Sequence[driver.Described] | None = None, cores: int | None = None
) -> int:
    """One for each four cores, four at most, where a command's only process runs on a Hopper (Mosaic GPU lowers for one
    where it sees no GPU) without functions of the user's; else none.

    Args:
      gpus, cores: of this machine; None: as the system says.
    """
    if hooks != Hooks() or replicas != ALONE or not are_kept():
        return 0
    gpus, cores = driver.gpus() if gpus is None else gpus, cores or os.cpu_count() or 1
    return min(cores // _CORES_OF_ONE, _MOST) if gpus and gpus[0].gpu.tier == "wgmma" else 0


class LoweringWorkers:
    """So many `processes`, which end with this one. As a context they end with its block."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-P", "-m", "qerl_jax.run.lowering_workers"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        options = {"stdin": pipe, "stdout": nothing, "stderr": nothing, "env": environment, "start_new_session": True}
        self.processes = [subprocess.Popen(command, **options) for _ in range(count)]
        self._has_begun = False

    def begin(self, kept: LoweredPrograms, config: Config, device_bytes: float | None) -> None:
        """Lower the programs of a run that `kept` lacks. Once: later calls do nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        gpu = dispatch.this_gpu() if dispatch.is_for_gpu() else None
        settings = {name: value for name, value in jax.config.values.items() if name != "jax_platforms"}
        task = pickle.dumps(_Task(kept.directory, kept.environment, gpu, settings, config, device_bytes))
        for process in self.processes:
            with contextlib.suppress(OSError):  # it has died
                process.stdin.write(task)
                process.stdin.flush()

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_with_pipe() -> None:
    """End this process when the run's has closed the pipe, or has ended in whatever way."""
    sys.stdin.buffer.read()
    os._exit(0)


def _main() -> None:
    try:
        task: _Task = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    threading.Thread(target=_end_with_pipe, daemon=True).start()
    if not are_as_begun():
        return
    for name, value in task.settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
    gc.disable()
    kept = LoweredPrograms(task.directory, task.environment, waits=False)
    with dispatch.lowering_for(task.gpu) if task.gpu else contextlib.nullcontext():
        record(rehearse_run, task.config, Hooks(), task.device_bytes, kept=kept)
    os._exit(0)  # another thread waits for the pipe


if __name__ == "__main__":
    _main()
