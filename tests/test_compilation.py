"""The persistent compilation cache, the counter of compiled programs, and programs compiled before their first call."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.kernel_programs import KERNEL_PROGRAM_NAME, TARGET, kernel_programs

from qerl_jax import compilation
from qerl_jax.compilation import (
    CompilationCounter,
    Program,
    WithoutCollections,
    as_committed,
    compile_programs,
    compilers,
    default_cache_dir,
    settled,
    start_compiling,
    use_compilation_cache,
)

CACHED = """
import sys, jax
from qerl_jax.compilation import CompilationCounter, use_compilation_cache
directory = None if sys.argv[1] == "default" else sys.argv[1]
print(use_compilation_cache(directory))
with CompilationCounter() as counter:
    jax.jit(lambda x: x + 2)(1)
print(counter.take())
"""


def run_cached(directory: str, **environment: str) -> list[str]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    command = [sys.executable, "-c", CACHED, directory]
    ran = subprocess.run(
        command, env=cleared | {"JAX_PLATFORMS": "cpu"} | environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.splitlines()


def test_programs_are_kept_in_the_users_cache_folder(tmp_path):
    """A program that takes milliseconds to compile is kept, too; the second process loads it."""
    folder = tmp_path / "qerl-jax" / "compiled"
    said = f"compiled programs are kept in {folder} (compilation_cache_dir)"
    for _ in range(2):
        assert run_cached("default", XDG_CACHE_HOME=str(tmp_path)) == [said, "['jit(<lambda>)']"]
        assert len(list(folder.glob("jit__lambda*-cache"))) == 1


def test_the_cache_can_be_moved_limited_and_turned_off(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assert str(elsewhere) in run_cached("default", JAX_COMPILATION_CACHE_DIR=str(elsewhere))[0]
    assert list(elsewhere.iterdir())
    run_cached(str(tmp_path / "mine"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="60")
    assert not list((tmp_path / "mine").iterdir())
    off = run_cached("none", XDG_CACHE_HOME=str(tmp_path / "off"), JAX_COMPILATION_CACHE_DIR=str(elsewhere))
    assert "no compilation cache" in off[0] and not (tmp_path / "off").exists()
    file = tmp_path / "file"
    file.touch()
    assert "not writable" in run_cached(str(file))[0]


def test_the_default_directory(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "qerl-jax" / "compiled"


def test_a_disabled_cache_stays_disabled(tmp_path):
    was = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert "no compilation cache" in use_compilation_cache(str(tmp_path / "unused"))
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
    assert not (tmp_path / "unused").exists()


def test_the_counter_names_what_is_compiled_once():
    @jax.jit
    def doubled(x):
        return 2 * x

    with CompilationCounter() as counter:
        doubled(np.ones(3, np.float32))
        doubled(np.ones(3, np.float32))
        assert counter.take() == ["jit(doubled)"]
        doubled(np.ones(4, np.float32))
        assert counter.take() == ["jit(doubled)"] and counter.take() == []
    doubled(np.ones(5, np.float32))
    assert counter.take() == []


@pytest.mark.parametrize("collects", [False, True])
def test_no_garbage_is_collected_while_programs_are_lowered(collects):
    """Afterwards it is if it was before, also where a program cannot be lowered."""
    seen = []

    @jax.jit
    def traced(x):
        seen.append(gc.isenabled())
        return x + len(x)

    programs = [Program("array", traced, (jax.ShapeDtypeStruct((2,), jnp.float32),)), Program("number", traced, (1.0,))]
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        compile_programs(programs[:1])
        assert seen == [False] and gc.isenabled() == collects
        with pytest.raises(TypeError, match="len"):
            compile_programs(programs)
        assert seen[-1] is False and gc.isenabled() == collects
        first, second = WithoutCollections(), WithoutCollections()  # as two threads have them
        first.__enter__()
        second.__enter__()
        first.__exit__()
        assert not gc.isenabled()
        second.__exit__()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_arrays_are_committed_where_some_are():
    """Each in its place; those that are committed stay the same objects, and nothing moves where none is."""
    device = jax.devices()[0]
    fixed = jax.device_put(jnp.arange(3), device)
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)
    tree = {"a": jnp.ones(2), "b": [fixed, abstract, None], "c": np.full(4, 5.0, np.float32), "d": jnp.zeros(())}
    free = {name: leaf for name, leaf in tree.items() if name != "b"}
    assert settled(free) is free
    found = settled(tree)
    np.testing.assert_array_equal(found["a"], np.ones(2))
    np.testing.assert_array_equal(found["c"], np.full(4, 5.0))
    np.testing.assert_array_equal(found["d"], 0)
    assert all(found[name].committed for name in free) and not tree["a"].committed
    assert found["a"].unsafe_buffer_pointer() == tree["a"].unsafe_buffer_pointer()
    [same, placed, nothing] = found["b"]
    assert same is fixed and placed.sharding == fixed.sharding and placed.shape == (2,) and nothing is None


@pytest.mark.parametrize("committed", [False, True])
def test_a_call_finds_the_program_compiled_before_it(committed):
    """With donated state that a chain of calls hands on, abstract beforehand."""

    @jax.jit
    def start(key):
        return jnp.broadcast_to(key, (4,)), jnp.zeros((4, 8))

    @jax.jit
    def step(weights, state, numbers):
        keys, x = state
        return keys, x @ weights + numbers

    step = jax.jit(step.__wrapped__, donate_argnums=1)
    weights, key = jax.device_put(np.ones((8, 8), np.float32)), jax.random.key(0)
    if committed:
        weights = jax.device_put(weights, jax.devices()[0])
    key = as_committed(key, weights)
    state = as_committed(jax.eval_shape(start, key), weights)
    numbers = np.ones(8, np.float32)
    told = []
    with CompilationCounter() as counter:
        programs = [Program("start", start, (key,)), Program("step", step, (weights, state, numbers))]
        assert compile_programs(programs, 2, lambda name, count: told.append((name, count))) == 2
        assert sorted(counter.take()) == ["jit(start)", "jit(step)"]
        state = start(key)
        for _ in range(3):
            state = step(weights, state, numbers)
        assert counter.take() == []
    assert sorted(name for name, _ in told) == ["start", "step"] and [count for _, count in told] == [1, 2]


class Noted(jax.stages.Lowered):
    """A jitted function and what it is lowered to at once, of a kernel or of a program: notes that it is compiled."""

    def __init__(self, name: str, log: list[str], *kernels: Noted, until: threading.Event | None = None):
        """`until`: set by the kernel "last", or waited for by a program."""
        self.name, self.log, self.until = name, log, until
        self.kernels = {kernel.name: kernel for kernel in kernels}

    def lower(self) -> Noted:
        return self

    def compile(self) -> None:
        if self.until is not None and self.name != "last":
            assert self.until.wait(60)
        self.log.append(self.name)
        if self.name == "last":
            self.until.set()
        if self.name == "fails":
            raise RuntimeError(self.name)


@pytest.fixture
def by_attribute(monkeypatch):
    """The kernels of a `Noted`."""
    monkeypatch.setattr(compilation, "kernel_programs", lambda lowered: lowered.kernels)


def of(*functions: Noted) -> list[Program]:
    return [Program(function.name, function, ()) for function in functions]


def test_kernels_compile_beside_their_programs_and_once(by_attribute):
    """The programs end after the last kernel here. A kernel that fails is its program's to tell."""
    log, done = [], threading.Event()
    a, fails, last = Noted("a", log), Noted("fails", log), Noted("last", log, until=done)
    programs = Noted("first", log, a, until=done), Noted("second", log, a, fails, until=done)
    assert compile_programs(of(*programs, Noted("third", log, last, a, until=done)), threads=4) == 3
    assert sorted(log[:3]) == ["a", "fails", "last"] and sorted(log[3:]) == ["first", "second", "third"]


@pytest.mark.parametrize("cache", [None, "somewhere"])
def test_no_kernel_is_compiled_for_a_program_that_is_there(by_attribute, monkeypatch, cache):
    """With one thread it is there first. With two it takes a moment, as one from the persistent cache does, and the
    kernel waits for it; without a cache it does not.
    """
    log, loaded = [], threading.Event()
    monkeypatch.setattr(compilation, "_LOAD_SECONDS", 60)
    was = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", cache)
    try:
        assert compile_programs(of(Noted("first", log, Noted("kernel", log))), threads=1) == 1
        assert log == ["first"]
        kernel = Noted("kernel", log) if cache else Noted("last", log, until=loaded)
        if cache:
            threading.Timer(0.2, loaded.set).start()
        assert compile_programs(of(Noted("second", log, kernel, until=loaded)), threads=2) == 1
        assert log == (["first", "second"] if cache else ["first", "last", "second"])
    finally:
        jax.config.update("jax_compilation_cache_dir", was)


def test_no_kernel_begins_after_the_end(by_attribute):
    log, cancelled, over, last = [], threading.Event(), threading.Event(), threading.Event()
    with compilers(3) as pool:
        pool.submit(wait_for_end := lambda: over.wait(60))
        pool.submit(wait_for_end)
        start_compiling(of(Noted("program", log, Noted("kernel", log), until=last)), pool, cancelled)
        cancelled.set()  # the program is in the only free thread and goes on, the kernel waits for one
        over.set()
        time.sleep(0.2)
        last.set()
    assert log == ["program"]


def test_a_kernel_is_no_program():
    """Nothing that the counter counts; and a CPU's programs have none."""

    @jax.jit
    def function(x):
        return jnp.sin(x)

    def kernel():
        return jnp.ones(3)

    kernel.__name__ = KERNEL_PROGRAM_NAME
    with CompilationCounter() as counter:
        jax.jit(kernel).lower().compile()
        assert counter.take() == []
        lowered = function.lower(1.0)
        assert kernel_programs(lowered) == {}
        lowered.compile()
        assert counter.take() == ["jit(function)"]


def test_what_a_future_jax_writes_is_left_out():
    """A kernel with a setting that is no string and no truth value; others are found in their order."""
    settings = {"module": b"m", "use_custom_barrier": False}

    def kernels(**more):
        def function():
            made = [
                jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32))(kernel_hash=name, **settings, **more)
                for name in (b"\xff2", b"1")
            ]
            return sum(made)

        return kernel_programs(jax.jit(function).trace().lower(lowering_platforms=("cuda",)))

    assert list(kernels()) == [b"\xff2", b"1"]
    [again] = kernel_programs(kernels()[b"1"].trace().lower(lowering_platforms=("cuda",)))
    assert again == b"1"
    assert kernels(ranks=np.arange(3)) == {} and kernels(count=np.int32(3)) == {}
