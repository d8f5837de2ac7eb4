"""The runs of an experiment: each is `qerl_jax.train` in a directory of its own, several processes at a time, each of
which does one run after the other.

OUT/CELL-SEED/ is a run directory, OUT/CELL-SEED.yaml its config and OUT/CELL-SEED.log what it printed. A run that is
there with all its steps and its evaluation is not repeated; one that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from reproduction.metrics import Run, read_finished
from reproduction.plan import CALIBRATED, CELLS, PILOT_RATES, PILOT_SEED, config_of

from qerl_jax.command import STOPPED
from qerl_jax.reporting.metrics import METRICS_FILE

MEMORY, MEMORY_OF_SEVERAL = 0.94, 0.75
"""Share of a GPU's memory that JAX takes in one run, and in several together. Each process has some 0.7 GB besides: in
twelve on a GPU with 80 GB, 0.94 left so little that a third of them died for want of memory.
"""
AHEAD = 1
"""Seeds by which a process may be ahead of the first run that waits, rather than compile that run's programs."""
POLL_SECONDS = 0.2


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

    @functools.cached_property
    def programs(self) -> dict[str, Any]:
        """What decides which programs a run compiles, and a little more: all settings but seed, place, and those of
        noise and learning rate, which decide the noise's small program and the optimizer's two.
        """
        own = {"seed", "output_dir", "learning_rate", "sigma_start", "sigma_end", "noise_schedule", "num_stages"}
        return {name: value for name, value in self.config.items() if name not in own | {"noise_target"}}

    def is_calibrated(self) -> bool:
        """Whether its model is the calibrated one."""
        return CELLS[self.cell].get("model") == CALIBRATED

    def recorded_bytes(self) -> int:
        """Size of its metrics; grows with every step."""
        file = self.directory / METRICS_FILE
        return file.stat().st_size if file.exists() else 0

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


class Worker:
    """A process that does runs one after the other (`worker.py`).

    Args:
      environment: its environment.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def run(self, config_file: Path) -> int:
        """Exit code of a run. After one that failed a new process does the next."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(command, env=self._environment, text=True, **pipes)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{config_file}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        code = int(answer) if answer else self._process.wait() or 1
        if code:
            self.close()
        return code

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._process = None


class Waiting:
    """The runs that wait for a process, those that matter most first.

    A process goes on with the programs that it has compiled, unless it is more than `AHEAD` seeds ahead of the first
    run that waits: else runs whose programs few processes have would be left over for the end. Programs are compiled by
    one process first and by others once that has made a step: some of them are in the compilation cache then, and the
    processes that begin together do not all compile at one time.

    Args:
      jobs: the runs.
      calibration: makes the calibrated model, whose runs wait for it and are left out if it fails; None: it is there.
    """

    def __init__(self, jobs: Sequence[Job], calibration: concurrent.futures.Future[None] | None = None) -> None:
        self._left = list(jobs)
        self._calibration = calibration
        self._compiling: dict[Path, tuple[Job, int]] = {}  # by directory, with the metrics' size before its first step
        self._compiled: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Leave out all that are left."""
        with self._lock:
            self._left.clear()

    def next_after(self, last: Job | None) -> Job | None:
        """The next run of a process that has ended the run `last`; None: there is none. Waits until it can begin."""
        while True:
            with self._lock:
                self._see_what_is_compiled(last)
                if (job := self._choice(self._able(), last)) is not None:
                    self._left.remove(job)
                    if job.programs not in self._compiled:
                        self._compiling[job.directory] = job, job.recorded_bytes()
                if job is not None or not self._left:
                    return job
            time.sleep(POLL_SECONDS)

    def _see_what_is_compiled(self, last: Job | None) -> None:
        for job, before in list(self._compiling.values()):
            now = job.recorded_bytes()
            if now > before:
                self._compiled.append(job.programs)
                del self._compiling[job.directory]
            else:  # a run that goes on cuts what was recorded after its checkpoint
                self._compiling[job.directory] = job, now
        if last is not None:  # it ended, with or without a step
            self._compiling.pop(last.directory, None)

    def _able(self) -> list[Job]:
        if self._calibration is None:
            return self._left
        done = self._calibration.done()
        if done and self._calibration.exception():
            self._left = [job for job in self._left if not job.is_calibrated()]
        return [job for job in self._left if done or not job.is_calibrated()]

    def _choice(self, able: Sequence[Job], last: Job | None) -> Job | None:
        if last is not None:
            same = (job for job in able if job.programs == last.programs and job.seed <= able[0].seed + AHEAD)
            if (job := next(same, None)) is not None:
                return job
        compiling = [job.programs for job, _ in self._compiling.values()]
        return next((job for job in able if job.programs not in compiling), None)


def run_all(
    jobs: Sequence[Job],
    at_once: int,
    gpus: Sequence[str] = (),
    calibration: concurrent.futures.Future[None] | None = None,
) -> list[Job]:
    """Do the runs that are not finished yet. A run that is stopped by a signal is the last.

    Args:
      jobs: the runs, those that matter most first.
      at_once: runs at a time on each GPU.
      gpus: as in `CUDA_VISIBLE_DEVICES`; none: the GPU that JAX takes.
      calibration: as in `Waiting`.

    Returns:
      Those that are not finished.
    """
    for job in jobs:
        job.directory.parent.mkdir(parents=True, exist_ok=True)
        write_config(job)
    unfinished = [job for job in jobs if job.finished() is None]
    waiting, lock, done = Waiting(unfinished, calibration), threading.Lock(), len(jobs) - len(unfinished)
    succeeded: list[Job] = []

    def work(worker: Worker) -> None:
        nonlocal done
        job = None
        while (job := waiting.next_after(job)) is not None:
            try:
                code = worker.run(job.config_file)
            except BaseException:  # no process to run it: others would wait for its first step
                waiting.clear()
                raise
            with lock:
                done += 1
                state = "finished" if code == 0 else f"ended with {code}, see {job.directory}.log"
                print(f"{done}/{len(jobs)} {job.directory.name} {state}", flush=True)
                if code == 0:
                    succeeded.append(job)
                elif code == STOPPED:
                    waiting.clear()
        worker.close()

    processes = at_once + (calibration is not None)
    workers = [Worker(environment_of(processes, gpu)) for _ in range(at_once) for gpu in gpus or (None,)]
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        for future in [pool.submit(work, worker) for worker in workers]:
            future.result()
    return [job for job in unfinished if job not in succeeded]


def environment_of(processes: int, gpu: str | None) -> dict[str, str]:
    """The environment of a process on a GPU that so many share in equal parts of its memory."""
    environment = dict(os.environ)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # the old name; JAX refuses both
        share = MEMORY if processes == 1 else MEMORY_OF_SEVERAL / processes
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", f"{share:.3f}")
    return environment if gpu is None else environment | {"CUDA_VISIBLE_DEVICES": gpu}


def needs_calibration(jobs: Sequence[Job], out: Path) -> bool:
    """Whether a run to come needs the calibrated model, and it is not there."""
    return not (out / CALIBRATED).exists() and any(job.is_calibrated() and not job.finished() for job in jobs)


def calibrate(model: str, dataset: str, out: Path, environment: Mapping[str, str]) -> None:
    """Make the calibrated model. Raises ValueError if that fails."""
    out.mkdir(parents=True, exist_ok=True)
    script, log_file = Path(__file__).with_name("calibrated.py"), out / f"{CALIBRATED}.log"
    with log_file.open("a") as log:
        command = [sys.executable, str(script), model, dataset, str(out / CALIBRATED)]
        if subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode:
            raise ValueError(f"{model} was not calibrated, see {log_file}")
