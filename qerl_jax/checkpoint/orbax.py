"""Checkpoints with orbax: atomic, the newest few kept, bit-exact.

A checkpoint is `checkpoints/STEP/`: the arrays of a `TrainState` by their path in the tree, as orbax writes them, and
`manifest.json`, written last: the config, fingerprints of the run's inputs, every array's dtype and shape. Without it a
checkpoint is incomplete and as good as absent.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from qerl_jax.atomic import one_line, write_json
from qerl_jax.checkpoint.run_files import ADAPTER_DIR, CHECKPOINTS_DIR
from qerl_jax.checkpoint.safetensors import CheckpointError, read_json
from qerl_jax.config import Config, ConfigError, differences, to_mapping
from qerl_jax.types import TrainState

MANIFEST_FILE = "manifest.json"
_MANIFEST = ("config", "inputs", "arrays")


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
        self._keep = keep  # not orbax's max_to_keep: that deletes the old one before the new one has its manifest
        if keep is not None:
            self.directory.mkdir(parents=True, exist_ok=True)

    @functools.cached_property
    def _manager(self) -> Any:
        """orbax's, made when there is a checkpoint to read or to write: step 1 does not wait for its import."""
        import orbax.checkpoint as ocp

        own = jax.process_index()
        with _quiet():  # absl warns of a setting that read_only implies
            options = ocp.CheckpointManagerOptions(
                enable_async_checkpointing=False,
                cleanup_tmp_directories=self._keep is not None,
                create=False,
                read_only=self._keep is None,
                # Of several processes, one writes and each reads for itself.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=own, active_processes={own}, barrier_sync_key_prefix=str(own)
                ),
            )
            return ocp.CheckpointManager(self.directory, options=options)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None without one."""
        return max(self._complete(), default=None)

    def incomplete_steps(self) -> list[int]:
        """Steps whose manifest is missing: a kill came before it was written, or someone took it away."""
        return sorted(set(self._steps()) - set(self._complete()))

    def save(self, state: TrainState) -> None:
        """Write the state at its step, also over an incomplete one; a complete one that is already there is left alone.
        Those beyond the limit go when the new one is complete.

        Raises OSError naming the directory if it cannot be written, on a full disk for one; what was written of it is
        removed, and the checkpoints before it are as they were.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        if step in self._complete():
            return
        self.directory.mkdir(parents=True, exist_ok=True)  # it may have been deleted
        arrays, path = _flatten(state), self.directory / str(step)
        earlier = self.latest_step()
        kept = "there is no earlier one" if earlier is None else f"the one of step {earlier} is there to resume from"
        needed, free = sum(leaf.nbytes for leaf in arrays.values()), shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(
                f"checkpoint {path} cannot be written: up to {needed:,} bytes are needed, {free:,} are free; {kept}"
            )
        failure = ""
        with _quiet():
            try:
                if step in self.incomplete_steps():
                    self._manager.delete(step)
                arguments = ocp.args.Composite(state=ocp.args.StandardSave(jax.device_get(arrays)))
                self._manager.save(step, args=arguments, force=True)
                self._manager.wait_until_finished()
                values = to_mapping(state.config), self.inputs, _shapes(arrays)
                write_json(path / MANIFEST_FILE, dict(zip(_MANIFEST, values, strict=True)))
            except Exception as error:  # orbax and tensorstore raise what they meet, a ValueError for a full disk
                failure = one_line(error)
            if failure:
                self._remove(step)
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
        import orbax.checkpoint as ocp

        step = self.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{self.directory} holds no complete checkpoint")
        path, target = self.directory / str(step), _flatten(state)
        manifest = self._read_manifest(step)
        _refuse_other(path, state.config, manifest["config"])
        if step > (last := state.config.num_rollouts):
            raise ConfigError(
                f"{path} is that of step {step}, but max_steps {state.config.max_steps} ends at step {last}"
            )
        if not state.config.allow_changed_inputs:
            self._check_inputs(path, manifest["inputs"])
        _check_arrays(path, manifest["arrays"], _shapes(target), self._remedy(step))
        on_host = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in target.items()}
        composite = ocp.args.Composite(state=ocp.args.StandardRestore(on_host))
        restored = self._orbax(step, lambda: self._manager.restore(step, args=composite))["state"]
        leaves, treedef = jax.tree.flatten(state)
        placed = [jax.device_put(restored[name], leaf.sharding) for name, leaf in zip(target, leaves, strict=True)]
        return jax.tree.unflatten(treedef, placed)

    def max_steps(self, step: int) -> int:
        """`max_steps` of the run when the checkpoint was saved."""
        return self._read_manifest(step)["config"]["max_steps"]

    def read(self, step: int, prefixes: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Arrays of a checkpoint by path, those whose path begins with one of `prefixes`. Raises CheckpointError as
        `restore` does.
        """
        import orbax.checkpoint as ocp

        path, manifest = self.directory / str(step), self._read_manifest(step)
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
            for name, (dtype, shape) in manifest["arrays"].items()
            if name.startswith(prefixes)
        }
        types = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=types, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return self._orbax(step, lambda: reader.restore(path / "state", args=arguments)) if wanted else {}

    def close(self) -> None:
        """Finish pending writes, and deletions that a kill interrupted."""
        self._prune()
        if "_manager" in vars(self):
            self._manager.close()

    def _prune(self) -> None:
        """Delete what is older than the newest few complete checkpoints, each one's manifest first: a kill in between
        leaves an incomplete one.
        """
        newest = sorted(self._complete())[-self._keep :] if self._keep else []
        for step in [step for step in self._steps() if newest and step < newest[0]]:
            (self.directory / str(step) / MANIFEST_FILE).unlink(missing_ok=True)
            self._manager.delete(step)

    def _remove(self, step: int) -> None:
        """Remove what a failed save left, until nothing comes after: orbax raises while others of its threads write."""
        settled = 0
        for _ in range(100):
            rests = [rest for rest in (self.directory / str(step), *self.directory.glob(f"{step}.*")) if rest.exists()]
            for rest in rests:
                shutil.rmtree(rest, ignore_errors=True)
            settled = 0 if rests else settled + 1
            if settled == 5:
                return
            time.sleep(0.1)

    def _steps(self) -> list[int]:
        return self._manager.all_steps() if any(self.directory.glob("*")) else []

    def _complete(self) -> list[int]:
        return [step for step in self._steps() if (self.directory / str(step) / MANIFEST_FILE).exists()]

    def _read_manifest(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step) / MANIFEST_FILE
        try:
            manifest = read_json(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._remedy(step)}") from error
        if not all(isinstance(manifest.get(name), dict) for name in _MANIFEST):
            raise CheckpointError(f"{path} holds {sorted(manifest)}, expected {list(_MANIFEST)}; {self._remedy(step)}")
        return manifest

    def _remedy(self, step: int) -> str:
        earlier = [other for other in self._complete() if other < step]
        instead = f"resume from step {max(earlier)}" if earlier else "start from the beginning"
        return f"delete {self.directory / str(step)} to {instead}"

    def _check_inputs(self, path: Path, saved: dict[str, Any]) -> None:
        for name, now in self.inputs.items():
            if (was := saved.get(name, now)) != now:
                raise ConfigError(
                    f"{path}: {name} is not what it was when the checkpoint was saved (SHA-256 {str(was)[:12]}…, now "
                    f"{now[:12]}…): put it back, or resume with --allow-changed-inputs"
                )

    def _orbax(self, step: int, read: Callable[[], Any]) -> Any:
        """What orbax reads of a checkpoint. What it raises of a damaged one, or of another version, is one line."""
        failure = ""
        with _quiet():
            try:
                return read()
            except Exception as error:
                failure = one_line(error)
            time.sleep(0.5)  # others of its threads still call the event loop, which is closed
            gc.collect()  # as in `save`
        raise CheckpointError(f"{self.directory / str(step)} cannot be restored: {failure}; {self._remedy(step)}")


def latest_step(directory: Path) -> int | None:
    """Step of the newest complete checkpoint of a run directory, found without opening any; None without one."""
    manifests = (directory / CHECKPOINTS_DIR).glob(f"*/{MANIFEST_FILE}")
    return max((int(path.parent.name) for path in manifests if path.parent.name.isdecimal()), default=None)


def refuse_changed(config: Config) -> None:
    """Raise ConfigError, as `Checkpointer.restore` does, if `config` is not that of the run that it resumes; one whose
    manifest cannot be read is left to `restore`.
    """
    if config.resume == "auto" and (step := latest_step(Path(config.output_dir))) is not None:
        path = Path(config.output_dir).absolute() / CHECKPOINTS_DIR / str(step)
        with contextlib.suppress(CheckpointError):
            _refuse_other(path, config, read_json(path / MANIFEST_FILE).get("config"))


def _refuse_other(path: Path, config: Config, saved: Any) -> None:
    if isinstance(saved, dict) and (different := differences(config, saved)):
        adapter = path.parents[1] / ADAPTER_DIR
        start = f"--adapter {adapter} " if adapter.exists() else ""
        raise ConfigError(
            f"{path} was saved under other settings ({'; '.join(different)}), which may not change on resume: leave "
            f"them as they were, or begin a new run with {start}--output-dir NEW"
        )


def saved_inputs(directory: Path) -> dict[str, str]:
    """What the newest complete checkpoint of a run directory keeps of its inputs; nothing where there is none, or its
    manifest cannot be read, which `Checkpointer.restore` says.
    """
    with contextlib.suppress(CheckpointError):
        if (step := latest_step(directory)) is not None:
            inputs = read_json(directory / CHECKPOINTS_DIR / str(step) / MANIFEST_FILE).get("inputs")
            return inputs if isinstance(inputs, dict) else {}
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
    """path -> array; a flat dict survives any change of container types."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }
