"""Tier "warp" beside tier "wgmma" on one Hopper GPU, which runs instructions of sm_80, too: what the kernels of an
RTX 4090 (99 KiB of shared memory a CTA, no `wgmma`, TMA or clusters) reach of the speed of Hopper's own.

    python tools/bench_tiers.py --out DIR [--size 7B] [--batch 8 32] [--tokens 1 8 16 32] [--only gemm rollout update]
                                [--marlin PATH/_C.abi3.so]

Three parts: the decode GEMMs of 7B (each kernel alone, by the profiler, without its prologue); `bench_rollout.py` and
`bench_step.py --update-only` as they are and with `--as-arch 89`. Writes gemm_tiers.json, and through the two programs
rollout.json and update.json, into DIR; prints the share of Hopper's speed for each, and peak memory. `--marlin`: the
GEMMs by vLLM's library too (`bench_marlin.py`, of the same Python), on the same GPU, for a column beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import ahead
from as_gpu import seen_as
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul import cases
from qerl_kernels.nvfp4_matmul.tuner.trials import Timer, Trial, all_programs, build, gemm_of, present
from record import add_commit, write_rows

ARCH = 89
PARTS = ("gemm", "rollout", "update")
TOOLS = Path(__file__).parent


def gemm_trials(tokens: Iterable[int], gpu: Gpu = H200) -> list[Trial]:
    """The decode GEMMs of 7B with the config that each tier's table has, Hopper's first."""
    gpus = gpu, seen_as(gpu, ARCH)
    return [
        Trial(gemm, m, "forward", present(gemm, m, "forward", one), one)
        for gemm in map(gemm_of, cases.LAYER_7B)
        for m in tokens
        for one in gpus
    ]


def gemm_rows(trials: list[Trial], jobs: int) -> list[dict]:
    """Microseconds of each trial. Raises SystemExit where one does not run."""
    executables = dict(ahead.compile_all(build, all_programs([[trial] for trial in trials]), jobs))
    rows = []
    for trial in trials:
        timer = Timer([trial], ahead.loader(executables, build))
        if timer.refused:
            raise SystemExit("\n".join(timer.refused.values()))
        [us] = timer.times([trial]).values()
        shape = {"case": trial.gemm.name, "n": trial.gemm.n, "k": trial.gemm.k, "m": trial.m}
        rows.append(shape | ({} if trial.gpu.tier == "wgmma" else {"as_arch": ARCH}) | {"us": round(us, 2)})
    return rows


def marlin_rows(library: Path, trials: list[Trial], program: Path = TOOLS / "bench_marlin.py") -> list[dict]:
    """The GEMMs of the trials by vLLM's kernel, timed by `program`. Raises CalledProcessError where it does not run."""
    shapes = {(trial.gemm.name, trial.gemm.n, trial.gemm.k, trial.m): None for trial in trials}
    gemms = [f"{n},{k},{m}" for _, n, k, m in shapes]
    command = [sys.executable, str(program), str(library.resolve()), *gemms]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times = json.loads(ran.stdout.splitlines()[-1])
    names = "case", "n", "k", "m"
    return [
        dict(zip(names, shape, strict=True)) | {"impl": "marlin", "us": us}
        for shape, us in zip(shapes, times, strict=True)
    ]


def shares(rows: Iterable[dict], time: str) -> Iterator[tuple[dict, float]]:
    """(row with "as_arch", share of the speed of the row that differs from it in that alone), where both are there.

    Args:
      rows: of a result file.
      time: the field with the time.
    """
    same = ("case", "m", "model", "format", "impl", "batch", "prompt_len", "new_tokens", "completion_len", "phase")

    def key(row: dict) -> tuple:
        return tuple(str(row.get(name)) for name in same)

    rows = [row for row in rows if time in row]
    whole = {key(row): row for row in rows if "as_arch" not in row}
    for row in rows:
        if "as_arch" in row and key(row) in whole:
            yield row, whole[key(row)][time] / row[time]


def report(folder: Path) -> list[str]:
    """A line for each measurement of both tiers that the folder has."""
    lines = []
    for file, time in (("gemm_tiers", "us"), ("rollout", "decode_ms_per_step"), ("update", "seconds")):
        path = folder / f"{file}.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        marlin = {(row["case"], row["m"]): row["us"] for row in rows if row.get("impl") == "marlin"}
        for row, share in shares(rows, time):
            what = f"{row['case']} m {row['m']}" if file == "gemm_tiers" else f"{row['model']} batch {row['batch']}"
            peak = f", peak {row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""
            beside = marlin.get((row.get("case"), row.get("m")))
            beside = f", {beside / row[time]:.2f} of Marlin's" if beside else ""
            lines.append(f"{file} {what}: {row[time]:.2f} {time}, {share:.2f} of Hopper's speed{beside}{peak}")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7B", help="of rollout and update")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32], help="of the rollout")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32], help="rows of the GEMMs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--marlin", type=Path, help="vLLM's library, _C.abi3.so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--out", type=Path, required=True)
    add_commit(parser)
    args = parser.parse_args()
    # One process at a time holds the GPU's memory: the GEMMs come last, because this one keeps it.
    batches = map(str, args.batch)
    commands = {
        "rollout": ["bench_rollout.py", args.size, "--batch", *batches],
        "update": ["bench_step.py", args.size, "--update-only", "--batch", "64", "--completion-len", "1024"],
    }
    commit = ["--commit", args.commit] if args.commit else []
    for part, (program, *flags) in commands.items():
        for more in ([], ["--as-arch", str(ARCH)]) if part in args.only else ():
            command = [sys.executable, TOOLS / program, *flags, *more, "--out", args.out, *commit]
            subprocess.run(list(map(str, command)), check=True)
    if "gemm" in args.only:
        trials = gemm_trials(args.tokens)
        rows = marlin_rows(args.marlin, trials) if args.marlin else []
        write_rows(args.out / "gemm_tiers.json", rows + gemm_rows(trials, args.jobs), args.commit)
    print("\n".join(report(args.out)))


if __name__ == "__main__":
    main()
