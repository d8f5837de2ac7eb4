"""What a run knows of its device, settings of JAX and XLA that precede compilation, and the note to users whose GPU
runs without the kernels.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax
from qerl_kernels import dispatch
from qerl_kernels.gpu import H200, Gpu

KERNELS_NEED_JAX = (0, 11)
KERNELS_SLOWER_WITH_JAX = (0, 12)  # it compiles those with `wgmma` by nvJitLink, which serializes it (notes/matmul.md)
KERNELS_NEED_PYTHON = (3, 12)  # the oldest that jax 0.11 supports
DETERMINISTIC_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_exclude_nondeterministic_ops=true",
    # Autotuning picks the kernel that happened to be fastest, and kernels differ in how they round.
    "--xla_gpu_autotune_level=0",
)


MEMORY = "XLA_CLIENT_MEM_FRACTION"
_SHARE = 0.94  # the rest is for libraries and loaded programs
_SHARE_OF_JAX = 0.75


def use_device_memory(vllm_share: float = 0.0, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have JAX take 94 % of a GPU's memory when it starts one, not 75, less the share that vLLM takes, unless the
    environment says how much (`XLA_CLIENT_MEM_FRACTION`, or its old name `XLA_PYTHON_CLIENT_MEM_FRACTION`).
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # JAX refuses both
        environment.setdefault(MEMORY, f"{_SHARE - vllm_share:.2f}")


def usable_bytes(memory: int, environment: Mapping[str, str] = os.environ) -> float:
    """What `device_bytes` will be of a GPU with so much memory, before JAX starts it."""
    names = "XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY
    return memory * next((float(environment[name]) for name in names if name in environment), _SHARE_OF_JAX)


def device_bytes() -> int | None:
    """Memory that this process may use on its device; None where the backend does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def free_device_bytes() -> int | None:
    """What of it is free."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def kernels_note(
    matmul_kernel: str, device: Any = None, jax_version: str = jax.__version__, python: str = platform.python_version()
) -> str | None:
    """A line for users of an NVIDIA GPU: what to install where jax is older than the kernels need, else which kernels
    run, whether their configs were timed on this GPU, and what to install where this jax makes them slower; None
    elsewhere.

    Args:
      matmul_kernel: as in Config; "xla" asks for no kernels, so that none are missed.
      device: None: the first.
      jax_version, python: as installed.
    """
    device, version = device or jax.local_devices()[0], tuple(int(part) for part in jax_version.split(".")[:2])
    gpu = dispatch.facts(device)
    if matmul_kernel == "xla" or gpu is None or gpu.arch < dispatch.MIN_ARCH:
        return None
    needed, slower, needed_python = (
        ".".join(map(str, each)) for each in (KERNELS_NEED_JAX, KERNELS_SLOWER_WITH_JAX, KERNELS_NEED_PYTHON)
    )
    packages = f"pip install -U 'jax[cuda13]>={needed},<{slower}'"
    if version >= KERNELS_NEED_JAX:
        is_slower = gpu.tier == "wgmma" and version >= KERNELS_SLOWER_WITH_JAX
        return _tier_note(gpu) + (f"; slower with jax {jax_version}: {packages}" if is_slower else "")
    is_old = tuple(map(int, python.split(".")[:2])) < KERNELS_NEED_PYTHON
    upgrade = f"in an environment of Python {needed_python} or later (this is {python}), " if is_old else ""
    return (
        f"WARNING: {device.device_kind}: running without the GPU kernels, several times slower: they need jax "
        f"{needed} or later (this is {jax_version}). To use them: {upgrade}{packages}"
    )


def _tier_note(gpu: Gpu) -> str:
    """Which kernels run on this GPU, and whose configs they have."""
    if gpu.tier == "wgmma":
        words = "4-bit kernels for prefill, decode and update; "
    elif gpu.has_tcgen05:
        words = "4-bit kernels for prefill, decode of up to 128 sequences and the update's forward pass; "
    else:
        words = "4-bit kernels for decode of up to 128 sequences, prefill and update by dequantization and cuBLAS; "
    if gpu.own_table:
        words += f"configs of {gpu.own_table}"
    elif gpu.tier == "wgmma" and gpu.sms == H200.sms:  # an H100 or GH200 (SXM) has the same SMs
        words += "configs timed on an H200"
    else:
        words += "configs timed on no such GPU, speeds never measured here: python -m qerl_jax.tune MODEL times them"
    return f"{gpu.name} (compute capability {gpu.arch / 10}): {words}"


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have XLA compile for GPUs only operations whose result is the same in every run; those of CPUs always are.

    Raises ValueError if a device has been started in this process without those flags.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    missing = [flag for flag in DETERMINISTIC_FLAGS if flag not in flags]
    if not missing:
        return
    from jax._src import xla_bridge  # nothing public says whether a device has been started

    if xla_bridge.backends_are_initialized():
        raise ValueError(
            "deterministic is set, but JAX has started its devices already: set it before anything runs, or put "
            f"XLA_FLAGS={' '.join(missing)!r} into the environment"
        )
    environment["XLA_FLAGS"] = " ".join([*flags, *missing])
