"""A case of an attack, run in a fork of a process that has imported everything, and the verdict on it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MEMORY = 8 * 10**9  # bytes of address space beyond the parent's that a case may take
REFUSED, STOPPED = 2, 130  # exit codes of the command lines


@dataclasses.dataclass(frozen=True)
class Case:
    """An attack and what must come of it.

    Attributes:
      name: table and what is wrong, such as "dataset: a FIFO".
      run: called in the fork, in the case's own directory; returns the exit code of a command line.
      says: patterns that the output must hold, in any order; a refusal also is one line that begins with "error: ".
      code: expected exit code, or several.
      limit: seconds after which it counts as a hang.
      prepare: called with the case's directory before the fork.
      during: called with directory and process id of the fork while it runs.
      check: called with the directory after it; returns what is wrong, or "".
      writes: names in the directory that may change; everything else must be as `prepare` left it.
      uses: what it needs beside model and dataset: "adapter"; "used", a finished run; "records.jsonl", of a finished
        evaluation; "pair", the base and adapter of `tests/test_export_command.py`.
      stdout: a device to write standard output to in place of a file, or "|", a pipe that nobody reads.
      encoding: encoding of standard output and error.
    """

    name: str
    run: Callable[[Path], int]
    says: tuple[str, ...] = ()
    code: int | tuple[int, ...] = REFUSED
    limit: float = 20.0
    prepare: Callable[[Path], object] = lambda place: None
    during: Callable[[Path, int], object] | None = None
    check: Callable[[Path], str] = lambda place: ""
    writes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    stdout: str = ""
    encoding: str = "utf-8"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case: what is wrong with it ("" for nothing), its last line, and its seconds."""

    wrong: str
    said: str
    seconds: float


def quoted(text: str) -> str:
    """A pattern of `Case.says` for a text as it stands."""
    return re.escape(" ".join(text.split()))


def attempt(case: Case, template: Path, place: Path) -> Outcome:
    """Run a case in a copy of `template` at `place`, which is deleted afterwards."""
    unused = [name for name in ("adapter", "used", "pair", "records.jsonl") if name not in case.uses]
    shutil.copytree(template, place, symlinks=True, ignore=lambda here, _: unused if Path(here) == template else [])
    try:
        case.prepare(place)
        before = contents(place, case.writes)
        began = time.monotonic()
        code, output, errors = _fork(case, place)
        seconds = time.monotonic() - began
        wrong = _verdict(case, code, output, errors) or _loss(before, contents(place, case.writes)) or case.check(place)
        last = next((line for line in reversed((errors.strip() or output.strip()).splitlines()) if line.strip()), "")
        return Outcome(wrong, last.replace(str(place), "."), seconds)
    finally:
        with contextlib.suppress(OSError):
            place.chmod(0o755)
        shutil.rmtree(place, ignore_errors=True)


def _fork(case: Case, place: Path) -> tuple[int | None, str, str]:
    """Exit code (None: killed at the limit), standard output and standard error."""
    logs = [place.with_name(f"{place.name}.{name}") for name in ("out", "err")]
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run_here(case, place, *logs)
    deadline = time.monotonic() + case.limit
    if case.during is not None:
        case.during(place, child)
    code = None
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what it has left behind
    if code is None:
        os.waitpid(child, 0)
    texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    for log in logs:
        log.unlink(missing_ok=True)
    return code, *texts


def _run_here(case: Case, place: Path, output: Path, errors: Path) -> None:
    """The fork: ends as an interpreter does that has called `sys.exit(main())`."""
    code: Any = 1
    try:
        os.setsid()
        weakref.finalize._registry.clear()  # the parent's temporary directories are not ours to remove
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(place)
        for number, path in ((1, case.stdout or output), (2, errors)):
            file = _unread() if path == "|" else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
            os.close(file)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), case.encoding)
        sys.stderr = io.TextIOWrapper(
            os.fdopen(2, "wb", 0, closefd=False), case.encoding, "backslashreplace", write_through=True
        )
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            code = case.run(place)
        except SystemExit as stop:
            code = stop.code
        threading._shutdown()
        atexit._run_exitfuncs()
        code = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored while flushing sys.stdout: {error!r}", file=sys.stderr)
        code = 120
    os._exit(code)


def _unread() -> int:
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def _verdict(case: Case, code: int | None, output: str, errors: str) -> str:
    if code is None:
        return f"hang: no end after {case.limit:g} s; it said {(errors or output)[-200:]!r}"
    told = output + errors
    for word in ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error", "panicked at"):
        if word in told:
            return f"traceback: …{told[told.index(word) :][-400:]!r}"
    expected = case.code if isinstance(case.code, tuple) else (case.code,)
    if code not in expected:
        kind = "wrong success" if code == 0 else "exit code"
        return f"{kind}: ended with {code}, expected {case.code}; it said {told[-300:]!r}"
    if code == REFUSED:
        lines = errors.strip().splitlines()
        if len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) > 3000:
            return f"words: not one line that begins with 'error: ': {errors[-600:]!r}"
    for pattern in case.says:
        if not re.search(pattern, " ".join(told.split())):
            return f"words: {pattern!r} is not in {told.strip()[-400:]!r}"
    return ""


def contents(place: Path, but: tuple[str, ...]) -> Mapping[str, str]:
    """Digest of every file, link and directory below a place by its name, those of `but` left out."""
    found = {}
    for folder, folders, files in os.walk(place):
        here = Path(folder).relative_to(place)
        folders[:] = [name for name in folders if str(here / name) not in but and "-rescued-" not in name]
        for name in (*folders, *files):
            path = Path(folder) / name
            if str(here / name) in but:
                continue
            kind = "link" if path.is_symlink() else "file" if path.is_file() else "other"
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if kind == "file" else kind
            found[os.fsencode(here / name).decode(errors="backslashreplace")] = digest
    return found


def _loss(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            change = "appeared" if name not in before else "is gone" if name not in after else "changed"
            return f"loss: {name} {change}"
    return ""
