"""Short bursts, in which GEMMs are timed: ours (`bench_matmul.py`) and those of rivals (`time_rivals.py`).

Under sustained load an H200 reaches its power limit, with the GEMMs of cuBLAS and ours more than with Marlin's; in a
decode step none of them does. So a burst takes some milliseconds, and before each the GPU rests for three times as
long. A burst is a number of rounds, a round one captured graph of many calls. The work of the host once a burst is not
counted: rounds of rivals are timed by events after a first one, ours by the difference of two bursts of unequal length.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matmul_report import COPY_BYTES_PER_S, MATRIX_FLOP_PER_S

ROTATE_BYTES = 512 << 20  # weights in rotation, so that the L2 does not help
ROUND_US = 1e3  # because the GPU waits between two graphs, some 9 us between two rounds of our loops on an H200
TIMED_US = 2e3  # because a burst's length varies by some 10 us
# For decode steps, where the host takes about 2 ms a call and LoRA is a tenth of the time. With 8e3 a step was off
# by up to 0.03 ms (tools/results/notes/measuring.md), a quarter of the cost of LoRA at M = 8.
STEP_TIMED_US = 32e3
WARM, REPEATS, LEAST_REPEATS = 2, 15, 5
# The address of a step's arrays changes its time by 1 or 2 %, and LoRA is a tenth: steps are timed at several places.
PLACES = 3
LONG_S = 0.03  # all bursts of a repetition; longer ones are repeated less often
PAUSE, LEAST_PAUSE_S = 3, 5e-3  # before a burst: multiple of its length, and least pause


class Burst(NamedTuple):
    """Weights that rotate, rotations in a round, rounds that are timed."""

    weights: int
    turns: int
    rounds: int


def floor_us(m: int, n: int, k: int, weight_bytes: float) -> float:
    """Lower bound of a GEMM's time: its weight's bytes at the copy rate or its operations at the tensor cores' rate."""
    return max(weight_bytes / COPY_BYTES_PER_S, 2.0 * m * n * k / MATRIX_FLOP_PER_S) * 1e6


def burst_of(m: int, n: int, k: int, weight_bytes: float) -> Burst:
    """The burst of a GEMM of m rows with weights [n, k].

    Where a round needs few calls, its weights may fit the L2: then x and y are so large that the L2 does not help.
    """
    us = 1.5 * floor_us(m, n, k, weight_bytes) + 5  # roughly
    weights = max(1, min(math.ceil(ROTATE_BYTES / weight_bytes), math.ceil(ROUND_US / us)))
    turns = max(1, round(ROUND_US / (us * weights)))
    return Burst(weights, turns, max(1, round(TIMED_US / (us * weights * turns))))


def burst_of_step(layers: int) -> Burst:
    """The burst of all projections of a decode step, roughly 45 us a layer: a round is a step."""
    return Burst(1, 1, max(1, round(STEP_TIMED_US / (45.0 * layers))))


def medians(runs: Sequence[Callable[[], float]]) -> list[float]:
    """Median result of each run. A run is one burst and ends when the GPU is idle; runs take turns."""
    lengths = [_timed(run)[1] for _ in range(WARM) for run in runs][-len(runs) :]
    repeats = max(LEAST_REPEATS, int(REPEATS * min(1.0, LONG_S / sum(lengths))))
    found = [[] for _ in runs]
    for _ in range(repeats):
        for run, results, length in zip(runs, found, lengths, strict=True):
            time.sleep(max(LEAST_PAUSE_S, PAUSE * length))
            results.append(run())
    return [statistics.median(results) for results in found]


def _timed(run: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start
