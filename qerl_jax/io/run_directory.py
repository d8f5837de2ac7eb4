"""The directory a run owns: when it may be written, its config.yaml, dumps of bad batches."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np

from qerl_jax.config import Config, ConfigError, dump
from qerl_jax.io.checkpoint import CHECKPOINTS_DIR
from qerl_jax.io.files import check_writable, write_text
from qerl_jax.reporting.evaluation import EVALUATION_FILE, Results
from qerl_jax.reporting.metrics import COMPLETIONS_DIR, METRICS_FILE
from qerl_jax.reporting.phases import HEARTBEAT_FILE, STACKS_FILE
from qerl_jax.reporting.plots import PLOTS_DIR
from qerl_jax.reporting.report import REPORT_FILE
from qerl_jax.reporting.sinks import TENSORBOARD_DIR, WANDB_DIR, WANDB_FILE
from qerl_jax.types import Batch

CONFIG_FILE = "config.yaml"
ADAPTER_DIR = "adapter"
NONFINITE_DIR = "nonfinite"
_OWNED = (
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    COMPLETIONS_DIR,
    CHECKPOINTS_DIR,
    ADAPTER_DIR,
    PLOTS_DIR,
    NONFINITE_DIR,
    REPORT_FILE,
    HEARTBEAT_FILE,
    STACKS_FILE,
    TENSORBOARD_DIR,
    WANDB_DIR,
    WANDB_FILE,
)


def check(directory: Path, config: Config) -> None:
    """Raise ConfigError if the directory holds a run that `config` neither continues nor overwrites, or a resume path
    holds none; OSError if it cannot be written.
    """
    if config.resume == "never" and not config.overwrite and (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"output_dir {directory} holds a run already: continue it with --resume auto, start anew with --overwrite, "
            "or name another --output-dir"
        )
    elsewhere = config.resume not in ("never", "auto")
    if elsewhere and Path(config.resume).resolve() != directory.resolve() and (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"output_dir {directory} holds another run than resume {config.resume!r}: name a new --output-dir"
        )
    if elsewhere and not (Path(config.resume) / CHECKPOINTS_DIR).is_dir():
        raise ConfigError(
            f"resume {config.resume!r} is neither 'never', 'auto' nor a run directory with {CHECKPOINTS_DIR}/"
        )
    check_writable(directory, "output_dir")


def clear(directory: Path) -> None:
    """Delete what an old run left; files that no run writes stay."""
    for name in _OWNED:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_config(directory: Path, config: Config) -> None:
    """Write the resolved config, such that `--config` reads it back for a new run or, with `--resume auto`, to go
    on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / CONFIG_FILE, dump(dataclasses.replace(config, resume="never", overwrite=False)))


def adopt(directory: Path, source: Path) -> None:
    """Start a run's files from those of the run it continues: metrics, completions, the evaluation before it."""
    if directory.resolve() == source.resolve():
        return
    directory.mkdir(parents=True, exist_ok=True)
    if (source / METRICS_FILE).exists():
        shutil.copyfile(source / METRICS_FILE, directory / METRICS_FILE)
    if (source / COMPLETIONS_DIR).is_dir():
        shutil.copytree(source / COMPLETIONS_DIR, directory / COMPLETIONS_DIR, dirs_exist_ok=True)
    before = Results(source).get("before")
    if before is not None:
        Results(directory).put("before", before)


def dump_batch(directory: Path, step: int, batch: Batch) -> None:
    """Keep a batch whose update was not finite, `nonfinite/step_000012.npz`, to be looked at."""
    folder = directory / NONFINITE_DIR
    folder.mkdir(exist_ok=True)
    arrays = {field.name: np.asarray(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    np.savez_compressed(folder / f"step_{step + 1:06d}.npz", **arrays)
