"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl_jax.messages import shown


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside `target` that takes its place, with the mode of the umask, when the block ends
    without an error, and vanishes when it does not. What a killed writer of the same target left is removed; if it was
    killed between the two renames, the old directory returns to its place first. Raises FileExistsError while another
    process writes there.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (target.with_name(f".{target.name}.{what}") for what in ("writing", "replaced"))
    descriptor = _claim(target, temporary)
    try:
        _settle(target, old)
        for rest in temporary.iterdir():
            _remove(rest)
        (new := temporary / "new").mkdir()
        mode = stat.S_IMODE(new.stat().st_mode)
        new.rmdir()
        yield temporary
        temporary.chmod(mode)
        if os.path.lexists(target):
            os.replace(target, old)
        os.replace(temporary, target)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        _settle(target, old)
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Take the lock of an open file or directory, which the kernel releases when the process ends, however it does;
    False where another process has it. A file system without locks is used without.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _claim(target: Path, temporary: Path) -> int:
    """The temporary directory, made if it is not there, open and locked by this process."""
    if temporary.is_symlink():
        temporary.unlink()
    temporary.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    # Or it has been renamed since it was opened.
    if not lock(descriptor) or not (temporary.exists() and os.path.samestat(os.fstat(descriptor), temporary.stat())):
        os.close(descriptor)
        raise FileExistsError(f"{target} is being written by another process: wait for its end, or name another place")
    return descriptor


def _settle(target: Path, old: Path) -> None:
    """Put an old directory back where none is, or remove it."""
    if os.path.lexists(old) and not os.path.lexists(target):
        os.replace(old, target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a kill, a full disk or a loss of power, for which it waits for the disk,
    leaves the old one. A link stays, and its target is replaced. A device or a pipe is written to. Raises OSError
    naming the path.
    """
    with naming(path):
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
            return
        target = path.resolve() if path.is_symlink() else path
        temporary = target.with_name(f".{target.name}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # of a killed writer, or a link that somebody put there
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system name `path`: one raised by a write (disk full, say) names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def check_writable(directory: Path, name: str) -> None:
    """Raise OSError if a directory can neither be written nor made, before hours of work are lost; `name` is the option
    that asked for it. A directory is made for a moment: /proc and /sys take none, whatever their modes say.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            directory.lstat()  # raises for a name that none can have: too long, or with a zero byte
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        trouble = "is not a directory" if not there.is_dir() else "may not be written by this user"
        if writable := there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            tempfile.TemporaryDirectory(dir=there).cleanup()
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{name} {shown(str(directory))} cannot be written: {reason}") from error
    if not writable:
        raise OSError(f"{name} {directory} cannot be written: {there} {trouble}")


def check_file_writable(path: Path, name: str) -> None:
    """Raise OSError if `write_text` cannot write a path; `name` is the option that asked for it."""
    if path.is_dir():
        raise OSError(f"{name} {path} is a directory: name a file")
    if not path.exists() or path.is_file():
        check_writable((path.resolve() if path.is_symlink() else path).parent, f"the directory of {name}")
    elif not os.access(path, os.W_OK):
        raise OSError(f"{name} {path} cannot be written: it may not be written by this user")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")
