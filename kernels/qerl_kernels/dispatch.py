"""Which implementation of a kernel runs here, and why."""

from __future__ import annotations

import functools
import logging

import jax

log = logging.getLogger("qerl_kernels")
IMPLEMENTATIONS = ("mosaic_gpu", "xla")
SMS = 132  # H100 and H200 (SXM), for which the kernels are tuned
SMEM_BYTES = 227 * 1024  # shared memory that a CTA may have there
# Clusters, by their number of CTAs, that an H200 holds at a time with one CTA an SM, as its driver says
# (cuOccupancyMaxActiveClusters). A cluster lies within one GPC, so that clusters of three, four or sixteen CTAs leave
# some SMs idle. Other chips of the kind may differ by a few.
RESIDENT_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 16: 7}


@functools.cache
def say_once(message: str) -> None:
    """Logs a choice the first time it is made."""
    log.warning(message)


def missing_for_mosaic_gpu(dtype: jax.typing.DTypeLike) -> str | None:
    """What keeps the Mosaic GPU kernels from running on the default device with activations of `dtype`; None where
    they run."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11):
        return f"jax 0.11 or later (this is {jax.__version__})"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"a Hopper GPU (the default device is {device.platform})"
    if str(getattr(device, "compute_capability", "")) != "9.0":
        return f"a Hopper GPU, compute capability 9.0 (this is {device.device_kind}, {device.compute_capability})"
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
    if missing and jax.default_backend() == "gpu":
        say_once(f"{kernel}: the XLA path runs, because Mosaic GPU needs {missing}")
    return "xla" if missing else "mosaic_gpu"
