"""Compilation: the persistent cache, a counter of compiled programs, and programs compiled before their first call."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
from qerl_kernels.dispatch import say_once
from qerl_kernels.kernel_programs import KERNEL_PROGRAM_NAME, kernel_programs

CACHE_OFF = "none"
_LOAD_SECONDS = 0.5  # for a program from the persistent cache; of one that it compiles, XLA needs no kernel before
_COMPILED = "/jax/core/compile/backend_compile_duration"  # a program was compiled, or loaded from the persistent cache


def default_cache_dir() -> Path:
    """`JAX_COMPILATION_CACHE_DIR`, or a directory in the user's cache folder (`XDG_CACHE_HOME` or ~/.cache)."""
    if directory := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl-jax" / "compiled"


def use_compilation_cache(directory: str | None) -> str:
    """Have JAX keep every compiled program on disk, for later processes to load. Returns one line about it for people.

    By default JAX keeps only programs that took a second to compile; a rollout has several that take less.
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` in the environment overrides that. Kernels that were compiled beside
    their program are kept again on their own (0.5B: 43 files, 2 of 25 MB).

    Args:
      directory: where; None: `default_cache_dir()`. "none": no cache.
    """
    if directory == CACHE_OFF or not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", None)
        return "compiled programs are not kept (no compilation cache)"
    path = default_cache_dir() if directory is None else Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(path, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        jax.config.update("jax_compilation_cache_dir", None)
        return f"compiled programs are not kept: {path} is not writable (compilation_cache_dir)"
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return f"compiled programs are kept in {path} (compilation_cache_dir)"


class CompilationCounter:
    """Counts the programs that this process compiles or loads from the persistent cache until `close`, but for those of
    single kernels.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **details: Any) -> None:
        name = str(details.get("fun_name", ""))
        if event == _COMPILED and name != f"jit({KERNEL_PROGRAM_NAME})":
            self._names.append(name)

    def take(self) -> list[str]:
        """Names of the programs compiled since the last call."""
        count = len(self._names)
        taken, self._names[:count] = self._names[:count], []
        return taken

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> CompilationCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Program(NamedTuple):
    """A jitted function and the arguments of its calls; arrays may be abstract.

    A call finds the program compiled from here only if its static arguments are passed the same way (by position or by
    name), and if its arrays are committed to a device where these are (`jax.Array.committed`; an abstract array with a
    sharding counts as committed).
    """

    name: str
    function: Any
    arguments: tuple

    def lower(self) -> jax.stages.Lowered:
        """The program, not compiled."""
        return self.function.lower(*self.arguments)

    def signature(self) -> Hashable:
        """Equal for programs whose calls are those of one compiled program."""
        leaves, structure = jax.tree.flatten(self.arguments)
        return self.function, structure, tuple(map(_described, leaves))


def _described(leaf: Any) -> Hashable:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return leaf  # static
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), _is_committed(leaf)


class WithoutCollections(contextlib.AbstractContextManager):
    """No collection of garbage while programs are traced and lowered, by several threads or one in another: they make
    millions of objects that stay, and looking at them over and over took 2.6 of 29 s from the command to the end of
    step 1.
    """

    _lock, _depth, _collects = threading.Lock(), 0, True

    def __enter__(self) -> None:
        cls = WithoutCollections
        with cls._lock:
            if cls._depth == 0:
                cls._collects = gc.isenabled()
                gc.disable()
            cls._depth += 1

    def __exit__(self, *error: object) -> None:
        cls = WithoutCollections
        with cls._lock:
            cls._depth -= 1
            if cls._depth == 0 and cls._collects:
                gc.enable()


def compile_programs(
    programs: Iterable[Program],
    threads: int | None = None,
    done: Callable[[str, int], None] | None = None,
    cancelled: threading.Event | None = None,
) -> int:
    """Compile programs before their first call: trace and lower in turn, compile in parallel (XLA releases the GIL).

    Args:
      programs: those that compile longest first.
      threads: programs and kernels compiled at a time; None: one for each core, at least 2.
      done: called after each program with its name and the number of programs done.
      cancelled: once set, no further program is begun.

    Returns:
      The number of programs compiled.
    """
    pool = compilers(threads)
    cancelled = threading.Event() if cancelled is None else cancelled
    try:
        with WithoutCollections():
            running = start_compiling(programs, pool, cancelled)
        count = wait_for(running, done)
    except BaseException:
        cancelled.set()
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for a compiler
        raise
    pool.shutdown(wait=not cancelled.is_set(), cancel_futures=True)
    return count


def compilers(threads: int | None = None) -> ThreadPoolExecutor:
    """Threads that compile, `threads` of them or one for each core, at least 2."""
    return ThreadPoolExecutor(threads or max(2, os.cpu_count() or 2))


def start_compiling(
    programs: Iterable[Program], pool: ThreadPoolExecutor, cancelled: threading.Event | None = None
) -> dict[Future, Program]:
    """Trace and lower programs in turn; each is then compiled in `pool`, and its kernels beside it.

    Arguments as in `compile_programs`.
    """
    running: dict[Future, Program] = {}
    kernels: set[bytes] = set()
    for program in programs:
        if cancelled is not None and cancelled.is_set():
            for future in running:
                future.cancel()
            break
        lowered = program.lower()
        found = kernel_programs(lowered)
        compiling, begun = pool.submit(lowered.compile), time.monotonic()
        for kernel in found:
            if kernel not in kernels:
                pool.submit(_compile_kernel, found[kernel], compiling, begun, cancelled)
        kernels |= found.keys()
        running[compiling] = program
    return running


def _compile_kernel(kernel: Any, program: Future, begun: float, cancelled: threading.Event | None) -> None:
    """Compile a kernel beside its program, unless the persistent cache had the program within `_LOAD_SECONDS`. An error
    is left to the program, which then compiles the kernel itself.
    """
    if jax.config.jax_compilation_cache_dir:
        wait([program], timeout=max(0, begun + _LOAD_SECONDS - time.monotonic()))
    if program.done() or (cancelled is not None and cancelled.is_set()):
        return
    try:
        kernel.lower().compile()
    except Exception as error:
        say_once(f"kernels are compiled with their programs, one after the other, because of {error}")


def wait_for(running: dict[Future, Program], done: Callable[[str, int], None] | None = None) -> int:
    """Wait for the programs of `start_compiling`, but for those cancelled; returns their number. Raises what the
    compiler raises. `done` is as in `compile_programs`.
    """
    count = 0
    for future in as_completed(running):
        if future.cancelled():
            continue
        future.result()
        count += 1
        if done is not None:
            done(running[future].name, count)
    return count


def committed(tree: Any) -> Any:
    """Arrays, abstract or not, committed to the first device, as those restored from a checkpoint are."""
    return _commit(tree, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))


def as_committed(tree: Any, like: Any) -> Any:
    """Arrays, abstract or not, committed to the device to which the leaves of `like` are committed, if they are.

    The results of a jitted function are committed where an argument is. State that takes part in both kinds of calls
    would otherwise have two programs for each function.
    """
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(like) if _is_committed(leaf)), None)
    return tree if sharding is None else _commit(tree, sharding)


def settled(tree: Any) -> Any:
    """The tree with all arrays, abstract or not, committed to one device if some are.

    JAX compiles a program anew where one argument is committed that was not before, and the results of one committed
    argument all are.

    Args:
      tree: arrays; tracers stay as they are, and so does all where some are committed to several devices.
    """
    leaves = jax.tree.leaves(tree)
    are_committed = [_is_committed(leaf) for leaf in leaves]  # once for each: every update asks for thousands
    shardings = {leaf.sharding for leaf, is_committed in zip(leaves, are_committed, strict=True) if is_committed}
    if len(shardings) != 1 or all(are_committed):
        return tree
    [sharding] = shardings
    stay = [
        is_committed or isinstance(leaf, jax.core.Tracer)
        for leaf, is_committed in zip(leaves, are_committed, strict=True)
    ]
    moved = iter(_commit([leaf for leaf, stays in zip(leaves, stay, strict=True) if not stays], sharding))
    staying = iter(stay)
    return jax.tree.map(lambda leaf: leaf if next(staying) else next(moved), tree)


def _commit(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """All arrays in one call, which takes a third of the host's time of a call for each."""
    leaves = jax.tree.leaves(tree)
    arrays = iter(jax.device_put([leaf for leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct)], sharding))

    def commit(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return next(arrays)

    return jax.tree.map(commit, tree)


def _is_committed(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "committed", False)
