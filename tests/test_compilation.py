"""The persistent compilation cache, the counter of compiled programs, and committed arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.compilation import CompilationCounter, default_cache_dir, settled, use_compilation_cache

CACHED = """
import sys, numpy as np
from qerl_jax.compilation import CompilationCounter, use_compilation_cache
from qerl_jax.programs import Ahead, program
directory = None if sys.argv[1] == "default" else sys.argv[1]
print(use_compilation_cache(directory))
with CompilationCounter() as counter, Ahead(2, print) as ahead:
    function = program(lambda x: x + 2)
    ahead.submit(function, np.ones(3))
    while not ahead.seconds:
        function(np.ones(3))
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
    """A program that takes milliseconds to compile is kept, too; the second process loads it, and says so."""
    folder = tmp_path / "qerl-jax" / "compiled"
    said = f"compiled programs are kept in {folder} (compilation_cache_dir)"
    for counted in ("compiled 1 programs in", "compiled 0 programs and loaded 1 from the cache in"):
        first, told, names = run_cached("default", XDG_CACHE_HOME=str(tmp_path))
        assert (first, names) == (said, "['jit(<lambda>)']") and told.startswith(counted)
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
