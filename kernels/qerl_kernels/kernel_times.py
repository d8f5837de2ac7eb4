"""Durations of kernels by JAX's profiler."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Kernel(NamedTuple):
    """One kernel launch on the GPU, as recorded by the profiler."""

    start_ns: float
    duration_ns: float
    name: str


def profiled(run: Callable[[], Any]) -> list[Kernel]:
    """All kernels of `run` on the first GPU in the order of their start times; blocks on its result."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [file] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        planes = sorted((plane.name, plane) for plane in profile.planes if plane.name.startswith("/device:GPU"))
        lines = [line for _, plane in planes[:1] for line in plane.lines if line.name.startswith("Stream")]
        return sorted(Kernel(event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)


def kernel_medians(
    kernels: Sequence[Kernel], ours: Callable[[str], bool], calls: Sequence[tuple[int, int]]
) -> list[float]:
    """Median kernel duration in microseconds of each of several functions that were called one after the other.

    Args:
      kernels: as `profiled` saw them, of a call of each function as often as `calls` says, in that order.
      ours: True for the name of a kernel to count.
      calls: for each function (warm-up calls, counted calls).

    Raises:
      ValueError: the profile has another number of kernels.
    """
    found, wanted = [kernel.duration_ns for kernel in kernels if ours(kernel.name)], sum(map(sum, calls))
    if len(found) != wanted:
        raise ValueError(f"JAX's profiler saw {len(found)} of {wanted} kernels (it needs CUDA's CUPTI)")
    times = iter(found)
    several = [list(itertools.islice(times, skipped + counted))[skipped:] for skipped, counted in calls]
    return [statistics.median(some) * 1e-3 for some in several]
