"""Settings of JAX and XLA that precede compilation, and the note to users whose GPU runs without the kernels."""

from __future__ import annotations

import os
import platform

import jax

KERNELS_NEED_JAX = (0, 11)
KERNELS_NEED_PYTHON = (3, 12)  # the oldest that jax 0.11 supports
DETERMINISTIC_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_exclude_nondeterministic_ops=true",
    # Autotuning picks the kernel that happened to be fastest, and kernels differ in how they round.
    "--xla_gpu_autotune_level=0",
)


MEMORY = "XLA_CLIENT_MEM_FRACTION"
_SHARE = 0.94  # JAX takes 0.75 of the memory by itself; the rest is for libraries and loaded programs


def use_device_memory(vllm_share: float = 0.0) -> None:
    """Have JAX take 94 % of a GPU's memory when it starts one, less the share that vLLM takes, unless the environment
    says how much (`XLA_CLIENT_MEM_FRACTION`, or its old name `XLA_PYTHON_CLIENT_MEM_FRACTION`).
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # JAX refuses both
        os.environ.setdefault(MEMORY, f"{_SHARE - vllm_share:.2f}")


def missing_kernels_note(matmul_kernel: str) -> str | None:
    """A line for users of a Hopper GPU whose jax is older than the kernels need, with the remedy; None elsewhere.

    Args:
      matmul_kernel: as in Config; "xla" asks for no kernels, so that none are missed.
    """
    device, version = jax.devices()[0], tuple(int(part) for part in jax.__version__.split(".")[:2])
    is_hopper = device.platform == "gpu" and str(getattr(device, "compute_capability", "")) == "9.0"
    if matmul_kernel == "xla" or not is_hopper or version >= KERNELS_NEED_JAX:
        return None
    needed, python = ".".join(map(str, KERNELS_NEED_JAX)), ".".join(map(str, KERNELS_NEED_PYTHON))
    is_old = tuple(map(int, platform.python_version_tuple()[:2])) < KERNELS_NEED_PYTHON
    upgrade = f"in an environment of Python {python} or later (this is {platform.python_version()}), " if is_old else ""
    return (
        f"WARNING: {device.device_kind}: running without the Hopper kernels, several times slower: they need jax "
        f"{needed} or later (this is {jax.__version__}). To use them: {upgrade}pip install -U 'jax[cuda13]>={needed}'"
    )


def make_deterministic() -> None:
    """Have XLA compile for GPUs only operations whose result is the same in every run; those of CPUs always are.

    Raises ValueError if a device has been started in this process without those flags.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    missing = [flag for flag in DETERMINISTIC_FLAGS if flag not in flags]
    if not missing:
        return
    from jax._src import xla_bridge  # nothing public says whether a device has been started

    if xla_bridge.backends_are_initialized():
        raise ValueError(
            "deterministic is set, but JAX has started its devices already: set it before anything runs, or put "
            f"XLA_FLAGS={' '.join(missing)!r} into the environment"
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, *missing])
