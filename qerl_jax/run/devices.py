"""What is asked of JAX and XLA before anything is compiled."""

from __future__ import annotations

import os

import jax

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


def keep_all_compiled() -> None:
    """Have JAX put every program into its compilation cache, where there is one (`JAX_COMPILATION_CACHE_DIR`), not only
    those that took a second to compile: a rollout has several that take less, and compiles them again in every process.
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` in the environment has the last word.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
