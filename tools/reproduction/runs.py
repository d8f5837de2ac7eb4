"""The runs of an experiment: each is `python -m qerl_jax.train` in a directory of its own, several at a time.

OUT/CELL-SEED/ is a run directory, OUT/CELL-SEED.yaml its config and OUT/CELL-SEED.log what it printed. A run that is
there with all its steps and its evaluation is not repeated; one that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from reproduction.metrics import Run, read_finished
from reproduction.plan import CALIBRATED, PILOT_RATES, PILOT_SEED, config_of

MEMORY = 0.94
"""Share of a GPU's memory that all runs take together."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell with a seed.

    Attributes:
      cell: key of `plan.CELLS`.
      seed: the run's seed.
      directory: the run directory.
      config: all settings that differ from the program's defaults.
    """

    cell: str
    seed: int
    directory: Path
    config: Mapping[str, Any]

    @property
    def config_file(self) -> Path:
        """Where the settings are written."""
        return self.directory.with_name(f"{self.directory.name}.yaml")

    def finished(self) -> Run | None:
        """The run, where it is complete."""
        return read_finished(self.directory, -(-self.config["max_steps"] // self.config["num_iterations"]))


def jobs_of(cells: Sequence[str], seeds: Sequence[int], common: Mapping[str, Any], out: Path) -> list[Job]:
    """The runs, all cells of a seed before the next seed, so that an experiment cut short has whole pairs."""
    jobs = []
    for seed in seeds:
        for cell in cells:
            directory, config = out / f"{cell}-{seed}", config_of(cell, common)
            if config["model"] == CALIBRATED:
                config["model"] = str(out / CALIBRATED)
            jobs.append(Job(cell, seed, directory, config | {"seed": seed, "output_dir": str(directory)}))
    return jobs


def pilot_jobs(common: Mapping[str, Any], out: Path) -> list[Job]:
    """BF16 runs with a seed outside the plan, one for each learning rate, to choose the common one."""
    jobs = []
    for rate in PILOT_RATES:
        directory = out / f"pilot-{rate:g}"
        own = config_of("bf16", {**common, "learning_rate": rate})
        jobs.append(Job("bf16", PILOT_SEED, directory, own | {"seed": PILOT_SEED, "output_dir": str(directory)}))
    return jobs


def write_config(job: Job) -> None:
    """Write the run's config. Raises ValueError where the directory's run was begun with another one, naming the first
    field that differs and both values.
    """
    if job.config_file.exists():
        _compare_settings(job, frozenset())
    job.config_file.write_text(yaml.safe_dump(dict(job.config), sort_keys=True))


def check_settings(jobs: Sequence[Job]) -> None:
    """Raise ValueError where a run that is there has other settings than the plan's, paths aside."""
    for job in jobs:
        if job.config_file.exists():
            _compare_settings(job, frozenset({"model", "output_dir"}))
        elif job.finished():
            raise ValueError(f"{job.config_file}, the settings of a finished run, is missing")


def _compare_settings(job: Job, apart: frozenset[str]) -> None:
    old = yaml.safe_load(job.config_file.read_text())
    for name in sorted({*old, *job.config} - apart):
        if old.get(name) != job.config.get(name):
            raise ValueError(
                f"{job.config_file} was begun with {name} {old.get(name)!r}, now it is {job.config.get(name)!r}: "
                "name another --out"
            )


def run_all(jobs: Sequence[Job], at_once: int) -> list[Job]:
    """Do the runs that are not finished yet, so many at a time; returns those that ended with an error."""
    for job in jobs:
        job.directory.parent.mkdir(parents=True, exist_ok=True)
        write_config(job)
    waiting = [job for job in jobs if job.finished() is None]
    lock, done = threading.Lock(), len(jobs) - len(waiting)

    def execute(job: Job) -> bool:
        nonlocal done
        code = _train(job, at_once)
        with lock:
            done += 1
            state = "finished" if code == 0 else f"ended with {code}, see {job.directory}.log"
            print(f"{done}/{len(jobs)} {job.directory.name} {state}", flush=True)
        return code == 0

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        succeeded = list(pool.map(execute, waiting))
    return [job for job, good in zip(waiting, succeeded, strict=True) if not good]


def calibrate(jobs: Sequence[Job], model: str, dataset: str, out: Path) -> None:
    """Make the calibrated model of the runs to come, once. Raises ValueError if that fails."""
    wanted = out / CALIBRATED
    if wanted.exists() or not any(job.config["model"] == str(wanted) and not job.finished() for job in jobs):
        return
    out.mkdir(parents=True, exist_ok=True)
    script, log_file = Path(__file__).with_name("calibrated.py"), out / f"{CALIBRATED}.log"
    with log_file.open("a") as log:
        command = [sys.executable, str(script), model, dataset, str(wanted)]
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            raise ValueError(f"{model} was not calibrated, see {log_file}")


def _train(job: Job, at_once: int) -> int:
    """Exit code of the run. Runs that share a GPU get equal parts of its memory."""
    environment = dict(os.environ)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # the old name; JAX refuses both
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", f"{MEMORY / at_once:.3f}")
    command = [sys.executable, "-m", "qerl_jax.train", "--config", str(job.config_file), "--resume", "auto"]
    with open(f"{job.directory}.log", "a") as log:
        return subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
