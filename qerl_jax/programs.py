"""Programs that record themselves, so that they can be compiled before their first call.

`program` stands in the place of `jax.jit`. While `record` runs a function, calls of programs are noted and not made: a
call returns the shapes of its results, from which the next ones are called. So the functions of rollout and update,
run once on the shapes of their arguments, are the list of their programs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Self

import jax
from jax.extend.core import get_opaque_trace_state
from qerl_kernels.dispatch import say_once
from qerl_kernels.kernel_programs import kernel_programs

from qerl_jax import lowered, partition
from qerl_jax.compilation import is_committed
from qerl_jax.lowered import LoweredPrograms
from qerl_jax.messages import one_line
from qerl_jax.parallel import ALONE, Replicas

ALIKE = {"xla_gpu_autotune_level": 0}
"""Compiler options of a program whose results must have the same bits on all replicas, each of which may compile it by
itself. XLA's autotuner picks the fastest kernel, and with it the order of a sum: two of six processes had other bits of
one sum of squares, on H200 of one host.
"""

_OF_COMPILER = "compiler_options"  # among those of `jax.jit`
with jax.core.eval_context():
    _OUTSIDE = get_opaque_trace_state()  # of all programs

_CACHE_HIT = "/jax/compilation_cache/cache_hits"  # JAX's event
_LOAD_SECONDS = 0.5  # for a program from the persistent cache; of one that it compiles, XLA needs no kernel before
_SWITCH_SECONDS = 5e-4
_FROZEN_BY_THE_PROCESS = 10_000  # objects, fewer than jax has; Python 3.12 begins with some hundred frozen ones

_Caller = Callable[[Any, tuple, dict[str, Any]], Any]
_caller: contextvars.ContextVar[_Caller | None] = contextvars.ContextVar("caller of programs", default=None)


def program(function: Callable | None = None, **options: Any) -> Any:
    """`jax.jit`, whose calls `record` can note, and an `Ahead` compiles before they are made. A decorator.

    A call finds the program that was compiled for a recorded one if static arguments are passed the same way (by
    position or by name) and arrays are committed to a device where those were. A number of Python's counts as static.

    Args:
      options: those of `jax.jit`.
    """
    if function is None:
        return functools.partial(program, **options)

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        return lowered.call(function, args, kwargs)

    @functools.cache
    def on_devices(count: int, is_nested: bool) -> Any:
        """The program on arrays that are divided over so many devices; JAX rejects compiler options of a nested one."""
        given = {name: value for name, value in options.items() if not (is_nested and name == _OF_COMPILER)}
        if count == 1:
            return jax.jit(alone, **given)

        @functools.wraps(function)
        def pinned(*args: Any, **kwargs: Any) -> Any:
            return partition.pinned(function(*args, **kwargs), count)

        return jax.jit(pinned, **given)

    whole = on_devices(1, False)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_nested = get_opaque_trace_state() != _OUTSIDE  # whatever the arguments are: a function may hold its own
        jitted = on_devices(partition.devices_of((args, kwargs)), is_nested and _OF_COMPILER in options)
        caller = None if is_nested else _caller.get()
        return jitted(*args, **kwargs) if caller is None else caller(jitted, args, kwargs)

    call.lower, call.trace = whole.lower, whole.trace
    return call


@contextlib.contextmanager
def calling(caller: _Caller | None) -> Iterator[None]:
    """Within this context `caller(program, args, kwargs)` makes the calls of programs; None: each is called."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


class Recorded(NamedTuple):
    """A program that was called.

    Attributes:
      function: its function, jitted.
      args, kwargs: arguments of its first call, as shapes.
      traced: the program, not lowered.
      results: shapes of its results, committed to a device where an argument is.
      name: the same in all processes that share lowered programs; None: it has none.
    """

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    traced: jax.stages.Traced
    results: Any
    name: str | None


def record(
    function: Callable,
    *args: Any,
    each: Callable[[Hashable, Recorded], None] = lambda signature, recorded: None,
    known: dict[Hashable, Recorded] | None = None,
    kept: LoweredPrograms | None = None,
) -> list[Recorded]:
    """The programs that `function(*args)` calls, in the order of their first calls. None runs: `function` and whatever
    calls programs for it gets shapes (`jax.ShapeDtypeStruct`) as their results, and reads no values of them.

    Args:
      function: run once.
      args: its arguments; shapes may stand for arrays (`shapes_of`).
      each: called with the signature of each program, and the program, at its first call.
      known: programs recorded before, which are left out; new ones are added.
      kept: lowered programs of earlier processes.
    """
    known = {} if known is None else known
    before = len(known)

    def note(jitted: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = _signature(jitted, args, kwargs)
        if key not in known:
            with calling(None), kept.used() if kept else contextlib.nullcontext():  # what it calls is a part of it
                traced = jitted.trace(*args, **kwargs)
            results, name = _results(traced, (args, kwargs)), kept.last if kept else None
            known[key] = Recorded(jitted, *shapes_of((args, kwargs)), traced, results, name)
            each(key, known[key])
        return known[key].results

    with calling(note):
        function(*args)
    return list(known.values())[before:]


def shapes_of(tree: Any) -> Any:
    """The shapes of a tree's arrays, committed to a device where these are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return _shape(leaf, leaf.sharding if is_committed(leaf) else None)

    return jax.tree.map(one, tree)


def _shape(leaf: Any, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    weak_type = getattr(leaf, "weak_type", False)  # random keys have none
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)


def _results(traced: jax.stages.Traced, arguments: Any) -> Any:
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(arguments) if is_committed(leaf)), None)
    if partition.devices_of(arguments) > 1:
        return jax.tree.map(_shape, traced.out_info, partition.shardings(traced.out_info, sharding.mesh))
    return jax.tree.map(lambda leaf: _shape(leaf, sharding), traced.out_info)


def _signature(jitted: Any, args: tuple, kwargs: dict[str, Any]) -> Hashable:
    """Equal for calls of one compiled program."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    return jitted, structure, tuple(map(_described, leaves))


def _described(leaf: Any) -> Hashable:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return leaf  # static
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), is_committed(leaf)


class Ahead:
    """Compiles programs before their calls: traces and lowers them in turn, in one thread, and compiles them side by
    side (XLA releases the interpreter's lock), with their kernels beside them. Of several replicas with GPUs of one
    machine the first compiles what has a name, and the others find it in the persistent cache, which JAX lets the first
    one write. (Its keys have the device of a program for the CPU.)

    Within it as a context a call waits for its own program while that is being compiled, and until all that was
    submitted is recorded if it is not known. Once everything is compiled, calls are those of `jax.jit` again, and the
    objects that are there by then are frozen until the context ends, unless the process has frozen some itself:
    Python's full collections of garbage looked at them for half a second in one of eleven updates (64 small layers, a
    CPU). An error of compiling is left to the call, which compiles for itself; one of recording is said, too.

    Args:
      threads: programs and kernels compiled at a time; None: one for each core, at least 2.
      done: called with a line for people, or two, by the first call after everything is compiled.
      kept: lowered programs of earlier processes; those that are new are added.
      replicas: this process among the others of its run.

    Attributes:
      cached: programs that the persistent cache had.
      seconds: from the start until everything was compiled; 0 before.
      waited: seconds that calls have waited for their programs.
    """

    def __init__(
        self,
        threads: int | None = None,
        done: Callable[[str], None] = lambda line: None,
        kept: LoweredPrograms | None = None,
        replicas: Replicas = ALONE,
    ) -> None:
        self._kept = kept
        is_found = jax.config.jax_compilation_cache_dir and jax.default_backend() == "gpu"
        self._replicas = replicas if is_found and replicas.link and replicas.link.is_beside_first else ALONE
        self._began, self._done, self.waited, self.seconds, self.cached = time.perf_counter(), done, 0.0, 0.0, 0
        self._compilers = ThreadPoolExecutor(threads or max(2, os.cpu_count() or 2))
        self._recorder, self._recordings = ThreadPoolExecutor(1), []
        self._known: dict[Hashable, Recorded] = {}
        self._ready: dict[Hashable, Future] = {}  # for each program; done when its compilation has ended
        self._kernels: set[bytes] = set()
        self._changed, self._cancelled = threading.Condition(), threading.Event()
        self._has_frozen, self._here = False, threading.local()
        jax.monitoring.register_event_listener(self._listen)

    def submit(self, function: Callable, *args: Any) -> None:
        """Record `function(*args)` in the background, after what was submitted before, and compile its programs."""
        self._recordings.append(self._recorder.submit(self.begin, function, *args))

    def begin(self, function: Callable, *args: Any) -> list[Future]:
        """Record `function(*args)` and begin to compile its programs, but for those begun before. Returns what compiles
        them.
        """
        begun: list[Future] = []

        def start(key: Hashable, recorded: Recorded) -> None:
            begun.append(self._start(key, recorded))

        with _lowering():
            record(function, *args, each=start, known=self._known, kept=self._kept)
        return begun

    def _start(self, key: Hashable, recorded: Recorded) -> Future:
        if self._cancelled.is_set():
            raise InterruptedError("cancelled")
        ready = Future()
        with self._changed:
            self._ready[key] = ready
            self._changed.notify_all()
        try:
            if recorded.name:
                self._replicas.promise(recorded.name)
            lowered = recorded.traced.lower()
            kernels = kernel_programs(lowered)
            compiling, begun = self._compilers.submit(self._compile, lowered, recorded.name), time.monotonic()
        except BaseException:
            ready.set_result(None)
            raise
        compiling.add_done_callback(lambda _: ready.set_result(None))
        if recorded.name and not self._replicas.is_first:
            return compiling  # they come with the program
        for name in kernels.keys() - self._kernels:
            self._compilers.submit(_compile_kernel, kernels[name], compiling, begun, self._cancelled)
        self._kernels |= kernels.keys()
        return compiling

    def _compile(self, lowered: jax.stages.Lowered, name: str | None) -> None:
        self._here.is_cached = False

        def compiled() -> None:
            if not self._cancelled.is_set():  # while it waited for the first replica
                lowered.compile()

        if name:
            self._replicas.after_first(name, compiled)
        else:
            compiled()
        with self._changed:
            self.cached += self._here.is_cached

    def _listen(self, event: str, **_: Any) -> None:
        """Called in the thread that compiles."""
        if event == _CACHE_HIT:
            self._here.is_cached = True

    @property
    def programs(self) -> int:
        """Programs begun."""
        return len(self._ready)

    def __enter__(self) -> Self:
        self._token = _caller.set(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        _caller.reset(self._token)
        self.cancel()
        if self._has_frozen:
            gc.unfreeze()

    def cancel(self) -> None:
        """Begin no further program; those that are being compiled go on, and nobody waits for them. (Python does when
        it exits: a thread that dies within the compiler takes the process along.)
        """
        if not self._cancelled.is_set():
            jax.monitoring.unregister_event_listener(self._listen)
        self._cancelled.set()
        for executor in (self._recorder, self._compilers):
            executor.shutdown(wait=False, cancel_futures=True)

    def _call(self, jitted: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        began = time.perf_counter()
        self._wait_for(_signature(jitted, args, kwargs))
        is_over = self._is_recorded() and all(ready.done() for ready in self._ready.values())
        if is_over:
            _caller.set(None)
            self._freeze()
        now = time.perf_counter()
        self.waited += now - began
        if is_over:
            self.seconds = now - self._began
            loaded = f" and loaded {self.cached} from the cache" if self.cached else ""
            seconds = f"{self.seconds:.1f} s, of which the run waited {self.waited:.1f}"
            self._done(f"compiled {self.programs - self.cached} programs{loaded} in {seconds}")
            if errors := [error for recording in self._recordings if (error := recording.exception())]:
                self._done(f"not all programs were compiled ahead of their calls: {one_line(errors[0])}")
        return jitted(*args, **kwargs)

    def _is_recorded(self) -> bool:
        return all(recording.done() for recording in self._recordings)

    def _wait_for(self, key: Hashable) -> None:
        with self._changed:
            while key not in self._ready and not self._is_recorded():
                self._changed.wait(0.1)
        if key in self._ready:
            self._ready[key].result()

    def _freeze(self) -> None:
        if gc.get_freeze_count() < _FROZEN_BY_THE_PROCESS:
            gc.collect()
            gc.freeze()
            self._has_frozen = True


@contextlib.contextmanager
def _lowering() -> Iterator[None]:
    """Settings of the interpreter while a thread traces and lowers programs beside others.

    No collection of garbage: they make millions of objects that stay, and looking at them over and over took 2.6 of
    29 s from the command to the end of step 1. Threads switch more often: one that reads weights needs the interpreter
    for microseconds at a time, and waited 5 ms for each of them.
    """
    collects, switching = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(switching)
        if collects:
            gc.enable()


def _compile_kernel(kernel: Any, program: Future, begun: float, cancelled: threading.Event) -> None:
    """Compile a kernel beside its program, unless the persistent cache had the program within `_LOAD_SECONDS`. An error
    is left to the program, which then compiles the kernel itself.
    """
    if jax.config.jax_compilation_cache_dir:
        wait([program], timeout=max(0, begun + _LOAD_SECONDS - time.monotonic()))
    if program.done() or cancelled.is_set():
        return
    try:
        kernel.lower().compile()
    except Exception as error:
        say_once(f"kernels are compiled with their programs, one after the other, because of {error}")
