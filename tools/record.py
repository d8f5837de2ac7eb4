"""Timing, profiles and result files of benchmarks: every row carries the commit it was measured at."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax

DEFAULTS = {"batch_invariant": False, "kv_cache_dtype": "auto"}  # values of rows older than the field
MEASURED = frozenset(
    {
        "us",
        "seconds",
        "tokens_per_s",
        "decode_ms_per_step",
        "peak_bytes",
        "commit",
        "kl",
        "mean_abs_dlogp",
        "token_mult_prob_error",
        "rollout_abs_dlogp_fp32",
        "trainer_abs_dlogp_fp32",
        "first_call_s",
        "kernel_ms_per_step",
        "model_fraction_of_peak",
        "fraction_of_peak",
        "compile_s",
        "rollout_seconds",
        "rollout_peak_bytes",
        "recomputed_layers",
    }
)


def timed(function: Callable[[int], Any], repeats: int) -> tuple[Any, float]:
    """The last result and the median seconds of `function(i)`, without the first call."""
    jax.block_until_ready(function(0))
    return timed_warm(function, repeats)


def timed_warm(function: Callable[[int], Any], repeats: int) -> tuple[Any, float]:
    """`timed` for a function that has been called before."""
    seconds = []
    for i in range(1, repeats + 1):
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


def shell(command: str) -> str:
    """Standard output of a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()


def meta(commit: str | None) -> dict:
    """GPU, date, commit (None: that of the checkout), command and versions of a measurement."""
    return {
        "gpu": jax.local_devices()[0].device_kind,
        "date": str(date.today()),
        "commit": commit or shell("git rev-parse --short HEAD") or "unknown",
        "command": "python " + " ".join(sys.argv),
        "jax": jax.__version__,
        "driver": shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader") or "unknown",
    }


def write_rows(path: Path, rows: list[dict], commit: str) -> None:
    """Add rows to a result file; rows that agree in every field that is not measured are replaced."""

    def case(row: dict) -> tuple:
        told = {k: v for k, v in row.items() if k not in MEASURED and (k not in DEFAULTS or DEFAULTS[k] != v)}
        return tuple(sorted((k, str(v)) for k, v in told.items()))

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = [{**row, "commit": commit} for row in rows]
    kept = [row for row in old if case(row) not in {case(row) for row in fresh}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta(commit), "rows": kept + fresh}, indent=1) + "\n")
