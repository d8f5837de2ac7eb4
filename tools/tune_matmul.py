"""Finds the config of each GEMM of an H200 by trying many, and stores the table that comes with the kernels.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward dx] [--write]

As `python -m qerl_jax.tune` does for a model's decode on the user's GPU, but for all shapes, any number of rows and dx.
All configs that fit an SM are enumerated (`qerl_kernels.nvfp4_matmul.tuner.candidates`). Each that is tried is checked
(relative error) and timed; the faster half is timed again with twice as many calls, until few are left (successive
halving). Forward GEMMs carry adapters, as they do in rollouts and training. Where configs differ in their LoRA input,
the decode prologue is timed too, and counted. Run it under a time limit: a kernel with a wrong barrier does not return.
`--write` replaces the rows of the GEMMs that were tried and leaves the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib

from qerl_kernels.gpu import H200
from qerl_kernels.nvfp4_matmul import cases, tuning
from qerl_kernels.nvfp4_matmul.tuner.candidates import trials
from qerl_kernels.nvfp4_matmul.tuner.search import fastest, in_lines, keep, row_of
from qerl_kernels.nvfp4_matmul.tuner.trials import MANY, Timer, Trial, gemm_of
from record import add_commit, meta

from qerl_jax.tune import compiled_timer

TABLE = tuning.path_of(H200.table)
TOKENS = (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)


def tune(group: list[Trial], clock: Timer) -> dict | None:
    """The table's row for the trials of one GEMM; prints the measurements. None where none runs."""
    times = fastest(group, clock)
    about = f"{group[0].gemm.name} {group[0].direction} m {group[0].m}"
    for trial, why in clock.refused.items():
        print(f"{about} {dataclasses.astuple(trial.config)} {why}", flush=True)
    for trial, us in times.items():
        name, note = type(trial.config).__name__, " present" * (trial == group[0])
        print(f"{about} {name} {dataclasses.astuple(trial.config)} {us:.2f} us{note}", flush=True)
    return row_of(*next(iter(times.items())), clock) if times else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS), help="rows of x")
    parser.add_argument("--direction", nargs="*", choices=["forward", "dx"], default=["forward", "dx"])
    parser.add_argument("--most", type=int, default=48, help="configs tried for each GEMM")
    add_commit(parser)
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=TABLE, help="store the rows found")
    args = parser.parse_args()
    stored = json.loads(TABLE.read_text())
    stored["meta"] = meta(args.commit) | {"note": stored["meta"].get("note", "")}
    gemms = itertools.product(args.cases, args.direction, args.tokens)
    for case, way, m in gemms:
        if way == "dx" and m < MANY:
            continue
        group = trials(gemm_of(case), m, way, args.most, H200)
        row = tune(group, compiled_timer(group))
        if row is None:
            continue
        keep(stored, row)
        print("best", *row.values(), flush=True)
        if args.write:
            args.write.write_text(in_lines(stored))


if __name__ == "__main__":
    main()
