"""The output directory of a run: whether it may be used, its config.yaml, dumps of non-finite batches."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from qerl_jax.atomic import check_writable, write_text
from qerl_jax.checkpoint.orbax import written
from qerl_jax.checkpoint.run_files import (
    ADAPTER_DIR,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    LOCK_FILE,
    NONFINITE_DIR,
    OWNED,
    WANDB_DIR,
)
from qerl_jax.config import Config, ConfigError, dump
from qerl_jax.types import Batch


def check(directory: Path, config: Config) -> None:
    """Raise ConfigError if the directory holds a run, or a file of one, that `config` neither resumes nor overwrites,
    or something else in the place of such a file; OSError if it cannot be written.
    """
    check_writable(directory, "output_dir")
    if link := next(_links(directory), None):
        raise ConfigError(
            f"output_dir {directory}: {link.relative_to(directory)} is a link to {os.readlink(link)}, which the run "
            "would write to: remove it, or name another output_dir"
        )
    if other := next(_in_the_way(directory / CHECKPOINTS_DIR), None):
        raise ConfigError(
            f"output_dir {directory}: {other.relative_to(directory)} is no checkpoint, and one of the run would "
            "replace it: move it, or name another output_dir"
        )
    found = [name for name in OWNED if _is_left(directory / name)]
    if config.resume == "never" and not config.overwrite and found:
        is_whole = CONFIG_FILE in found
        what, anew = ("a run", ", start anew (overwrite: true)") if is_whole else (f"{found[0]} of a run", "")
        raise ConfigError(
            f"output_dir {directory} holds {what} already: resume it (resume: auto){anew}, or name another output_dir"
        )
    if config.overwrite and found and not _is_config_of_a_run(directory / CONFIG_FILE):
        raise ConfigError(
            f"output_dir {directory} holds {found[0]}, but no {CONFIG_FILE} of a run: overwrite deletes only what a "
            "run made; name another output_dir"
        )
    if config.resume == "auto" and found and not {CONFIG_FILE, CHECKPOINTS_DIR} & set(found):
        raise ConfigError(
            f"output_dir {directory} holds {found[0]}, but neither {CONFIG_FILE} nor {CHECKPOINTS_DIR}/ to resume "
            "from: name another output_dir"
        )
    if config.resume == "auto" and ADAPTER_DIR in found and CHECKPOINTS_DIR not in found:
        raise ConfigError(
            f"output_dir {directory} holds a finished run without {CHECKPOINTS_DIR}/, from which it could go on: begin "
            f"a new run with adapter {directory / ADAPTER_DIR} and another output_dir"
        )


def _links(directory: Path) -> Iterator[Path]:
    """Links in the place of files that a run writes, as a directory from somebody else may hold. (A directory may be a
    link, to a larger disk.)
    """
    owned = (directory / name for name in OWNED if name != WANDB_DIR)  # W&B makes links of its own
    for path in (directory / LOCK_FILE, *(entry for name in owned for entry in (name, *_entries(name)))):
        if path.is_symlink() and not path.is_dir():
            yield path


def _entries(path: Path) -> set[Path]:
    """What a run wrote into this directory of its own."""
    if path.name == CHECKPOINTS_DIR:
        return written(path)
    entries = path.iterdir() if path.is_dir() else ()
    return {entry for entry in entries if any(map(entry.match, OWNED[path.name]))}


def _is_left(path: Path) -> bool:
    """Whether a file of a run is there, or a directory of one with anything that a run wrote: an empty one is left by a
    run killed at once.
    """
    return bool(_entries(path)) if path.is_dir() else path.exists()


def _in_the_way(checkpoints: Path) -> Iterator[Path]:
    """What is no checkpoint and has the name of one, which would replace it."""
    others = {path for path in checkpoints.glob("[1-9]*") if path.name.isdecimal()} - written(checkpoints)
    return (path for path in others if not path.is_dir() or any(path.iterdir()))


def _is_config_of_a_run(path: Path) -> bool:
    """Whether a file is the config that a run of this or another version wrote."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"model", "dataset", "output_dir", "max_steps"} <= values.keys()


def clear(directory: Path, names: Iterable[str] = tuple(OWNED)) -> list[str]:
    """Delete what an old run left, by these names; files that no run writes stay, also in its directories. Returns the
    names that were there.
    """
    names = [name for name in names if _is_left(directory / name)]
    for name in names:
        path = directory / name
        if not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        for entry in sorted(_entries(path)):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
    return names


def write_config(directory: Path, config: Config) -> None:
    """Write the resolved config, which `--config` reads back for a new run or, with `--resume auto`, to go on."""
    directory.mkdir(parents=True, exist_ok=True)
    lasting = dataclasses.replace(config, resume="never", overwrite=False, allow_changed_inputs=False)
    write_text(directory / CONFIG_FILE, dump(lasting))


def dump_batch(directory: Path, step: int, batch: Batch) -> None:
    """Keep a batch whose update was not finite, `nonfinite/step_000012.npz`, to be looked at."""
    folder = directory / NONFINITE_DIR
    folder.mkdir(parents=True, exist_ok=True)  # the run's directory may have been deleted
    arrays = {field.name: np.asarray(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    np.savez_compressed(folder / f"step_{step:06d}.npz", **arrays)


def resume_command(directory: Path) -> str:
    """The command that resumes a run."""
    return f"  python -m qerl_jax.train --config {shlex.quote(str(directory / CONFIG_FILE))} --resume auto"
