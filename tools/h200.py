"""Compiling for a GPU on a machine without one: the flags, the target, and scripts in processes of their own.

XLA reads its flags once, when jax is first asked for a device: `use_compilers` comes before that.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from qerl_kernels.gpu import Gpu

TARGET = Path(__file__).parent / "h200.txtpb"
BY_PTXAS = ("--xla_gpu_enable_libnvptxcompiler=false", "--xla_gpu_enable_libnvjitlink=false")  # a program, no library
PRINTED = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}  # Mosaic GPU's environment: PTX, ptxas' report
PACKAGES = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")


def missing() -> str | None:
    """The first thing this machine lacks for compiling for a GPU, None where it has all."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11):
        return f"compiling for a GPU needs jax 0.11 or later (this is {jax.__version__})"
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"compiling for a GPU needs {package} (jax-cuda13-plugin, nvidia-cuda-nvcc, nvidia-nvvm)"
    if not (cuda_dir() / "bin/ptxas").is_file():
        return f"compiling for a GPU needs {cuda_dir() / 'bin/ptxas'} (nvidia-cuda-nvcc)"
    return None


def cuda_dir() -> Path | None:
    """The folder of NVIDIA's Python packages, None where they are not installed."""
    found = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    return Path(next(iter(found.submodule_search_locations))) if found else None


def use_compilers(cuda: Path | None = None, *flags: str) -> None:
    """Points XLA at NVIDIA's compiler packages and keeps it off this machine's own devices.

    Args:
      cuda: folder with bin/ptxas and nvvm/, None for `cuda_dir()`; where there is no ptxas, XLA looks for the system's.
      flags: further XLA flags, such as `BY_PTXAS`.
    """
    cuda = cuda or cuda_dir()
    if cuda is not None and (cuda / "bin" / "ptxas").exists():
        os.environ["PATH"] = f"{cuda}/bin:{os.environ['PATH']}"
        flags = (f"--xla_gpu_cuda_data_dir={cuda}", *flags)
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    jax.config.update("jax_platforms", "cpu")


_STUB = """#!/bin/sh
case "$*" in *--version*|*-V*|*--input-as-string*) exec {ptxas} "$@";; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {cubin} "$2"; shift; done
"""
_NOTHING = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry nothing() { ret; }\n"


def use_compilers_to_ptx(*flags: str) -> None:
    """As `use_compilers`, where XLA's programs and PTX are read and nothing else: in place of ptxas, which takes a
    third of the time, an empty kernel is written. XLA's own products are not tuned, because that takes a GPU."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    (folder / "bin").mkdir()
    (folder / "nvvm").symlink_to(cuda_dir() / "nvvm")
    ptxas, source, cubin = cuda_dir() / "bin/ptxas", folder / "nothing.ptx", folder / "nothing.cubin"
    source.write_text(_NOTHING)
    subprocess.run([ptxas, "-arch=sm_90a", source, "-o", cubin], check=True)
    (folder / "bin/ptxas").write_text(_STUB.format(ptxas=ptxas, cubin=cubin))
    (folder / "bin/ptxas").chmod(0o755)
    use_compilers(folder, *BY_PTXAS, "--xla_gpu_autotune_level=0", *flags)


def assume(gpu: Gpu | None = None) -> None:
    """Makes dispatch pick the kernels for a GPU, None for an H200: it would ask the default device, which is not the
    target."""
    from qerl_kernels import dispatch
    from qerl_kernels import gpu as gpus

    dispatch.missing_for_mosaic_gpu = lambda dtype, gpu=None: None
    dispatch.this_gpu = lambda: gpu or gpus.H200


def target(gpu: Gpu | None) -> str:
    """XLA's description of a GPU: an H200's, with other values unless it is None."""
    if gpu is None:
        return TARGET.read_text()
    major, minor = divmod(gpu.arch, 10)
    feature = "feature_extension: ACCELERATED_FEATURES" if gpu.arch >= 90 else ""
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}"
    text = re.sub("cuda_compute_capability {.*}", capability, TARGET.read_text())
    text = re.sub("core_count: .*", f"core_count: {gpu.sms}", text)
    return re.sub("shared_memory_per_block_optin: .*", f"shared_memory_per_block_optin: {gpu.smem_bytes}", text)


def lower(jitted: Callable, args: Any, *static: Any, gpu: Gpu | None = None, count: int = 1) -> jax.stages.Lowered:
    """A jitted function lowered for one GPU, or for several of a host.

    Args:
      jitted: the result of `jax.jit`.
      args: its positional arguments, arrays as `jax.ShapeDtypeStruct`.
      static: static arguments behind `args`.
      gpu: the target, None for an H200.
      count: GPUs over which the arguments are divided (`qerl_jax.partition`).
    """
    import jax.experimental.mosaic.gpu as mgpu  # tells XLA where the runtime is that the kernels' host code calls
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=target(gpu))
    mesh = Mesh(np.array(topology.devices), ("model",), axis_types=(AxisType.Auto,))
    if count == 1:
        placed = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), args)
    else:
        from qerl_jax.partition import shardings  # qerl_jax takes longer to import than a kernel to compile

        placed = shardings(args, mesh)
    args = jax.tree.map(lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own), args, placed)
    mgpu.utils._infer_arch = lambda: divmod(gpu.arch, 10) if gpu else (9, 0)  # it would take any target for Hopper
    with jax.set_mesh(mesh):
        return jitted.trace(*args, *static).lower(lowering_platforms=("cuda",))


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A script in a process of its own, because XLA's flags are read once; fails with the end of its stderr."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    ran = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran


def kernels(ran: subprocess.CompletedProcess) -> list[tuple[str, str]]:
    """(PTX, what ptxas says of registers and spills) of each kernel that a script compiled with `PRINTED` set."""
    parts = re.split(r"(?=^\.version )", ran.stdout + ran.stderr, flags=re.M)
    found = [part.rsplit("}\n", 1) for part in parts if ".entry" in part]
    assert all("Used " in report for _, report in found), "ptxas reported nothing"
    return [(ptx + "}\n", report) for ptx, report in found]
