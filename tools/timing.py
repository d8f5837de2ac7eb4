"""Wall times, kernel durations by the profiler, and peak memory of JAX programs."""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

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


class Kernel(NamedTuple):
    """One kernel launch on the GPU, as recorded by the profiler."""

    start_ns: float
    duration_ns: float
    name: str


def profiled(run: Callable[[], Any]) -> list[Kernel]:
    """All GPU kernels of `run` in the order of their start times; blocks on its result."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [file] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        planes = [plane for plane in profile.planes if plane.name.startswith("/device:GPU")]
        lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
        return sorted(Kernel(event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)


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


def kernel_medians(
    run: Callable[[], Any], ours: Callable[[str], bool], calls: Sequence[tuple[int, int]]
) -> list[float]:
    """Median kernel duration in microseconds of each function that `run` calls one after the other, by the profiler.

    Args:
      run: calls each function as often as `calls` says, in that order.
      ours: True for the name of a kernel to count.
      calls: for each function (warm-up calls, counted calls).

    Raises:
      SystemExit: the profile has another number of kernels.
    """
    found, wanted = [kernel.duration_ns for kernel in profiled(run) if ours(kernel.name)], sum(map(sum, calls))
    if len(found) != wanted:
        raise SystemExit(f"the profile has {len(found)} kernels, {wanted} were called")
    times = iter(found)
    several = [list(itertools.islice(times, skipped + counted))[skipped:] for skipped, counted in calls]
    return [statistics.median(some) * 1e-3 for some in several]


def peak_bytes() -> int:
    """Peak device memory in bytes so far; 0 where the backend has no statistics."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
