"""Checkpoints with orbax: atomic, the newest few kept, bit-exact.

A checkpoint is `checkpoints/STEP/`: the arrays of a `TrainState` by their path in the tree, as orbax writes them, and
`manifest.json`: the config, fingerprints of the run's inputs, every array's dtype and shape. It appears whole, and its
manifest is the first thing that goes: a directory without one is no checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from qerl_jax import keys
from qerl_jax.atomic import atomic_directory, write_json
from qerl_jax.checkpoint.run_files import ADAPTER_DIR, CHECKPOINT_RESTS, CHECKPOINTS_DIR
from qerl_jax.checkpoint.safetensors import CheckpointError, read_json
from qerl_jax.config import Config, ConfigError, differences, to_mapping
from qerl_jax.messages import one_line
from qerl_jax.types import TrainState

MANIFEST_FILE = "manifest.json"
_MANIFEST = ("config", "inputs", "arrays")
_ARRAYS_DIR = "state"


class Checkpointer:
    """Checkpoints of one run directory.

    Args:
      directory: the run's output_dir.
      keep: how many to keep. None: the directory is only read.
      inputs: fingerprint of each of the run's inputs by its name, or what it is, where that is short; kept in manifests
        and compared with them.
    """

    def __init__(self, directory: str | Path, keep: int | None, inputs: Mapping[str, str] = MappingProxyType({})):
        self.inputs = dict(inputs)
        self.directory = (Path(directory) / CHECKPOINTS_DIR).absolute()
        self._keep = keep
        if keep is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None without one."""
        return max(_steps(self.directory), default=None)

    def save(self, state: TrainState) -> None:
        """Write the state at its step; a checkpoint that is already there is left alone. Those beyond the limit go when
        the new one is there.

        Raises OSError naming the directory if it cannot be written, on a full disk for one; what was written of it is
        removed, and the checkpoints before it are as they were.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        if step in _steps(self.directory):
            return
        arrays, path = _flatten(state), self.directory / str(step)
        earlier = self.latest_step()
        kept = "there is no earlier one" if earlier is None else f"the one of step {earlier} is there to resume from"
        self.directory.mkdir(parents=True, exist_ok=True)  # it may have been deleted
        needed, free = sum(leaf.nbytes for leaf in arrays.values()), shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(
                f"checkpoint {path} cannot be written: up to {needed:,} bytes are needed, {free:,} are free; {kept}"
            )
        failure = ""
        with _quiet():
            try:
                with atomic_directory(path) as temporary:
                    with _orbax() as orbax:
                        orbax.save(temporary / _ARRAYS_DIR, args=ocp.args.PyTreeSave(jax.device_get(arrays)))
                    values = to_mapping(state.config), self.inputs, _shapes(arrays)
                    write_json(temporary / MANIFEST_FILE, dict(zip(_MANIFEST, values, strict=True)))
            except Exception as error:  # orbax and tensorstore raise what they meet, a ValueError for a full disk
                failure = one_line(error)
            if failure:
                gc.collect()  # here, because the failed tasks of orbax print their traces when they are collected
        if failure:
            raise OSError(f"checkpoint {path} cannot be written: {failure}; {kept}")
        self._prune()

    def restore(self, state: TrainState, step: int | None = None) -> TrainState:
        """The newest (or a given) checkpoint in the place of `state`, which gives structure, shapes and config.

        Raises:
          FileNotFoundError: no checkpoint there.
          ConfigError: it belongs to another config, to other inputs without `allow_changed_inputs`, or to a step beyond
            the run's last; names the fields with both values.
          CheckpointError: it cannot be read, or its arrays are not the state's.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{self.directory} holds no checkpoint")
        path, target = self.directory / str(step), _flatten(state)
        manifest = self.manifest(step)
        _refuse_other(path, state.config, manifest["config"])
        if step > (last := state.config.num_rollouts):
            raise ConfigError(
                f"{path} is that of step {step}, but max_steps {state.config.max_steps} ends at step {last}"
            )
        if not state.config.allow_changed_inputs:
            self._check_inputs(path, manifest["inputs"])
        _check_arrays(path, manifest["arrays"], _shapes(target), self._remedy(step))
        restored = self.read(step)
        leaves, treedef = jax.tree.flatten(state)
        placed = [_placed(restored[name], leaf) for name, leaf in zip(target, leaves, strict=True)]
        return jax.tree.unflatten(treedef, placed)

    def read(self, step: int, prefixes: tuple[str, ...] = ("",)) -> dict[str, np.ndarray]:
        """Arrays of a checkpoint by path, those whose path begins with one of `prefixes`. Raises CheckpointError as
        `restore` does.
        """
        import orbax.checkpoint as ocp

        path, manifest = self.directory / str(step), self.manifest(step)
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
            for name, (dtype, shape) in manifest["arrays"].items()
            if name.startswith(prefixes)
        }
        types = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=types, partial_restore=True)
        failure = ""
        with _quiet():
            try:
                with _orbax() as orbax:
                    return orbax.restore(path / _ARRAYS_DIR, args=arguments) if wanted else {}
            except Exception as error:  # of a damaged one, or of another version
                failure = one_line(error)
            gc.collect()  # as in `save`
        raise CheckpointError(f"{path} cannot be restored: {failure}; {self._remedy(step)}")

    def _prune(self) -> None:
        """Delete what a killed process left, and what is older than the newest few checkpoints, the manifest first."""
        oldest = sorted(_steps(self.directory))[-self._keep :][0]
        for path in filter(Path.is_dir, written(self.directory)):
            if not path.name.isdecimal() or int(path.name) < oldest:
                (path / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(path)

    def manifest(self, step: int) -> dict[str, Any]:
        """Config, inputs and arrays of a checkpoint. Raises CheckpointError as `restore` does."""
        path = self.directory / str(step) / MANIFEST_FILE
        try:
            manifest = read_json(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._remedy(step)}") from error
        if not all(isinstance(manifest.get(name), dict) for name in _MANIFEST):
            raise CheckpointError(f"{path} holds {sorted(manifest)}, expected {list(_MANIFEST)}; {self._remedy(step)}")
        return manifest

    def _remedy(self, step: int) -> str:
        earlier = [other for other in _steps(self.directory) if other < step]
        instead = f"resume from step {max(earlier)}" if earlier else "start from the beginning"
        return f"delete {self.directory / str(step)} to {instead}"

    def _check_inputs(self, path: Path, saved: dict[str, Any]) -> None:
        for name, now in self.inputs.items():
            if (was := saved.get(name, now)) != now:
                raise ConfigError(
                    f"{path}: {name} is not what it was when the checkpoint was saved (SHA-256 {str(was)[:12]}…, now "
                    f"{now[:12]}…): put it back, or resume with allow_changed_inputs"
                )


def latest_step(directory: Path) -> int | None:
    """Step of the newest checkpoint of a run directory, found without opening any; None without one."""
    return max(_steps(directory / CHECKPOINTS_DIR), default=None)


def written(checkpoints: Path) -> set[Path]:
    """Checkpoints, those that were deleted in part among them, and what killed writers left."""
    parts = (part for name in (MANIFEST_FILE, _ARRAYS_DIR) for part in checkpoints.glob(f"[0-9]*/{name}"))
    rests = (path for pattern in CHECKPOINT_RESTS for path in checkpoints.glob(pattern))
    return {part.parent for part in parts if part.parent.name.isdecimal()}.union(rests)


def _steps(checkpoints: Path) -> list[int]:
    manifests = checkpoints.glob(f"*/{MANIFEST_FILE}")
    return [int(path.parent.name) for path in manifests if path.parent.name.isdecimal()]


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """What writes and reads arrays. Of several processes one writes, and each reads for itself. Behind an error others
    of its threads go on for a moment, and write, or call an event loop that is closed by then.
    """
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=str(own)
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        try:
            yield checkpointer
        except Exception:
            time.sleep(0.5)
            raise


def refuse_changed(config: Config) -> None:
    """Raise ConfigError, as `Checkpointer.restore` does, if `config` is not that of the run that it resumes; one whose
    manifest cannot be read is left to `restore`.
    """
    checkpoints = Checkpointer(config.output_dir, keep=None)
    if config.resume == "auto" and (step := checkpoints.latest_step()) is not None:
        with contextlib.suppress(CheckpointError):
            _refuse_other(checkpoints.directory / str(step), config, checkpoints.manifest(step)["config"])


def _refuse_other(path: Path, config: Config, saved: dict[str, Any]) -> None:
    if different := differences(config, saved):
        adapter = path.parents[1] / ADAPTER_DIR
        start = f"adapter {adapter} and " if adapter.exists() else ""
        raise ConfigError(
            f"{path} was saved under other settings ({'; '.join(different)}), which may not change on resume: leave "
            f"them as they were, or begin a new run with {start}another output_dir"
        )


def model_input(config: Config) -> str:
    """Name of the input that is the fingerprint of a run's model."""
    return f"model {config.model}"


def saved_inputs(directory: Path) -> dict[str, str]:
    """What the newest checkpoint of a run directory keeps of its inputs; nothing where there is none, or its
    manifest cannot be read, which `Checkpointer.restore` says.
    """
    checkpoints = Checkpointer(directory, keep=None)
    with contextlib.suppress(CheckpointError):
        if (step := checkpoints.latest_step()) is not None:
            return checkpoints.manifest(step)["inputs"]
    return {}


def _check_arrays(path: Path, saved: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path}: array {name!r} was saved as {saved.get(name)}, this run's is {wanted.get(name)}: the "
                f"checkpoint is of another model; {remedy}"
            )


def _shapes(arrays: dict[str, Any]) -> dict[str, list]:
    return {name: [array.dtype.name, list(array.shape)] for name, array in arrays.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Before it raises, orbax logs a failed write once for every array, and tensorstore's threads call an event loop
    that is closed by then; each with its trace, which would bury the one line that says what happened.
    """
    level, hook = logging.root.manager.disable, sys.unraisablehook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logging.disable(level)


def _flatten(state: TrainState) -> dict[str, Any]:
    """path -> array, of a random key its data; a flat dict survives any change of container types."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): keys.words(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


def _placed(array: np.ndarray, like: jax.Array) -> jax.Array:
    """A restored array in the place of one of the state's."""
    if keys.is_typed(like):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return jax.device_put(array, like.sharding)
