"""Which implementation of a kernel runs here, and why."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import re
from collections.abc import Iterator

import jax

from qerl_kernels.gpu import H200, Gpu, gpu_of
from qerl_kernels.nvfp4_matmul import tuning

log = logging.getLogger("qerl_kernels")
IMPLEMENTATIONS = ("mosaic_gpu", "xla")
MIN_ARCH = 80  # the first with bf16 in its tensor cores, and with `cp.async`
_target: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("the GPU to lower for", default=None)


@functools.cache
def say_once(message: str) -> None:
    """Logs a choice the first time it is made."""
    log.warning(message)


@contextlib.contextmanager
def lowering_for(gpu: Gpu) -> Iterator[None]:
    """Within this context programs are traced as if a GPU were the default device, which need not be one. Mosaic GPU
    asks the device itself, and takes what is no GPU for a Hopper.
    """
    token = _target.set(gpu)
    try:
        yield
    finally:
        _target.reset(token)


def target() -> Gpu | None:
    """The GPU of `lowering_for`; None outside of it."""
    return _target.get()


def is_for_gpu() -> bool:
    """Whether programs that are traced here run on a GPU."""
    return target() is not None or jax.default_backend() == "gpu"


def this_gpu() -> Gpu:
    """The default device, or that of `lowering_for`. An H200 where it is no NVIDIA GPU: what programs are compiled and
    estimated for there.
    """
    return target() or facts(jax.local_devices()[0]) or H200


def facts(device: jax.Device) -> Gpu | None:
    """What the kernels know of a device, with its own tuning table where there is a sound one (one that is not is said
    once); None for other devices than NVIDIA GPUs."""
    gpu = _without_table(device)
    for path in tuning.own_tables(gpu) if gpu else ():
        if fault := _fault_of(str(path), gpu):
            say_once(f"{path}: left out, {fault}; python -m qerl_jax.tune makes a new one")
        else:
            return dataclasses.replace(gpu, own_table=str(path))
    return gpu


def _without_table(device: jax.Device) -> Gpu | None:
    """`facts` but for the table."""
    arch = _arch(device)
    if arch is None:
        return None
    smem_bytes = getattr(device, "shared_memory_per_block_optin", None)
    return gpu_of(device.device_kind, arch, getattr(device, "core_count", H200.sms), smem_bytes)


_fault_of = functools.cache(tuning.fault_of)  # a file is read once


def _arch(device: jax.Device) -> int | None:
    """Compute capability times ten; None where the device has none."""
    found = re.fullmatch(r"(\d+)\.(\d)", str(getattr(device, "compute_capability", "")))
    return 10 * int(found[1]) + int(found[2]) if device.platform == "gpu" and found else None


def missing_for_mosaic_gpu(
    dtype: jax.typing.DTypeLike, gpu: Gpu | None = None, version: str = jax.__version__
) -> str | None:
    """What keeps the Mosaic GPU kernels from running on a GPU with activations of `dtype`, by JAX of this version; None
    where they run. `gpu` None: that of `lowering_for`, else the default device; with one no device is started."""
    gpu = gpu or target()
    if gpu is None and (gpu := _without_table(jax.local_devices()[0])) is None:
        return f"an NVIDIA GPU (the default device is {jax.local_devices()[0].platform})"
    if gpu.arch < MIN_ARCH:
        return f"compute capability 8.0 or later (this is {gpu.name}, {gpu.arch / 10})"
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 11):
        return f"jax 0.11 or later (this is {version})"
    if dtype != jax.numpy.bfloat16:
        return f"bf16 activations (these are {jax.numpy.dtype(dtype).name})"
    return None


def choose(kernel: str, requested: str | None, missing: str | None) -> str:
    """The implementation to run: the one asked for by name, else Mosaic GPU where nothing is missing, else XLA (said
    once on a GPU; elsewhere nobody expects a kernel).

    Raises:
      ValueError: the name is unknown, or what was asked for cannot run here.
    """
    if requested is not None and requested not in IMPLEMENTATIONS:
        raise ValueError(f"{kernel}: no implementation {requested!r}, there are {list(IMPLEMENTATIONS)}")
    if requested == "mosaic_gpu" and missing:
        raise ValueError(f"{kernel}: implementation 'mosaic_gpu' needs {missing}")
    if requested is not None:
        return requested
    if missing and is_for_gpu():
        say_once(f"{kernel}: the XLA path runs, because Mosaic GPU needs {missing}")
    return "xla" if missing else "mosaic_gpu"
