"""Processes that lower the programs of a run beside it. Lowering is serial Python: of a first start with a GPU of 16
cores it took half.

They start before the run has read anything, import what they need, and wait. Once the run's process lacks a program
(`LoweredPrograms`) it says what they cannot know without its GPU; each then rehearses what the run does, and lowers
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
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import jax
from qerl_kernels import dispatch

from qerl_jax import driver
from qerl_jax.lowered import LoweredPrograms, are_as_begun, are_kept
from qerl_jax.parallel import Replicas
from qerl_jax.programs import record
from qerl_jax.run.hooks import Hooks

_CORES_OF_ONE, _MOST = 4, 4


def useful_workers(
    hooks: Hooks, replicas: Replicas, gpus: Sequence[driver.Described] | None = None, cores: int | None = None
) -> int:
    """One for each four cores, four at most, beside the first process of a command that runs on Hoppers (Mosaic GPU
    lowers for one where it sees no GPU), one for each process, without functions of the user's; else none.

    Args:
      gpus, cores: that this process may use; None: as the system says.
    """
    if hooks != Hooks() or not replicas.is_first or replicas.tensor_parallel > 1 or not are_kept():
        return 0
    gpus, cores = driver.gpus() if gpus is None else gpus, cores or len(os.sched_getaffinity(0))
    return min(cores // _CORES_OF_ONE, _MOST) if gpus and gpus[0].gpu.tier == "wgmma" else 0


class LoweringWorkers:
    """So many `processes`, which end with this one."""

    def __init__(self, count: int = 0) -> None:
        command = [sys.executable, "-P", "-m", "qerl_jax.run.lowering_workers"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        options = {"stdin": pipe, "stdout": nothing, "stderr": nothing, "env": environment, "start_new_session": True}
        self.processes = []
        with contextlib.suppress(OSError):  # the system starts no more
            for _ in range(count):
                self.processes.append(subprocess.Popen(command, **options))
        self._messages: list[bytes] = []  # that wait for the first one
        self._has_begun, self._lock = False, threading.Lock()

    def submit(self, rehearse: Callable, *args: Any) -> None:
        """Lower the programs that `rehearse(*args)` calls, once `begin` has been called."""
        if not self.processes:
            return
        with self._lock:
            self._messages.append(pickle.dumps((rehearse, args)))
            if self._has_begun:
                self._send()

    def begin(self, kept: LoweredPrograms) -> None:
        """Lower what `kept` lacks. Later calls do nothing."""
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                gpu = dispatch.this_gpu() if dispatch.is_for_gpu() else None
                settings = {name: value for name, value in jax.config.values.items() if name != "jax_platforms"}
                self._messages.insert(0, pickle.dumps((kept.directory, kept.environment, gpu, settings)))
                self._send()

    def _send(self) -> None:
        for process in self.processes:
            with contextlib.suppress(OSError, ValueError):  # it has died, or was closed
                process.stdin.write(b"".join(self._messages))
                process.stdin.flush()
        self._messages.clear()

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()


def _receive(messages: SimpleQueue) -> None:
    """Read the pipe. This process ends when the run's has closed it, or has ended in whatever way."""
    try:
        while True:
            messages.put(pickle.load(sys.stdin.buffer))
    finally:  # the pipe can end within a message
        os._exit(0)


def _main() -> None:
    os.nice(5)  # the run goes first where cores are few
    messages = SimpleQueue()
    threading.Thread(target=_receive, args=(messages,), daemon=True).start()
    (directory, environment, gpu, settings), known = messages.get(), {}
    if not are_as_begun():
        return
    for name, value in settings.items():
        if jax.config.values.get(name, value) != value:
            jax.config.update(name, value)
    gc.disable()
    kept = LoweredPrograms(directory, environment, waits=False)
    with dispatch.lowering_for(gpu) if gpu else contextlib.nullcontext():  # None: the CPU
        while True:
            rehearse, args = messages.get()
            record(rehearse, *args, known=known, kept=kept)


if __name__ == "__main__":
    try:
        _main()
    finally:
        os._exit(0)  # Python's own end aborts while the thread reads the pipe
