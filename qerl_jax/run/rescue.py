"""A run whose output directory was deleted while it trained: the state is saved elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.io.checkpoint import Checkpointer
from qerl_jax.io.files import one_line
from qerl_jax.io.run_files import CONFIG_FILE
from qerl_jax.reporting.metrics import append_metrics
from qerl_jax.run import directory as run_directory
from qerl_jax.run.prepare import Run
from qerl_jax.types import TrainState


def check(run: Run, inputs: Mapping[str, str], rows: Sequence[Mapping[str, Any]], state: TrainState) -> None:
    """Raise OSError if the run's directory is gone. State, config and metrics are saved first, beside it or in the
    directory of temporary files; the message says where, or that the state is lost.

    Args:
      run: the run.
      inputs: fingerprints, for the checkpoint.
      rows: metrics of the steps so far; those after `state` are left out.
      state: the newest state.
    """
    if (run.directory / CONFIG_FILE).exists():
        return
    gone, step = f"output_dir {run.directory} was deleted during the run", int(state.step)
    reasons = []
    for parent in (run.directory.parent, Path(tempfile.gettempdir())):
        try:
            place = Path(tempfile.mkdtemp(prefix=f"{run.directory.name}-rescued-", dir=parent))
            save(run, inputs, rows, state, place)
        except OSError as error:
            reasons.append(one_line(error))
            continue
        command = run_directory.resume_command(place).strip()
        raise OSError(f"{gone}; the state after step {step} is saved, without completions, resume it with {command}")
    raise OSError(f"{gone}; the state after step {step} is lost: {'; '.join(reasons)}")


def save(
    run: Run, inputs: Mapping[str, str], rows: Sequence[Mapping[str, Any]], state: TrainState, place: Path
) -> None:
    """Write a run's checkpoint, metrics and config to another directory, as one that can be resumed."""
    checkpoints = Checkpointer(place, run.config.save_total_limit, inputs)
    with contextlib.closing(checkpoints):
        checkpoints.save(state)
    for row in (row for row in rows if row["step"] <= int(state.step)):
        metrics = {name: math.nan if value is None else value for name, value in row.items() if name != "step"}
        append_metrics(place, row["step"], metrics)
    run_directory.write_config(place, dataclasses.replace(run.config, output_dir=str(place)))
