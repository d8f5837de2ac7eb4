"""The persistent compilation cache, the counter of compiled programs, and committed arrays."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qerl_jax import partition
from qerl_jax.compilation import CompilationCounter, _commit, default_cache_dir, settled, use_compilation_cache

CACHED = """
import numpy as np
from qerl_jax.compilation import CompilationCounter, use_compilation_cache
from qerl_jax.programs import Ahead, program
print(use_compilation_cache(None))
for more in [], [program(lambda x: x * 3)]:
    with CompilationCounter() as counter, Ahead(1, print) as ahead:
        function = program(lambda x: x + 2)
        for each in function, *more:
            ahead.submit(each, np.ones(3))
        while not ahead.seconds:
            function(np.ones(3))
    print(counter.take())
"""


def test_programs_are_kept_in_the_users_cache_folder(tmp_path):
    """A program that takes milliseconds to compile is kept, too; another function of the same text loads it, as another
    process does, and the run says so, also where the same thread then compiles a new one.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", CACHED], env=environment, capture_output=True, text=True, check=True)
    where, *told = ran.stdout.splitlines()
    folder = tmp_path / "qerl-jax" / "compiled"
    assert where == f"compiled programs are kept in {folder} (compilation_cache_dir)"
    assert told[0].startswith("compiled 1 programs in") and told[1] == "['jit(<lambda>)']"
    assert told[2].startswith("compiled 1 programs and loaded 1 from the cache in")
    assert told[3] == "['jit(<lambda>)', 'jit(<lambda>)']"
    assert len(list(folder.glob("jit__lambda*-cache"))) == 2


SETTINGS = ("compilation_cache_dir", "enable_compilation_cache", "persistent_cache_min_compile_time_secs")


@pytest.fixture
def settings() -> Iterator[Callable[[], tuple]]:
    """JAX's own of the cache, as they are at a call; put back afterwards."""
    read = lambda: tuple(getattr(jax.config, f"jax_{name}") for name in SETTINGS)  # noqa: E731
    before = read()
    yield read
    for name, value in zip(SETTINGS, before, strict=True):
        jax.config.update(f"jax_{name}", value)


def test_the_cache_can_be_moved_limited_and_turned_off(settings, tmp_path):
    mine = str(tmp_path / "mine")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 60)
    use_compilation_cache(mine, {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "60"})
    assert settings() == (mine, True, 60)
    assert use_compilation_cache(mine, {}) == f"compiled programs are kept in {mine} (compilation_cache_dir)"
    assert settings() == (mine, True, 0)
    for folder in "mine", "other":
        use_compilation_cache(str(tmp_path / folder), {})
        jax.block_until_ready(jax.jit(lambda x: x * 3 + len(folder))(1.0))  # noqa: B023
    assert all(any((tmp_path / folder).glob("*-cache")) for folder in ("mine", "other"))
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is not writable" in use_compilation_cache(str(tmp_path / "file"))
    assert settings()[0] is None
    jax.config.update("jax_enable_compilation_cache", False)
    assert "no compilation cache" in use_compilation_cache(str(tmp_path / "unused"))
    assert not (tmp_path / "unused").exists()


def test_the_default_directory():
    assert default_cache_dir({}) == Path.home() / ".cache" / "qerl-jax" / "compiled"
    assert default_cache_dir({"XDG_CACHE_HOME": "a", "JAX_COMPILATION_CACHE_DIR": "b"}) == Path("b")


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


def test_each_array_abstract_or_not_is_committed_to_its_own_sharding():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    wanted = [NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec(), PartitionSpec(None, "x"))]
    for leaves in (jnp.ones((3, 2, 2)), [jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 3):
        assert [leaf.sharding for leaf in _commit(list(leaves), wanted)] == wanted


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

    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    parts = [jax.device_put(jnp.ones(2), NamedSharding(mesh, spec)) for spec in (PartitionSpec("x"), PartitionSpec())]
    assert settled([*parts, tree["a"]])[2].sharding == parts[1].sharding  # whole on each device
    several = [*parts, fixed, tree["a"]]
    assert settled(several) is several


def test_arrays_on_a_mesh_of_processes_are_of_one_device():
    """Those that tensor parallelism divides have a mesh of its axis."""

    def on(axis: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(jax.sharding.AbstractMesh((2,), (axis,)), PartitionSpec())
        return jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)

    assert [partition._devices_of_mesh(on(axis)) for axis in (partition.AXIS, "processes")] == [2, 1]
