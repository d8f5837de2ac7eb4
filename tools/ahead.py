"""Programs compiled for an H200 by processes that do not touch a GPU: on all cores, and while the GPU is timing.

A program is described by the arguments of a function `build`, which returns (function, its arguments as shapes). The
result holds the machine code of the kernels; it can be loaded and called on an H200. GEMMs by XLA are not autotuned,
which needs a GPU: a program with such GEMMs is better compiled where it runs.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import h200
import jax
import jax.experimental.mosaic.gpu  # sets the path of the runtime that the kernels' host code calls, on load too
from jax.experimental import serialize_executable


def compile_all(
    build: Callable, programs: Iterable[tuple], jobs: int, options: dict | None = None
) -> Iterator[tuple[tuple, bytes | str]]:
    """(program, executable) of each as it is done; where the compiler refuses, its message in place of the executable.

    Args:
      build: a function of a module; `build(*program)` -> (function, arguments), arrays as `jax.ShapeDtypeStruct`.
      programs: hashable arguments of `build`.
      jobs: processes.
      options: XLA compiler options of every program.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, _start) as pool:
        tasks = {pool.submit(_compile, build, program, options): program for program in programs}
        for task in concurrent.futures.as_completed(tasks):
            yield tasks[task], task.result()


def load(executable: bytes, *args: Any) -> Callable:
    """An executable of `compile_all`, loaded on the GPU of this machine, for calls with arguments like `args`."""
    device = jax.devices()[0]
    code, out = pickle.loads(executable)
    inputs = jax.tree.structure((args, {}))
    return serialize_executable.deserialize_and_load(
        code, inputs, jax.tree.structure(out), backend=device.client, execution_devices=[device]
    )


def loader(executables: Mapping[tuple, bytes | str], build: Callable) -> Callable[..., Callable | str]:
    """(arguments of `build`) -> the executable of that program, loaded, or the compiler's message."""

    def loaded(*program: Any) -> Callable | str:
        found = executables[program]
        return found if isinstance(found, str) else load(found, *build(*program)[1])

    return loaded


def _start() -> None:
    h200.use_compilers()
    h200.assume()


def _compile(build: Callable, program: tuple, options: dict | None) -> bytes | str:
    function, args = build(*program)
    try:
        compiled = h200.lower(jax.jit(function, compiler_options=options), args).compile()
    except Exception as error:  # any refusal of the compiler is an answer
        return repr(error)[:300]
    out = jax.tree.map(lambda _: 0, compiled.out_info)
    return pickle.dumps((serialize_executable.serialize(compiled)[0], out))
