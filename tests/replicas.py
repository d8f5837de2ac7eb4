"""Replicas in threads of one process, which share its device and its compiled programs, and in real processes."""

from __future__ import annotations

import socket
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

from qerl_jax.parallel import Replicas

_PATIENCE = 60.0  # seconds


class Store:
    """Messages by (number of the exchange, replica)."""

    def __init__(self):
        self.messages: dict[tuple[int, int], bytes] = {}
        self.changed = threading.Condition()

    def put(self, key: tuple[int, int], message: bytes) -> None:
        with self.changed:
            self.messages[key] = message
            self.changed.notify_all()

    def get(self, key: tuple[int, int]) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.messages, _PATIENCE), f"nobody sent {key}"
            return self.messages[key]


class ThreadLink:
    """A `parallel.Link` through a store."""

    def __init__(self, store: Store, index: int, count: int):
        self.store, self.index, self.count, self.number = store, index, count, 0

    def exchange(self, message: bytes) -> list[bytes]:
        number, self.number = self.number, self.number + 1
        self.store.put((number, self.index), message)
        return [self.store.get((number, i)) for i in range(self.count)]

    def announce(self, message: bytes) -> None:
        self.store.put((self.number, self.index), message)

    def all_gather(self, words: np.ndarray) -> np.ndarray:
        return np.stack([np.frombuffer(data, words.dtype) for data in self.exchange(words.tobytes())])

    def all_reduce(self, values: jax.Array) -> jax.Array:
        return jnp.asarray(self.all_gather(np.asarray(values)).sum(axis=0))


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


def on_processes(count: int, script: Path, *arguments: object, timeout: float = 120.0) -> list[str]:
    """Standard output of `script` in the process of each replica, by index, without what gloo says. Fails where one
    fails.

    Args:
      count: replicas, joined on the CPU.
      script: called with coordinator, index and count, then `arguments`.
      timeout: seconds.
    """
    with socket.socket() as some:
        some.bind(("localhost", 0))
        coordinator = f"localhost:{some.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, script, coordinator, str(index), str(count), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        results = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return ["".join(line for line in output.splitlines(True) if "[Gloo]" not in line) for output, _ in results]
