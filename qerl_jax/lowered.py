"""Lowered programs on disk, so that a later run traces and lowers none of them again.

JAX's compilation cache begins behind lowering, since its key is the lowered program, and lowering is serial Python,
most of it for the bodies of kernels. `jax.export` makes a value of a lowered program, which a file can hold; a program
that calls it is lowered in a tenth of a second, to the same text in the first run and in later ones. Processes that
lower into one folder at a time divide its programs: each is lowered under a lock.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax import export
from qerl_kernels import dispatch
from qerl_kernels.kernel_programs import TARGET

from qerl_jax.messages import one_line

_PACKAGES = ("qerl_jax", "qerl_kernels")
_DISTRIBUTIONS = ("jax", "nvidia", "flax", "numpy", "ml_dtypes")  # beginnings of the names of those that lower
# Not all of these are among the calls that every later JAX promises to understand; no later one reads these files.
_CALLS = (TARGET, "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
_PATIENCE = 60.0  # seconds that a program of another process is waited for; the slowest take five
_here: contextvars.ContextVar[LoweredPrograms | None] = contextvars.ContextVar("lowered programs", default=None)
_is_as_in_sources = contextvars.ContextVar("no function is replaced", default=False)


class LoweredPrograms:
    """A folder of lowered programs. Their names are hashes of all that they depend on: the function, its arguments, the
    sources of this project, the versions of the libraries that lower, JAX's settings, the GPU and its tuning table.

    Args:
      directory: made with the first program.
      environment: hash of what all programs of a process depend on (`environment`).
      waits: whether a program that another process lowers is waited for; else it is traced without being lowered.

    Attributes:
      on_missing: called before a program is lowered that the folder lacks.
      last: name of the last program that was traced since `used` was entered, if it has one.
    """

    def __init__(self, directory: Path, environment: bytes, waits: bool = True) -> None:
        self.directory, self.environment, self._waits = directory, environment, waits
        self._patience = _PATIENCE
        self.on_missing: Callable[[], None] = lambda: None
        self.last: str | None = None

    @classmethod
    def beside_compiled(cls, sources: Sequence[Path] | None = None) -> Self | None:
        """The folder within JAX's compilation cache. None without a cache, outside of `as_in_sources`, and where a
        source changed since the process began, which may have read it before. `sources`: files; None: this project's.
        """
        sources = _sources() if sources is None else sources
        if not are_kept(sources):
            return None
        if dispatch.facts(jax.local_devices()[0]) is not None:
            # What it has compiled with Mosaic GPU, XLA links with a library that it knows from this import alone.
            importlib.import_module("jax.experimental.mosaic.gpu")
        return cls(Path(jax.config.jax_compilation_cache_dir) / "lowered", environment(sources))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Programs that are traced within this context are read from the folder, or written to it."""
        self.last, token = None, _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)

    def call(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, of tracers and static values, as a call of the lowered function."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        described = _described(function, leaves, structure)
        if described is None:
            return function(*args, **kwargs)
        name = hashlib.sha256(self.environment + described.encode()).hexdigest()
        self.last = f"{function.__name__}-{name}"
        path = self.directory / self.last
        try:
            if (stored := _read(path)) is None:
                self.on_missing()
                with self._claimed(int(name[:15], 16)) as is_ours:
                    stored = _read(path) if is_ours else None
                    if is_ours and stored is None:
                        stored = self._write(path, *_exported(function, leaves, structure))
        except Exception as error:  # of JAX, which cannot write every program; the function's own come again
            dispatch.say_once(f"{function.__name__} is lowered anew in every run, because of {one_line(error)}")
            return function(*args, **kwargs)
        if stored is None:
            return function(*args, **kwargs)
        exported, results = stored
        return jax.tree.unflatten(jax.tree.structure(results), exported.call(*filter(_is_traced, leaves)))

    @contextlib.contextmanager
    def _claimed(self, program: int) -> Iterator[bool]:
        """Whether this process is to lower a program: no other one does, or it takes too long, after which no other is
        waited for either. The kernel ends the claims of a process that dies. Where the folder cannot be written or
        locked, the process that waits lowers all.
        """
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            file = self.directory.with_name(f"{self.directory.name}.claims").open("wb")  # a byte for each program
        except OSError:
            yield self._waits
            return
        end = time.monotonic() + self._patience
        with file:
            while (is_locked := _is_locked(file.fileno(), program)) is False and self._waits:
                if time.monotonic() > end:
                    self._patience = 0.0
                    break
                time.sleep(0.01)
            yield self._waits or is_locked is True

    def _write(self, path: Path, exported: export.Exported, results: Any) -> tuple[export.Exported, Any]:
        stored = pickle.dumps((exported, results))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
                file.write(hashlib.sha256(stored).digest() + stored)
            os.replace(file.name, path)
        except OSError as error:
            dispatch.say_once(f"lowered programs are not kept: {one_line(error)}")
        return exported, results


def call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`function(*args, **kwargs)` while it is traced: from the folder in use, if there is one."""
    folder = _here.get()
    if folder is None:
        return function(*args, **kwargs)
    token = _here.set(None)  # programs that it calls are a part of it
    try:
        return folder.call(function, args, kwargs)
    finally:
        _here.reset(token)


@contextlib.contextmanager
def as_in_sources() -> Iterator[None]:
    """Within this context no function of this project is replaced by another, as in the process of a command."""
    token = _is_as_in_sources.set(True)
    try:
        yield
    finally:
        _is_as_in_sources.reset(token)


def environment(sources: Sequence[Path]) -> bytes:
    """A hash of all that lowering depends on besides a function and its arguments."""
    found = hashlib.sha256()
    for path in sources:
        found.update(f"{path}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    gpu, device = dispatch.this_gpu(), jax.local_devices()[0]
    # Which GPU is a process's own is no matter to what it runs there: those of a run share their programs.
    settings = sorted(pair for pair in jax.config.values.items() if not pair[0].endswith("_visible_devices"))
    settings = settings, os.environ.get("XLA_FLAGS")
    found.update(repr((_versions(), gpu, device.platform, device.device_kind, settings)).encode())
    if gpu.own_table is not None:
        found.update(Path(gpu.own_table).read_bytes())
    return found.digest()


def _versions() -> list[str]:
    """Names of the folders that describe the installed libraries that lower, with their versions. (`importlib.metadata`
    would parse a file of every installed library, half a second of a start.)
    """
    found = (path.name for place in sys.path for path in Path(place).glob("*-info"))
    return sorted({name for name in found if name.lower().startswith(_DISTRIBUTIONS)})


def are_kept(sources: Sequence[Path] | None = None) -> bool:
    """Whether this process keeps lowered programs, as `LoweredPrograms.beside_compiled` says."""
    return bool(jax.config.jax_compilation_cache_dir and _is_as_in_sources.get() and are_as_begun(sources))


def are_as_begun(sources: Sequence[Path] | None = None) -> bool:
    """Whether no source, None: of this project, changed since this process began, which may have read it before."""
    return max(map(_changed, _sources() if sources is None else sources)) <= _process_start()


def _is_locked(file: int, program: int) -> bool | None:
    """Lock a byte of a file, as closing it undoes; False where another process has it, None where nobody can."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, program)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _sources() -> list[Path]:
    roots = (Path(importlib.util.find_spec(package).origin).parent for package in _PACKAGES)
    return sorted(path for root in roots for path in root.rglob("*") if path.suffix in (".py", ".json"))


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _process_start() -> float:
    """Seconds since 1970; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _described(function: Callable, leaves: list[Any], structure: Any) -> str | None:
    """A function and its arguments as text; None where text cannot say them: a function of the user's or made by
    another, an array that is static, a static object without a name of its own.
    """
    if function.__module__.split(".")[0] not in _PACKAGES or "<" in function.__qualname__:
        return None
    if any(isinstance(leaf, np.ndarray | jax.Array) and not _is_traced(leaf) for leaf in leaves):
        return None
    arguments = [repr(jax.typeof(leaf) if _is_traced(leaf) else leaf) for leaf in leaves]
    text = "\n".join([f"{function.__module__}.{function.__qualname__}", str(structure), *arguments])
    return None if " at 0x" in text else text


def _exported(function: Callable, leaves: list[Any], structure: Any) -> tuple[export.Exported, Any]:
    """The lowered function of its traced arguments, and its results with numbers in the place of arrays."""
    results = None

    def flat(*traced: Any) -> list[Any]:
        nonlocal results
        arrays = iter(traced)
        args, kwargs = jax.tree.unflatten(structure, [next(arrays) if _is_traced(leaf) else leaf for leaf in leaves])
        found = jax.tree.leaves(called := function(*args, **kwargs))
        results = jax.tree.unflatten(jax.tree.structure(called), range(len(found)))
        return found

    flat.__name__ = function.__name__
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in filter(_is_traced, leaves)
    ]
    was = jax.config.jax_export_ignore_forward_compatibility
    jax.config.update("jax_export_ignore_forward_compatibility", True)  # as if it were lowered without being written
    try:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CALLS]
        platforms = ("cuda",) if dispatch.target() else None  # None: that of the default device
        found = export.export(jax.jit(flat), platforms=platforms, disabled_checks=checks)(*shapes)
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", was)
    # `Exported.serialize` would need another library. The function that makes its gradient cannot be pickled.
    functions = [field.name for field in dataclasses.fields(found) if callable(getattr(found, field.name))]
    return dataclasses.replace(found, **dict.fromkeys(functions)), results


def _read(path: Path) -> tuple[export.Exported, Any] | None:
    """What was written; None for no file, or a part of one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    stored = data[32:]
    return pickle.loads(stored) if hashlib.sha256(stored).digest() == data[:32] else None
