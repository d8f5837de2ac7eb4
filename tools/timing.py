"""Wall times, gaps between kernels, and peak memory of JAX programs."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from qerl_kernels.kernel_times import Kernel

from qerl_jax.programs import Ahead

COPIES = ("MemcpyH2D", "MemcpyD2H")
"""The profiler's names of copies to and from the host."""


def timed(function: Callable[[int], Any], repeats: int) -> tuple[Any, float]:
    """The last result and the median seconds of `function(i)`, without the first call."""
    jax.block_until_ready(function(0))
    return timed_warm(function, repeats)


def timed_warm(function: Callable[[int], Any], repeats: int) -> tuple[Any, float]:
    """`timed` for a function that has been called before. No result is held while the next is computed, and garbage is
    collected beforehand: after compiling a full collection takes half a second, which may not fall into a repeat.
    """
    gc.collect()
    seconds, result = [], None
    for i in range(1, repeats + 1):
        del result
        start = time.perf_counter()
        result = jax.block_until_ready(function(i))
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def compile_calls(function: Callable, *args: Any) -> int:
    """Compile the programs that `function(*args)` calls, as `programs.record` finds them, side by side. Returns their
    number. Raises what the compiler raises.
    """
    ahead = Ahead()
    try:
        begun = ahead.begin(function, *args)
        for compiling in begun:
            compiling.result()
    finally:
        ahead.cancel()
    return len(begun)


class Gap(NamedTuple):
    """A time without a kernel on the GPU, and the kernels around it."""

    seconds: float
    before: str
    after: str


def gaps(kernels: Sequence[Kernel]) -> list[Gap]:
    """Every gap between the first kernel and the last. Copies to and from the host do not count as kernels: the GPU can
    compute beside them.

    Args:
      kernels: in the order of their start times.
    """
    found, last, end = [], None, 0.0
    for kernel in kernels:
        if kernel.name in COPIES:
            continue
        if last is not None and kernel.start_ns > end:
            found.append(Gap(1e-9 * (kernel.start_ns - end), last.name, kernel.name))
        if last is None or kernel.start_ns + kernel.duration_ns > end:
            last, end = kernel, kernel.start_ns + kernel.duration_ns
    return found


def peak_bytes() -> int:
    """Peak device memory in bytes so far, of the device with the highest; 0 where the backend has no statistics."""
    return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())


def since_start() -> float:
    """Seconds since the process began (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
