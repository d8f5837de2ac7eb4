"""Runs an untrusted program in a sandboxed process (layers: see `confine`) and returns its output."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_jax.rewards import confine

MEMORY_BYTES = 10**9
FILE_BYTES = 16 * 10**6
MAX_FILES = 16
DIRECTORY_BYTES = 64 * 10**6
MAX_THREADS = 32
_POLL_SECONDS = 0.05
# Paths Python needs to start and import, besides its own directories; the devices contain no data.
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo",
    "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip


class SandboxError(RuntimeError):
    """Programs cannot be sandboxed on this machine; the message names the missing layer."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of a program.

    Attributes:
      ok: whether it ended by itself with exit code 0.
      output: its standard output, at most `FILE_BYTES`.
      timed_out: whether it was killed at its time limit.
    """

    ok: bool
    output: str
    timed_out: bool


def run(program: str, stdin: str, seconds: float, call: tuple[str, Sequence[Any]] | None = None) -> Result:
    """Run a Python program in the sandbox.

    Args:
      program: source text.
      stdin: standard input.
      seconds: time limit, including the start of the interpreter (about 20 ms).
      call: name and arguments (JSON values) of a function of the program; `output` is then its result as JSON.

    The program has an empty directory as working directory and HOME (at most `MAX_FILES` files of `FILE_BYTES`,
    together `DIRECTORY_BYTES`, no directories), `MEMORY_BYTES` of address space, `MAX_THREADS` threads, and a minimal
    environment.

    Raises SandboxError if the sandbox could not be set up; the program then did not run. Raises OSError (ENOSPC) where
    this machine's disk is full: the outcome says nothing about the program.
    """
    job = {
        "program": program,
        "call": None if call is None else {"name": call[0], "arguments": list(call[1])},
        "parent": os.getpid(),
        "directory": {"bytes": DIRECTORY_BYTES, "files": MAX_FILES},
        "threads": MAX_THREADS,
        "readable": [sys.prefix, sys.base_prefix, *_SYSTEM],
        "limits": {
            "CPU": math.ceil(seconds) + 1,  # in case the clock below misses it
            "AS": MEMORY_BYTES,
            "FSIZE": FILE_BYTES,
            "NOFILE": 64,
            "CORE": 0,
        },
    }
    with (
        tempfile.TemporaryDirectory(prefix="qerl-code-") as directory,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as order,
    ):
        for file, text in ((given, stdin), (order, json.dumps(job))):
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        status, report = os.pipe()
        with open(status, encoding="utf-8") as confined:
            deadline = time.monotonic() + seconds
            process = _start(directory, given.fileno(), output.fileno(), order.fileno(), report)
            try:
                ended = _wait(process, directory, deadline)
            finally:
                process.kill()
                process.wait()
            verdict = confined.read()
        if verdict != "ok" and (ended or verdict):
            raise SandboxError(verdict or f"the interpreter ended with {process.returncode} before it was confined")
        if process.returncode and shutil.disk_usage(directory).free < FILE_BYTES:
            raise OSError(errno.ENOSPC, "the disk is full", directory)
        output.seek(0)
        text = output.read(FILE_BYTES).decode("utf-8", "replace")
        return Result(ended and process.returncode == 0, text, not ended and time.monotonic() >= deadline)


def _start(directory: str, given: int, output: int, order: int, report: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-X", "utf8", str(Path(confine.__file__)), str(order), str(report)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(
            command,
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=environment,
            pass_fds=(order, report),
            start_new_session=True,
        )
    finally:
        os.close(report)


def _wait(process: subprocess.Popen[bytes], directory: str, deadline: float) -> bool:
    """Whether the process ended by itself, in time and within its limits of files, bytes and threads."""
    ended = os.pidfd_open(process.pid)
    try:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([ended], [], [], min(left, _POLL_SECONDS))[0]:
                return True
            if _exceeds(process.pid, directory):
                return False
        return False
    finally:
        os.close(ended)


def _exceeds(pid: int, directory: str) -> bool:
    """Whether a program holds too many files, bytes or threads. Deleted files count while they are open."""
    try:
        if len(os.listdir(directory)) > MAX_FILES or len(os.listdir(f"/proc/{pid}/task")) > MAX_THREADS:
            return True
        paths = [os.path.join(folder, name) for folder in (directory, f"/proc/{pid}/fd") for name in os.listdir(folder)]
    except OSError:  # it has just ended
        return False
    sizes = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values()) > DIRECTORY_BYTES


def require() -> None:
    """Raise SandboxError unless a test program runs in the sandbox here."""
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"programs can be confined on Linux only, this is {sys.platform}")
    if not run("print(42)", "", 60.0).output == "42\n":
        raise SandboxError("a program that prints 42 did not print it")
