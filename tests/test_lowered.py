"""Lowered programs on disk: traced and lowered once for all processes."""

import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels import dispatch
from qerl_kernels.gpu import H200

from qerl_jax import lowered
from qerl_jax.lowered import LoweredPrograms, as_in_sources, environment
from qerl_jax.programs import program, record

ARGUMENTS = {"x": np.linspace(0, 1, 8, dtype=np.float32)}, jax.random.key(0)


@pytest.fixture
def traced() -> list[str]:
    """One entry for each time that Python traced the function of `made`."""
    return []


def made(traced: list[str], name: str = "scaled", module: str = "made"):
    """A function as this project has them, with donated state, a static argument, and a result of weak type."""

    def scaled(state, key, factor=2):
        traced.append(name)
        noise = jax.random.normal(key, state["x"].shape)
        return {"x": jnp.sin(state["x"]) * factor + noise}, key, state.get("number", 1.0), None

    scaled.__module__, scaled.__qualname__ = f"qerl_jax.{module}", name
    return program(scaled, donate_argnums=0, static_argnames="factor")


def called(function, kept: LoweredPrograms | None, arguments: tuple = ARGUMENTS, **named):
    """The function's results in a process that records it first, as arrays, and whether the last number is weak."""
    [found] = record(lambda: function(*arguments, **named), kept=kept)
    assert found.name is None if kept is None else (kept.directory / found.name).exists()
    state, key, number, nothing = function(*arguments, **named)
    assert nothing is None and jax.tree.structure(found.results) == jax.tree.structure((state, key, number, nothing))
    return np.asarray(state["x"]), np.asarray(jax.random.key_data(key)), float(number), number.weak_type


@pytest.mark.parametrize("number", [{}, {"number": 0.25}])
def test_a_later_process_traces_nothing_and_computes_the_same_bits(tmp_path, traced, number):
    """Each call of `made` is a function that JAX has not seen before, as in another process. Its number has weak type,
    too, where it is an argument.
    """
    arguments = lambda: (ARGUMENTS[0] | jax.tree.map(jnp.asarray, number), ARGUMENTS[1])  # noqa: E731  # donated
    plain = called(made(traced), None, arguments())
    assert plain[-1]
    for first in (True, False):
        traced.clear()
        results = called(made(traced), LoweredPrograms(tmp_path / "new" / "lowered", b"same"), arguments())
        assert traced == ["scaled"] * first
        for ours, expected in zip(results, plain, strict=True):
            np.testing.assert_array_equal(ours, expected)
    assert len(list((tmp_path / "new" / "lowered").iterdir())) == 1


@pytest.mark.parametrize("what", ["environment", "static", "name", "module", "keyword", "weak", "part", "nothing"])
def test_what_a_program_depends_on_is_traced_anew(tmp_path, traced, what):
    """And a file that a killed machine left in part is replaced."""
    before = ({"x": np.float32(0.5)}, ARGUMENTS[1]) if what == "weak" else ARGUMENTS
    called(made(traced), LoweredPrograms(tmp_path, b"same"), before)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    if what == "part":
        file.write_bytes(whole[:-1])
    kept = LoweredPrograms(tmp_path, b"other" if what == "environment" else b"same")
    arguments = {"weak": ({"x": jnp.asarray(0.5)}, ARGUMENTS[1]), "keyword": ARGUMENTS[:1]}.get(what, ARGUMENTS)
    named = {"static": {"factor": 3}, "keyword": {"key": ARGUMENTS[1]}}.get(what, {})
    other = {"name": {"name": "other"}, "module": {"module": "other"}}.get(what, {})
    called(made(traced, **other), kept, arguments, **named)
    assert len(traced) == (1 if what == "nothing" else 2)
    assert len(list(tmp_path.iterdir())) == (1 if what in ("part", "nothing") else 2)
    assert len(file.read_bytes()) == len(whole)


def test_a_program_within_another_is_a_part_of_it(tmp_path, traced):
    inner = made(traced, "inner")

    def outer(state, key):
        return inner(state, key)

    outer.__module__, outer.__qualname__ = "qerl_jax.made", "outer"
    [found] = record(lambda: program(outer)(*ARGUMENTS), kept=LoweredPrograms(tmp_path, b"same"))
    assert found.name.startswith("outer-") and [file.name for file in tmp_path.iterdir()] == [found.name]


def test_functions_that_text_cannot_name(tmp_path, traced):
    """They are not kept. One of the user's; one with a function as static argument."""

    def of_user(x):
        traced.append("of_user")
        return x + 1

    def with_static(x, static):
        traced.append("with_static")
        return x + 1

    with_static.__module__, with_static.__qualname__ = "qerl_jax.made", "with_static"
    for _ in range(2):
        for function, static in ((of_user, {}), (with_static, {"static": test_functions_that_text_cannot_name})):
            function = program(function, static_argnames=tuple(static))
            record(functools.partial(function, np.ones(3), **static), kept=LoweredPrograms(tmp_path, b"same"))
    assert traced == ["of_user", "with_static"] * 2 and not list(tmp_path.iterdir())


def test_versions_are_those_of_the_libraries_that_lower():
    """As Python's own reader of installed libraries has them, which parses a file of each."""
    found = {name.rsplit(".", 1)[0].lower() for name in lowered._versions()}
    every = {f"{each.name.replace('-', '_')}-{each.version}".lower() for each in importlib.metadata.distributions()}
    assert found == {name for name in every if name.startswith(lowered._DISTRIBUTIONS)}
    assert {name.split("-")[0] for name in found} >= {"jax", "jaxlib", "flax", "numpy", "ml_dtypes"}


def test_a_program_is_lowered_for_the_gpu_that_is_asked_about():
    platforms = []
    for gpu in (None, H200):
        with dispatch.lowering_for(gpu) if gpu else contextlib.nullcontext():
            exported, _ = lowered._exported(lambda x: x + 1, [jnp.ones(3)], jax.tree.structure(((0,), {})))
            platforms.append(exported.platforms)
    assert platforms == [("cpu",), ("cuda",)]


def test_sources_and_only_those_of_a_command_decide(tmp_path, monkeypatch):
    """Another byte is another environment, also of the GPU's own tuning table, and so are XLA's flags; a source newer
    than the process, or a process that may have replaced functions, keeps nothing.
    """
    file = tmp_path / "module.py"
    file.write_text("x = 1")
    before = environment([file])
    assert environment([file]) == before
    file.write_text("x = 2")
    assert environment([file]) != before
    tables = []
    for rows in ("[]", "[1]"):
        (tmp_path / "table.json").write_text(rows)
        with dispatch.lowering_for(dataclasses.replace(H200, own_table=str(tmp_path / "table.json"))):
            tables.append(environment([file]))
    assert tables[0] != tables[1]
    after = environment([file])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert environment([file]) != after
    os.utime(file, (1, 1))
    was = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert LoweredPrograms.beside_compiled([file]) is None
        with as_in_sources():
            assert LoweredPrograms.beside_compiled([file]) is not None
            os.utime(file, (time.time() + 60,) * 2)
            assert LoweredPrograms.beside_compiled([file]) is None
            os.utime(file, (1, 1))
            jax.config.update("jax_compilation_cache_dir", None)
            assert LoweredPrograms.beside_compiled([file]) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", was)


@pytest.mark.parametrize(("code", "found"), [(errno.EAGAIN, False), (errno.EACCES, False), (errno.ENOLCK, None)])
def test_only_another_process_is_waited_for(code, found, monkeypatch):
    """Not a file system without locks, where nobody ever ends."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lowered.fcntl, "lockf", refuse)
    assert lowered._is_locked(0, 7) is found


ROLLOUT = """
import hashlib, sys
from pathlib import Path
from test_batch_invariant import rollout, wider
from qerl_jax.lowered import LoweredPrograms, as_in_sources
from qerl_jax.types import Engine
policy = wider(Path(sys.argv[1]), "nvfp4", "bfloat16", "mosaic_gpu")
with as_in_sources(), LoweredPrograms.beside_compiled().used():
    rows = rollout(policy, [0, 3], 2, Engine())
print(hashlib.sha256(b"".join(a.tobytes() for row in rows.values() for a in row)).hexdigest())
"""


@pytest.mark.gpu
def test_a_later_process_runs_the_kernels_of_an_earlier_one(tmp_path):
    """It has traced none, so that no other module has told XLA where their runtime is."""
    if (missing := dispatch.missing_for_mosaic_gpu(jnp.bfloat16)) is not None:
        pytest.skip(f"needs {missing}")
    path = os.pathsep.join([*sys.path, os.path.join(os.path.dirname(__file__), "rollout")])
    environment = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    seen = []
    for place in ("one", "two"):
        command = [sys.executable, "-c", ROLLOUT, str(tmp_path / place)]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        seen.append((ran.stdout, sorted(file.name for file in (tmp_path / "cache" / "lowered").iterdir())))
    assert seen[0] == seen[1] and seen[0][1]
