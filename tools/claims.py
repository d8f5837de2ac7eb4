"""Run a plan, cells × seeds of training runs, and compare its cells in pairs over seeds.

    python tools/claims.py PLAN.yaml --out runs/claims                         # all runs, one at a time
    python tools/claims.py PLAN.yaml --out runs/claims --gpus 0 1 --at-once 2  # two at a time on each of two GPUs
    python tools/claims.py PLAN.yaml --out runs/claims --report                # analyse the finished runs alone

A plan (`tools/plans/*.yaml`) is data:

    config: gsm8k-3b-nvfp4                # base config: a bundled recipe or a file
    common: {model: DIR, max_steps: 100}  # settings of every run that differ from it
    seeds: [0, 1, 2, 3]
    cells:                                # settings of a cell that differ from both
      bf16: {weight_format: bf16, sigma_start: 0, sigma_end: 0}
      aqn: {}
    compare: [[aqn, bf16]]                # treatment, baseline; runs of two cells with one seed are a pair

Each run is `python -m qerl_jax.train --config OUT/CELL-SEED.yaml --resume auto` with the directory OUT/CELL-SEED and
the log OUT/CELL-SEED.log; those of one GPU share a process, one after the other, and its compiled programs, which saves
a quarter of a run of 0.5B (the same tokens, metrics and evaluation, bit for bit). A finished run is not repeated and an
interrupted one goes on, so the same command continues an experiment; Ctrl-C and SIGTERM stop the runs, which save their
state. All cells of a seed are run before the next seed, so that an experiment cut short has whole pairs.

Writes OUT/claims.json: `rows`, one flat object a run; `steps`, one a step of a run; `differences`, one a comparison and
figure; and OUT/claims.png, curves with bands. Exit code 1: some run failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jaxtyping import Float64
from numpy.lib.stride_tricks import sliding_window_view
from record import ROOT, add_commit, commit_of, meta, shell
from scipy import stats

MEMORY, MEMORY_OF_SEVERAL = 0.94, 0.75
"""Share of a GPU's memory that JAX takes in one run, and in several together: each process has 0.7 GB besides."""
WINDOW = 5
"""Steps of which a point of a drawn curve is the mean; odd."""
LAST = 10
"""Steps at the end of a run over which training figures are averaged."""
RESAMPLES, LEVEL = 20_000, 0.05
CURVES = {
    "accuracy": "share correct in training",
    "sampling/entropy": "entropy of the sampler, nats a token",
    "entropy": "entropy of the trainer, nats a token",
    "completions/mean_length": "completion length, tokens",
    "reward": "reward",
    "sampling/kl": "KL of sampler and trainer, nats a token",
    "aqn/sigma": "σ",
}
"""Columns of metrics.jsonl that a step's row holds, with their labels; those drawn are the first, second and fourth."""
COMPARED = ("accuracy_after", "pass_at_k_after", "mean_accuracy", "first_entropy", "mean_entropy", "last_length")
"""Figures of a run whose paired differences are taken."""


SERVE = "--serve"


class PlanError(ValueError):
    """A plan, or a run in OUT, that does not fit; the message names file, field and values."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell with a seed.

    Attributes:
      cell, seed: its place in the plan.
      overrides: what the cell sets.
      config: every setting that is written to its config file.
      directory: the run directory.
    """

    cell: str
    seed: int
    overrides: Mapping[str, Any]
    config: Mapping[str, Any]
    directory: Path

    def file(self, ending: str) -> Path:
        """OUT/CELL-SEED.ending: the config (yaml), the log, or the record of how it was run (json)."""
        return self.directory.with_name(f"{self.directory.name}.{ending}")

    def record(self) -> dict[str, Any]:
        """Commit, GPU, command, seconds and whether it is finished; empty before its first start."""
        return json.loads(self.file("json").read_text()) if self.file("json").exists() else {}


def settings(text: str, where: Path) -> dict[str, Any]:
    """A YAML mapping; YAML 1.1 takes 1e-4 for a text, here it is a number. Raises PlanError for anything else."""

    def number(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: number(item) for key, item in value.items()}
        if isinstance(value, list):
            return [number(item) for item in value]
        is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
        return float(value) if is_number else value

    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise PlanError(f"{where} holds {type(found).__name__}, not a mapping")
    return number(found)


def read_plan(path: Path, out: Path) -> tuple[list[Job], list[tuple[str, str]]]:
    """The runs, all cells of a seed before the next seed, and the comparisons (treatment, baseline).

    Raises PlanError for an unknown key, a cell that is compared and missing, or a setting that the plan may not have.
    """
    plan = settings(path.read_text(), path)
    keys = {"config", "common", "seeds", "cells", "compare"}
    if unknown := sorted(set(plan) ^ (keys & set(plan) | {"config", "seeds", "cells"})):
        raise PlanError(f"{path}: {unknown} is unknown or missing; a plan has {sorted(keys)}")
    base = Path(plan["config"])
    base = base if base.suffix == ".yaml" else ROOT / "configs" / f"{base}.yaml"
    if not base.is_file():
        raise PlanError(f"{path}: config {plan['config']} is neither a file nor a bundled recipe")
    common = settings(base.read_text(), base) | (plan.get("common") or {})
    cells = {str(cell): own or {} for cell, own in plan["cells"].items()}
    pairs = [(treatment, baseline) for treatment, baseline in plan.get("compare") or ()]
    for where in ({"common": plan.get("common") or {}} | cells).items():
        if taken := {"seed", "output_dir"} & set(where[1]):
            raise PlanError(f"{path}: {where[0]} sets {sorted(taken)}, which are the plan's")
    if missing := sorted({cell for pair in pairs for cell in pair} - set(cells)):
        raise PlanError(f"{path}: compare names {missing}, the cells are {sorted(cells)}")
    jobs = []
    for seed in plan["seeds"]:
        for cell, own in cells.items():
            directory = out / f"{cell}-{seed}"
            config = common | own | {"seed": seed, "output_dir": str(directory)}
            jobs.append(Job(cell, seed, own, config, directory))
    return jobs, pairs


def write_config(job: Job) -> None:
    """Write the run's config. Raises PlanError where it was begun with another one, naming the field and both values,
    paths aside.
    """
    file = job.file("yaml")
    if file.exists():
        old = yaml.safe_load(file.read_text())
        for name in sorted({*old, *job.config} - {"model", "output_dir"}):
            if old.get(name) != job.config.get(name):
                values = f"{old.get(name)!r}, now it is {job.config.get(name)!r}"
                raise PlanError(f"{file} was begun with {name} {values}: name another --out")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(job.config), sort_keys=True))


@dataclasses.dataclass
class _Slot:
    """Where one run at a time is done: a GPU, as in `CUDA_VISIBLE_DEVICES`, and the process there."""

    gpu: str | None
    process: subprocess.Popen[str] | None = None


class Runner:
    """Does runs, `at_once` at a time on each GPU, until it is stopped.

    Args:
      gpus: as in `CUDA_VISIBLE_DEVICES`; none: the device that JAX takes.
      at_once: runs at a time on each.
      commit: recorded with each run.
      program: a command that does as `serve`.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        at_once: int,
        commit: str,
        program: Sequence[str] = (sys.executable, __file__, SERVE),
    ) -> None:
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for gpu in [*(gpus or (None,))] * at_once:
            self._slots.put(_Slot(gpu))
        self._count = self._slots.qsize()
        self._at_once, self._commit, self._program = at_once, commit, list(program)
        self._running: dict[Path, subprocess.Popen[str]] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def run_all(self, jobs: Sequence[Job]) -> list[Job]:
        """Returns those that are not finished. A KeyboardInterrupt ends the runs by SIGTERM, and is raised again."""
        with concurrent.futures.ThreadPoolExecutor(self._count) as pool:
            done = [pool.submit(self._run, job) for job in jobs]
            try:
                failed = [job for job, future in zip(jobs, done, strict=True) if not future.result()]
            except BaseException:
                with self._lock:
                    self._stopped.set()
                    for process in self._running.values():
                        process.send_signal(signal.SIGTERM)
                raise
        while not self._slots.empty():
            if process := self._slots.get().process:
                process.communicate()  # its stdin is closed: it ends
        return failed

    def _run(self, job: Job) -> bool:
        slot = self._slots.get()
        try:
            code, record = self._do(job, slot)
        finally:
            self._slots.put(slot)
        if code is None:
            return False
        job.file("json").write_text(json.dumps(record | {"finished": code == 0}, indent=1) + "\n")
        print(job.directory.name, "finished" if code == 0 else f"ended with {code}, see {job.file('log')}", flush=True)
        return code == 0

    def _do(self, job: Job, slot: _Slot) -> tuple[int | None, dict[str, Any]]:
        flags, began, old = ["--config", str(job.file("yaml")), "--resume", "auto"], time.time(), job.record()
        with self._lock:
            if self._stopped.is_set():
                return None, old
            if slot.process is None:
                slot.process = subprocess.Popen(  # in a session of its own: Ctrl-C reaches it once, through `run_all`
                    self._program,
                    env=self._environment(slot.gpu),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            self._running[job.directory] = process = slot.process
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([flags, str(job.file("log"))]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:  # it has died; the slot's next run gets another one
            slot.process = None
            process.communicate()
        code = int(answer) if answer else process.returncode or 1
        with self._lock:
            del self._running[job.directory]
        commits = dict.fromkeys([*filter(None, old.get("commit", "").split("+")), self._commit])
        return code, {
            "commit": "+".join(commits),
            "gpu": gpu_name(slot.gpu),
            "command": " ".join(["python -m qerl_jax.train", *flags]),
            "seconds": old.get("seconds", 0.0) + time.time() - began,
        }

    def _environment(self, gpu: str | None) -> dict[str, str]:
        share = MEMORY if self._at_once == 1 else MEMORY_OF_SEVERAL / self._at_once
        environment = dict(os.environ)
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # the old name; JAX refuses both
            environment.setdefault("XLA_CLIENT_MEM_FRACTION", f"{share:.3f}")
        return environment if gpu is None else environment | {"CUDA_VISIBLE_DEVICES": gpu}


def serve() -> None:
    """Do the runs that stdin names, a line of JSON each, [flags, log], and answer each with a line, its exit code."""
    from qerl_jax import train
    from qerl_jax.lowered import as_in_sources

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        flags, log = json.loads(line)
        with open(log, "ab") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        with as_in_sources():  # as in the command's own process
            code = train.main(flags)
        sys.stdout.flush()
        gc.collect()  # the next run's plan asks how much of the GPU is free
        print(code, file=answers, flush=True)


def gpu_name(gpu: str | None) -> str:
    """A GPU's name by nvidia-smi; "cpu" where there is none."""
    return (shell("nvidia-smi", f"--id={gpu or 0}", "--query-gpu=name", "--format=csv,noheader") or "cpu").strip()


def read_run(job: Job) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """A finished run's row and the rows of its steps; None: it is not finished."""
    record = job.record()
    if not record.get("finished"):
        return None
    metrics = [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]
    file = job.directory / "evaluation.json"
    evaluations = json.loads(file.read_text()) if file.exists() else {}
    about = {"model": Path(str(job.config["model"])).name, "cell": job.cell, "seed": job.seed}
    scores = {
        f"{name}_{when}": evaluations.get(when, {}).get(name)
        for name in ("accuracy", "pass_at_k")
        for when in ("before", "after")
    }

    def column(name: str) -> Float64[np.ndarray, " S"]:
        return np.array([math.nan if row.get(name) is None else row[name] for row in metrics], np.float64)

    figures = {
        "mean_accuracy": column("accuracy").mean(),
        "last_accuracy": column("accuracy")[-LAST:].mean(),
        "first_entropy": column("sampling/entropy")[0],
        "mean_entropy": column("sampling/entropy").mean(),
        "last_entropy": column("sampling/entropy")[-LAST:].mean(),
        "last_length": column("completions/mean_length")[-LAST:].mean(),
        "mean_kl": np.nanmean(column("sampling/kl")) if metrics else math.nan,  # null where no row was trained
    }
    figures = {name: float(value) if math.isfinite(value) else None for name, value in figures.items()}
    own = {f"set/{name}": value for name, value in job.overrides.items()}
    how = {name: record[name] for name in ("commit", "gpu", "command", "seconds")}
    steps = [about | {"step": row["step"]} | {name: row.get(name) for name in CURVES} for row in metrics]
    return about | how | own | {"steps": len(metrics)} | scores | figures, steps


def interval(differences: Float64[np.ndarray, " S"]) -> dict[str, float]:
    """Mean, Student's 95 % t interval (`low`, `high`), p-value of the paired t test; and the percentile bootstrap
    interval over seeds, its quantiles moved outwards to Φ(±t √(S/(S − 1))) for few seeds (Hesterberg 2015, arXiv
    1411.5279), which cannot leave the range of the seeds.
    """
    count, mean = len(differences), float(differences.mean())
    half = float(stats.t.ppf(1 - LEVEL / 2, count - 1) * differences.std(ddof=1) / math.sqrt(count))
    draws = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    tail = stats.norm.cdf(stats.t.ppf(LEVEL / 2, count - 1) * math.sqrt(count / (count - 1)))
    low, high = np.quantile(differences[draws].mean(axis=1), (tail, 1 - tail))
    p = float(stats.ttest_1samp(differences, 0.0).pvalue) if np.ptp(differences) else float(mean == 0)
    return {
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "bootstrap_low": float(low),
        "bootstrap_high": float(high),
        "p": p,
    }


def compare(rows: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Paired differences treatment − baseline of each figure, over the seeds of which both cells have a finished run
    with that figure; none for fewer than two.
    """
    found, by_place = [], {(row["cell"], row["seed"]): row for row in rows}
    for treatment, baseline in pairs:
        seeds = sorted({seed for cell, seed in by_place if cell == treatment and (baseline, seed) in by_place})
        for figure in COMPARED:
            values = [(by_place[treatment, seed][figure], by_place[baseline, seed][figure]) for seed in seeds]
            both = np.array([pair for pair in values if None not in pair], np.float64).reshape(-1, 2)
            if len(both) < 2:
                continue
            means = {"treatment_mean": float(both[:, 0].mean()), "baseline_mean": float(both[:, 1].mean())}
            about = {"treatment": treatment, "baseline": baseline, "figure": figure, "seeds": len(both)}
            found.append(about | means | interval(both[:, 0] - both[:, 1]))
    return found


def table(differences: Sequence[Mapping[str, Any]]) -> str:
    """The comparisons as Markdown."""
    lines = ["| figure | difference | seeds | means | mean (95 % t; bootstrap) | p |", "|---|---|---|---|---|---|"]
    for row in differences:
        spans = [f"{row[f'{kind}low']:+.4g} to {row[f'{kind}high']:+.4g}" for kind in ("", "bootstrap_")]
        lines.append(
            f"| {row['figure']} | {row['treatment']} − {row['baseline']} | {row['seeds']} | "
            f"{row['treatment_mean']:.4g}, {row['baseline_mean']:.4g} | {row['mean']:+.4g} ({'; '.join(spans)}) | "
            f"{row['p']:.2g} |"
        )
    return "\n".join(lines)


def draw(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Curves of each cell: mean over its seeds of the means of `WINDOW` steps, and one standard error as a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("accuracy", "sampling/entropy", "completions/mean_length")
    figure, panels = plt.subplots(1, len(names), figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(panels, names, strict=True):
        for cell in dict.fromkeys(row["cell"] for row in steps):
            mine: dict[int, list[float]] = {}
            for row in steps:
                if row["cell"] == cell and row[name] is not None:
                    mine.setdefault(row["step"], []).append(row[name])
            count = max(map(len, mine.values()), default=0)
            x = [step for step, values in mine.items() if len(values) == count]  # all seeds, so that no curve jumps
            values = np.array([mine[step] for step in x])
            if len(x) >= WINDOW:
                values, x = sliding_window_view(values, WINDOW, axis=0).mean(axis=-1), x[WINDOW // 2 : -(WINDOW // 2)]
            mean = values.mean(axis=1)
            error = values.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else np.zeros_like(mean)
            (line,) = axes.plot(x, mean, label=f"{cell} ({count})", linewidth=1.2)
            axes.fill_between(x, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel(CURVES[name])
    panels[-1].legend(fontsize=8, title="cell (seeds)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(jobs: Sequence[Job], pairs: Sequence[tuple[str, str]], out: Path, commit: str | None) -> None:
    """Write OUT/claims.json and OUT/claims.png, and print the comparisons."""
    runs = [run for job in jobs if (run := read_run(job))]
    rows, steps = [run[0] for run in runs], [step for run in runs for step in run[1]]
    differences = compare(rows, pairs)
    about = meta(commit, {"gpu": ", ".join(dict.fromkeys(row["gpu"] for row in rows))})
    content = {"meta": about, "rows": rows, "steps": steps, "differences": differences}
    (out / "claims.json").write_text(json.dumps(content, indent=1) + "\n")
    if steps:
        draw(steps, out / "claims.png")
    print(table(differences))
    print(f"{len(rows)} of {len(jobs)} runs are finished; {out / 'claims.json'}")


def main(argv: Sequence[str] | None = None, runner: Callable[..., Runner] = Runner) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and results")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time on each GPU")
    parser.add_argument("--gpus", nargs="+", default=[], metavar="GPU", help="their numbers; none: one GPU, or the CPU")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="run these cells alone")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="run these seeds alone")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    parser.add_argument("--report", action="store_true", help="analyse the finished runs alone")
    add_commit(parser)
    args = parser.parse_args(argv)
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: at least 1")
    failed: list[Job] = []
    try:
        jobs, pairs = read_plan(args.plan, args.out)
        wanted = [
            job for job in jobs if job.cell in (args.cells or [job.cell]) and job.seed in (args.seeds or [job.seed])
        ]
        to_do = [job for job in wanted if not job.record().get("finished")]
        if args.list:
            print("\n".join(f"{job.directory} {'to do' if job in to_do else 'finished'}" for job in wanted))
            return 0
        for job in wanted:
            if not args.report or job.file("yaml").exists():
                write_config(job)
        if not args.report:
            failed = runner(args.gpus, args.at_once, commit_of(args.commit)[0]).run_all(to_do)
    except (PlanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(jobs, pairs, args.out, args.commit)
    return 1 if failed else 0


def interrupt(*_: object) -> None:
    """SIGTERM as Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        sys.exit(serve())
    signal.signal(signal.SIGTERM, interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
