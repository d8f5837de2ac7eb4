"""Programs compiled for an H200 by processes that do not touch a GPU: on all cores at a time, and beside a GPU that
somebody is timing.

A program is described by the arguments of a function `build`, which returns (function, its arguments as shapes). What
comes back can be loaded and called where there is such a GPU; it holds the kernels' machine code. XLA's own products
are not tuned (that takes a GPU), so that a program with some of them is better compiled where it runs.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.experimental.mosaic.gpu  # tells XLA where the runtime is that the kernels' host code calls
from jax.experimental import serialize_executable, topologies
from jax.sharding import NamedSharding, PartitionSpec
from qerl_kernels import dispatch

TARGET = Path(__file__).parent.parent / "tests" / "kernels" / "h200.txtpb"


def compile_all(
    build: Callable, programs: Iterable[tuple], jobs: int, options: dict | None = None
) -> Iterator[tuple[tuple, bytes | str]]:
    """(program, executable) of each as it is done; a string where the compiler refuses, with what it says.

    Args:
      build: a function of a module; `build(*program)` -> (function, arguments), arrays as `jax.ShapeDtypeStruct`.
      programs: hashable arguments of `build`.
      jobs: processes.
      options: XLA's, of every program.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, _leave_the_gpu_alone) as pool:
        tasks = {pool.submit(_compile, build, program, options): program for program in programs}
        for task in concurrent.futures.as_completed(tasks):
            yield tasks[task], task.result()


def load(executable: bytes, *args: Any) -> Callable:
    """What `compile_all` made, on this machine's GPU; `args` as it is to be called with."""
    device = jax.devices()[0]
    code, out = pickle.loads(executable)
    inputs = jax.tree.structure((args, {}))
    return serialize_executable.deserialize_and_load(
        code, inputs, jax.tree.structure(out), backend=device.client, execution_devices=[device]
    )


def _leave_the_gpu_alone() -> None:
    jax.config.update("jax_platforms", "cpu")
    dispatch.missing_for_mosaic_gpu = lambda dtype: None  # asked of the default device, which is not the target
    found = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    for folder in found.submodule_search_locations if found else ():
        if (Path(folder) / "bin" / "ptxas").exists():
            os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_gpu_cuda_data_dir={folder}"


def _compile(build: Callable, program: tuple, options: dict | None) -> bytes | str:
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET.read_text())
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    function, args = build(*program)
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), args)
    try:
        with jax.set_mesh(mesh):
            traced = jax.jit(function, compiler_options=options).trace(*args)
            compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    except Exception as error:  # any refusal of the compiler is an answer
        return repr(error)[:300]
    out = jax.tree.map(lambda _: 0, compiled.out_info)
    return pickle.dumps((serialize_executable.serialize(compiled)[0], out))
