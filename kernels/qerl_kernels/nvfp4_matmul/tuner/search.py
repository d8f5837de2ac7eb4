"""Successive halving of the configs of one GEMM, and the table that keeps the fastest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from qerl_kernels.nvfp4_matmul import tuning
from qerl_kernels.nvfp4_matmul.tuner.trials import CALLS, Trial

T = TypeVar("T")
FIRST_CALLS = 3  # timed calls of a config in the first round


class Clock(Protocol):
    """What times the trials of one GEMM (`trials.Timer`)."""

    def times(self, several: Sequence[Trial], calls: int) -> Mapping[Trial, float]:
        """Median microseconds of each kernel; those that do not run are left out."""

    def prologue_us(self, trial: Trial) -> float | None:
        """Microseconds of its decode prologue; None where it is the same for all trials."""


def total_us(several: Sequence[Trial], clock: Clock, calls: int = CALLS) -> dict[Trial, float]:
    """Microseconds of each kernel, with those of its prologue."""
    return {trial: us + (clock.prologue_us(trial) or 0.0) for trial, us in clock.times(several, calls).items()}


def fastest(group: Sequence[Trial], clock: Clock) -> dict[Trial, float]:
    """`total_us` of the trials left after successive halving, fastest first; empty where none runs."""
    return halved(group, lambda some, calls: total_us(some, clock, calls), CALLS)


def row_of(trial: Trial, us: float, clock: Clock) -> dict:
    """The table's row of a trial that took `total_us`."""
    prologue_us, gemm = clock.prologue_us(trial), trial.gemm
    own, counted = round(us - (prologue_us or 0.0), 2), None if prologue_us is None else round(prologue_us, 2)
    return tuning.to_json(tuning.Row(trial.direction, gemm.n, gemm.k, trial.m, trial.config, own, counted))


def halved(several: Sequence[T], time: Callable[[Sequence[T], int], Mapping[T, float]], calls: int) -> dict[T, float]:
    """Successive halving: time all with `FIRST_CALLS`, the faster half with twice as many, and so on up to `calls`.

    Args:
      several: what is compared.
      time: (some of them, calls of each) -> time of each.
      calls: calls in the last round.

    Returns:
      The times of the last round, fastest first.
    """
    now, left = FIRST_CALLS, list(several)
    while True:
        times = time(left, now)
        left = sorted(times, key=times.__getitem__)
        if now >= calls or len(left) <= 1:
            return {one: times[one] for one in left}
        now, left = min(2 * now, calls), left[: max(2, -(-len(left) // 2))]


def keep(stored: dict, row: dict) -> None:
    """Put a row into the table in place of that of the same GEMM."""
    same = ("direction", "n", "k", "m")
    stored["rows"] = [*(old for old in stored["rows"] if any(old[name] != row[name] for name in same)), row]


def in_lines(stored: dict) -> str:
    """JSON with one row a line."""
    rows = ",\n".join(
        json.dumps(row) for row in sorted(stored["rows"], key=lambda r: (r["direction"], r["n"], r["k"], r["m"]))
    )
    return '{\n"meta": ' + json.dumps(stored["meta"]) + ',\n"rows": [\n' + rows + "\n]\n}\n"
