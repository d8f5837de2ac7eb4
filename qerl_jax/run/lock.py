"""One run at a time in an output directory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from qerl_jax.atomic import lock, naming
from qerl_jax.checkpoint.run_files import LOCK_FILE
from qerl_jax.config import ConfigError


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock file, which names host and process, for the length of a block; the file stays.

    Raises ConfigError naming host and process if another run holds it; OSError if it cannot be written.
    """
    path = directory / LOCK_FILE
    with naming(path):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        _take(file.fileno(), path)
        with naming(path):
            os.ftruncate(file.fileno(), 0)
            file.write(f"{socket.gethostname()} {os.getpid()}\n")
            file.flush()
        yield


def refuse_locked(directory: Path) -> None:
    """Raise ConfigError as `locked` does; nothing is written."""
    path = directory / LOCK_FILE
    if path.is_file() and os.access(path, os.R_OK | os.W_OK):
        with path.open("r+") as file:
            _take(file.fileno(), path)


def _take(descriptor: int, path: Path) -> None:
    if not lock(descriptor):
        host, process = (*path.read_text().split(), "?", "?")[:2]
        raise ConfigError(
            f"output_dir {path.parent} is in use by another run, process {process} on host {host}: wait until it ends, "
            "or name another output_dir"
        )
