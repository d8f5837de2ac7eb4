"""The GPUs of this process as NVIDIA's driver describes them. None is started: a process that only starts others must
not take their memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
from qerl_kernels.gpu import Gpu, gpu_of

# CUdevice_attribute of cuda.h
_SMS, _MAJOR, _MINOR, _SMEM_BYTES = 16, 75, 76, 97


@dataclasses.dataclass(frozen=True)
class Described:
    """A GPU.

    Attributes:
      gpu: its facts, without a tuning table of its own.
      bytes: its memory, of which JAX takes a share.
    """

    gpu: Gpu
    bytes: int


def gpus() -> list[Described]:
    """The NVIDIA GPUs that JAX would use; none where its plugin or the driver is missing."""
    try:
        import jax_plugins

        plugins = [name for path in jax_plugins.__path__ for name in os.listdir(path)]
        driver = ctypes.CDLL("libcuda.so.1")
    except (ImportError, OSError):
        return []
    return described(driver) if _uses_cuda(plugins, jax.config.jax_platforms) else []


def _uses_cuda(plugins: Sequence[str], platforms: str | None) -> bool:
    """Whether JAX, with these plugins and `jax_platforms`, would start NVIDIA GPUs."""
    asked = set((platforms or "cuda").split(","))
    return any("cuda" in name for name in plugins) and bool({"cuda", "gpu"} & asked)


def described(driver: Any) -> list[Described]:
    """The GPUs of a CUDA driver's library; none where it does not start."""
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_described(driver, ordinal) for ordinal in range(count.value)]


def _described(driver: Any, ordinal: int) -> Described:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)

    def ask(function: str, *arguments: Any) -> None:
        if code := getattr(driver, function)(*arguments):
            raise OSError(f"{function} of GPU {ordinal} fails with CUDA error {code}")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        ask("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    ask("cuDeviceGet", ctypes.byref(device), ordinal)
    ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    ask("cuDeviceGetName", name, len(name), device)
    arch = 10 * attribute(_MAJOR) + attribute(_MINOR)
    return Described(gpu_of(name.value.decode(), arch, attribute(_SMS), attribute(_SMEM_BYTES)), memory.value)
