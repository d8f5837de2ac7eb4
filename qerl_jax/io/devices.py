"""What is asked of XLA before the first device starts."""

from __future__ import annotations

import os

DETERMINISTIC_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_exclude_nondeterministic_ops=true",
    # Autotuning picks the kernel that happened to be fastest, and kernels differ in how they round.
    "--xla_gpu_autotune_level=0",
)


def make_deterministic() -> None:
    """Have XLA compile for GPUs only operations whose result is the same in every run; the CPU's are anyway.

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
