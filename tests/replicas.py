"""Replicas in threads of one process, which share its device and its compiled programs, and in real processes."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.launch import free_port
from qerl_jax.parallel import Replicas

SBATCH = Path(__file__).resolve().parent.parent / "tools" / "train.sbatch"
_PATIENCE = 60.0  # seconds


class Store:
    """Messages by (number of the exchange, or word; replica)."""

    def __init__(self):
        self.messages: dict[tuple[int | str, int], bytes] = {}
        self.changed = threading.Condition()

    def put(self, key: tuple[int | str, int], message: bytes) -> None:
        with self.changed:
            self.messages[key] = message
            self.changed.notify_all()

    def get(self, key: tuple[int, int]) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.messages, _PATIENCE), f"nobody sent {key}"
            return self.messages[key]


class ThreadLink:
    """A `parallel.Link` through a store."""

    is_beside_first = True

    def __init__(self, store: Store, index: int, count: int):
        self.store, self.index, self.count, self.number = store, index, count, 0

    def exchange(self, message: bytes) -> list[bytes]:
        number, self.number = self.number, self.number + 1
        self.store.put((number, self.index), message)
        return [self.store.get((number, i)) for i in range(self.count)]

    def announce(self, message: bytes) -> None:
        self.store.put((self.number, self.index), message)

    def tell(self, word: str) -> None:
        self.store.put((word, 0), b"")

    def hears(self, word: str, seconds: float) -> bool:
        with self.store.changed:
            return self.store.changed.wait_for(lambda: (word, 0) in self.store.messages, seconds)

    def before_end(self, action: Callable[[], None]) -> None:
        self.last = action

    def leave(self) -> None:
        self.has_left = True

    def all_gather(self, words: np.ndarray) -> np.ndarray:
        return np.stack([np.frombuffer(data, words.dtype) for data in self.exchange(words.tobytes())])

    def all_reduce(self, vector: jax.Array) -> jax.Array:
        return jnp.asarray(self.all_gather(np.asarray(vector)).sum(axis=0))


def on_replicas(count: int, function: Callable[[Replicas], Any]) -> list[Any]:
    """`function(replicas)` of each of `count` replicas, by index, beside the others; an error where it raised one."""
    store = Store()

    def run(index: int) -> Any:
        replicas = Replicas(index, count, ThreadLink(store, index, count))
        try:
            with replicas:
                return function(replicas)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


SRUN = """#!/usr/bin/env bash
echo "$@" > "$PLACE/words"
for i in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$PYTHON" "$SCRIPT" > "$PLACE/$i.out" 2> "$PLACE/$i.err" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
"""Starts a script as the tasks of a step, in place of the command."""


def under_slurm(count: int, script: Path, place: Path, *words: str, **environment: str) -> tuple[str, list[str]]:
    """(command that `tools/train.sbatch WORDS` has `srun` start, standard output of `script` as each of its tasks
    without what gloo says). Fails where one fails.

    Args:
      count: tasks, on this host.
      script: a program, which finds the environment of a task.
      place: an empty directory.
      environment: of the tasks, besides.
    """
    (place / "srun").write_text(SRUN)
    (place / "srun").chmod(0o755)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    own = {
        "PLACE": str(place),
        "SCRIPT": str(script),
        "PYTHON": sys.executable,
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    path = {"PATH": f"{place}:{os.environ['PATH']}"}
    job = ["bash", str(SBATCH), *words]
    done = subprocess.run(job, env=os.environ | step | own | path | environment, timeout=200, check=False)
    assert done.returncode == 0, "".join(file.read_text()[-3000:] for file in place.glob("*.err"))
    outputs = [(place / f"{index}.out").read_text() for index in range(count)]
    said = ["".join(line for line in output.splitlines(True) if "[Gloo]" not in line) for output in outputs]
    return (place / "words").read_text(), said
