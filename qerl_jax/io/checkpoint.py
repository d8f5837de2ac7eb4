"""Checkpoints with orbax: atomic, the newest few kept, bit-exact.

A checkpoint holds the arrays of a `TrainState` by their path in the tree, and the config they belong to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from qerl_jax.config import ConfigError, differences, to_mapping
from qerl_jax.types import TrainState

CHECKPOINTS_DIR = "checkpoints"


class Checkpointer:
    """Checkpoints of one run directory.

    Args:
      directory: the run's output_dir.
      keep: how many to keep.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = (directory / CHECKPOINTS_DIR).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None without one."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Write the state at its step; a step that is already there is left alone."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_flatten(state)), config=ocp.args.JsonSave(to_mapping(state.config))
        )
        self._manager.save(step, args=arguments)
        self._manager.wait_until_finished()

    def restore(self, state: TrainState, step: int | None = None) -> TrainState:
        """The newest (or a given) checkpoint in the place of `state`, which gives structure, shapes and config.

        Raises:
          FileNotFoundError: no checkpoint there.
          ConfigError: it belongs to another config; names the fields with both values.
          ValueError: its arrays do not fit the state's.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{self.directory} holds no complete checkpoint")
        saved = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
        different = differences(state.config, saved)
        if different:
            raise ConfigError(f"{self.directory / str(step)} belongs to another config ({'; '.join(different)})")
        target = _flatten(state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, target))
        )
        restored = self._manager.restore(step, args=arguments)["state"]
        leaves, treedef = jax.tree.flatten(state)
        return jax.tree.unflatten(treedef, [restored[name] for name, _ in zip(target, leaves, strict=True)])

    def close(self) -> None:
        """Finish what is being written."""
        self._manager.close()


def _flatten(state: TrainState) -> dict[str, Any]:
    """path -> array; a flat dict survives any change of container types."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }
