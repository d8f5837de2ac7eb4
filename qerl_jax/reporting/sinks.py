"""Metrics sinks beside metrics.jsonl: TensorBoard and Weights & Biases (`report_to`)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl_jax.atomic import write_json
from qerl_jax.checkpoint.run_files import TENSORBOARD_DIR, WANDB_FILE
from qerl_jax.config import Config, ConfigError, to_mapping
from qerl_jax.messages import one_line
from qerl_jax.reporting.console import say

_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check(config: Config) -> None:
    """Raise ConfigError if a package that `report_to` needs is not installed, with the command that installs it, or if
    Weights & Biases does not know the user (its offline mode asks for none).
    """
    for name in config.report_to:
        found = importlib.util.find_spec(_MODULES[name])
        if found is None or found.origin is None:  # without origin: a mere directory, as W&B leaves one
            raise ConfigError(
                f"report_to {name!r} needs the package {_MODULES[name]}, which is not installed: "
                f'pip install "qerl-jax[{name}]"'
            )
    if "wandb" in config.report_to:
        import wandb

        try:
            wandb.login(verify=True)
        except wandb.Error as error:
            raise ConfigError(f"report_to 'wandb': {one_line(error)}") from error


class Sinks:
    """Every sink that `config.report_to` names. One that fails later than at its start is said once, and left out.

    Args:
      config: configuration of the run; W&B shows it beside the curves.
      directory: the run's output_dir, where the sinks keep their files.
      step: completed steps; a resumed run continues the same curves.
      console: for that message.
    """

    def __init__(self, config: Config, directory: Path, step: int, console: Console):
        kinds = {"tensorboard": _TensorBoard, "wandb": _Wandb}
        self._sinks: dict[str, Any] = {name: kinds[name](config, directory, step) for name in config.report_to}
        self._console = console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's numbers, those that are finite; several calls for one step add up."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._each(lambda sink: sink.log(step, finite))

    def close(self) -> None:
        """Write out everything. Not called for a failed run, so that the service records the failure."""
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # a service that is away raises what its library likes
                del self._sinks[name]
                say(self._console, f"report_to {name!r} failed and is left out from here on: {one_line(error)}")


class _TensorBoard:
    def __init__(self, config: Config, directory: Path, step: int):
        import tensorboardX

        # Steps after the checkpoint, or all without one, that a killed run had written are purged: they come again.
        self._writer = tensorboardX.SummaryWriter(
            str(directory / TENSORBOARD_DIR),
            purge_step=step + 1 if step else 0,
            max_queue=1000,  # of 10, the writer's thread and this one wait for each other at every number
            filename_suffix=f".from{step}",  # names have whole seconds: two starts in one must not share a file
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _known_id(path: Path) -> str:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["id"]
    except (ValueError, LookupError, TypeError):
        known = None
    if not isinstance(known, str) or not known:
        raise ConfigError(f"{path} holds no id of a W&B run: delete the file to begin a new one there")
    return known


class _Wandb:
    def __init__(self, config: Config, directory: Path, step: int):
        import wandb

        path = directory / WANDB_FILE
        known = _known_id(path) if step and path.exists() else None
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "qerl-jax"),
                name=directory.absolute().name,
                dir=str(directory),
                config=to_mapping(config),
                id=known,
                resume=None if known is None else "allow",
            )
        except Exception as error:  # its own kinds have no common base: no login, no network, an id that was deleted
            raise ConfigError(f"report_to 'wandb': W&B does not start: {one_line(error)}") from error
        write_json(path, {"id": self._run.id})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
