"""A checkpoint written anew beside its source, shard by shard: some tensors changed, all other files copied."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qerl_jax.io.files import atomic_directory, check_writable, write_json
from qerl_jax.io.safetensors import INDEX_FILE, SINGLE_FILE, Spec, Tensors, write_file


class ShardWriter(Protocol):
    """The tensors of one output shard: their dtypes and shapes, and each tensor on request, in that order."""

    specs: Mapping[str, Spec]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor of `specs`."""
        ...


def check_output(src: Path, dst: Path, overwrite: bool) -> None:
    """Raise FileExistsError if `dst` exists (without `overwrite`), is or holds the source, or is no model directory;
    OSError if it cannot be written.
    """
    if os.path.lexists(dst):
        if not overwrite:
            raise FileExistsError(f"{dst} already exists; --overwrite replaces it")
        _refuse_to_replace(src, dst)
    check_writable(dst.parent, "the directory of the output")


def rewrite_checkpoint(
    src: Path,
    dst: Path,
    tensors: Tensors,
    writer_of: Callable[[list[str]], ShardWriter],
    config: dict[str, Any],
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write `dst` in one atomic step; memory holds what the writers hold.

    Args:
      src: directory of the source.
      dst: directory to write; replaced if it exists.
      tensors: the source's tensors.
      writer_of: writer of the output shard that takes the place of the source's tensors of these names.
      config: the output's config.json.
      progress: called with the number of the source's tensors done.
    """
    shards: dict[str, list[str]] = {}
    for name in tensors:
        shards.setdefault(tensors.file_of(name).name, []).append(name)
    with atomic_directory(dst) as directory:
        weight_map, size, done = {}, 0, 0
        for shard, members in sorted(shards.items()):
            writer = writer_of(members)
            write_file(directory / shard, writer.specs, writer.tensor)
            weight_map |= dict.fromkeys(writer.specs, shard)
            size += sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in writer.specs.values())
            done += len(members)
            progress(done)
        if set(shards) != {SINGLE_FILE}:
            write_json(
                directory / INDEX_FILE,
                {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
            )
        _copy_rest(src, directory)
        write_json(directory / "config.json", config)


def _refuse_to_replace(src: Path, dst: Path) -> None:
    """Raise FileExistsError if replacing `dst` would delete the source, or anything but a model's files."""
    real = dst.resolve()
    sources = [src.resolve(), *(file.resolve() for file in (src.iterdir() if src.is_dir() else ()))]
    inside = [path for path in sources if path.is_relative_to(real)]
    if inside:
        raise FileExistsError(f"{dst} is or holds the source {inside[0]}: name another directory")
    names = {path.name for path in dst.iterdir()} if dst.is_dir() else set()
    if "config.json" not in names or not names & {SINGLE_FILE, INDEX_FILE}:
        raise FileExistsError(
            f"{dst} is no model directory with config.json and {SINGLE_FILE} or {INDEX_FILE}: --overwrite does not "
            "replace it"
        )
    folders = sorted(path.name for path in dst.iterdir() if path.is_dir())
    if folders:
        raise FileExistsError(f"{dst} also holds the directory {folders[0]!r}: --overwrite does not delete it")


def _copy_rest(src: Path, directory: Path) -> None:
    """Copy tokenizer, generation config and licence: every file without weights."""
    for file in src.iterdir():
        if (
            file.is_file()
            and file.suffix not in (".safetensors", ".bin", ".npz", ".pt", ".pth")
            and file.name not in ("config.json", INDEX_FILE)
        ):
            shutil.copyfile(file, directory / file.name)
