"""A checkpoint written anew, shard by shard: some tensors changed, all other files copied."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.atomic import check_writable, write_json
from qerl_jax.checkpoint.peft_config import CONFIG_FILE as ADAPTER_CONFIG
from qerl_jax.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, Tensors, save

BASE_PART, ADAPTER_PART = "base", "adapter"
"""Directories of an export that serves an adapter beside the base it belongs to."""


_WEIGHTS = (".safetensors", ".bin", ".npz", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def check_output(sources: Iterable[Path], dst: Path, overwrite: bool, adapters: bool = False) -> None:
    """Raise FileExistsError if `dst` exists (without `overwrite`), is or holds a source, or is no model directory (with
    `adapters`: nor an adapter, nor a directory of both as `qerl_jax.export` writes it). Raise OSError if it cannot be
    written.
    """
    if os.path.lexists(dst):
        if not overwrite:
            raise FileExistsError(f"{dst} already exists; --overwrite replaces it")
        _refuse_sources(sources, dst)
        _refuse_others(dst, adapters)
    check_writable(dst.parent, "the directory of the output")


def write_checkpoint(
    src: Path,
    directory: Path,
    tensors: Tensors,
    config: dict[str, Any],
    convert: Callable[[str], Mapping[str, np.ndarray]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    leave_out: Container[str] = (),
) -> None:
    """Write a checkpoint into an empty directory, shard by shard; memory holds the computed tensors of one shard.

    Args:
      src: directory of the source.
      directory: where to write.
      tensors: the source's tensors.
      config: the output's config.json.
      convert: the tensors that take the place of one of the source's, by name; None: that tensor alone.
      progress: called with the numbers of the source's tensors done and of all.
      leave_out: names of files that are not copied.
    """
    shards: dict[str, list[str]] = {}
    for name in tensors:
        shards.setdefault(tensors.file_of(name).name, []).append(name)
    weight_map, size, done = {}, 0, 0
    for shard, members in sorted(shards.items()):
        arrays: dict[str, np.ndarray] = {}
        for name in members:
            arrays |= {name: tensors[name]} if convert is None else convert(name)
            progress(done := done + 1, len(tensors))
        save(directory / shard, arrays)
        weight_map |= dict.fromkeys(arrays, shard)
        size += sum(array.nbytes for array in arrays.values())
    if set(shards) != {SINGLE_FILE}:
        write_json(
            directory / INDEX_FILE,
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
        )
    _copy_rest(src, directory, leave_out)
    write_json(directory / "config.json", config)


def _refuse_sources(sources: Iterable[Path], dst: Path) -> None:
    """Raise FileExistsError if replacing `dst` would delete a source."""
    real = dst.resolve()
    for src in sources:
        files = src.iterdir() if src.is_dir() else ()
        for path in (src.resolve(), *(file.resolve() for file in files)):
            if path.is_relative_to(real):
                raise FileExistsError(f"{dst} is or holds the source {path}: name another directory")


def _refuse_others(dst: Path, adapters: bool) -> None:
    """Raise FileExistsError if replacing `dst` would delete anything but a model's (or an adapter's) files."""
    entries = {path.name for path in dst.iterdir()} if dst.is_dir() else set()
    parts = entries & {BASE_PART, ADAPTER_PART}
    if adapters and parts and entries <= {BASE_PART, ADAPTER_PART}:
        for part in parts:
            _refuse_others(dst / part, adapters)
        return
    is_model = "config.json" in entries and entries & {SINGLE_FILE, INDEX_FILE}
    if not is_model and not (adapters and ADAPTER_CONFIG in entries):
        instead = f" and no adapter with {ADAPTER_CONFIG}" if adapters else ""
        raise FileExistsError(
            f"{dst} is no model directory with config.json and {SINGLE_FILE} or {INDEX_FILE}{instead}: --overwrite "
            "does not replace it"
        )
    folders = sorted(path.name for path in dst.iterdir() if path.is_dir())
    if folders:
        raise FileExistsError(f"{dst} also holds the directory {folders[0]!r}: --overwrite does not delete it")


def _copy_rest(src: Path, directory: Path, leave_out: Container[str]) -> None:
    """Copy tokenizer, generation config and licence: every file but weights, of other programs, too, and indices."""
    for file in src.iterdir():
        if (
            file.is_file()
            and file.suffix not in _WEIGHTS
            and not file.name.endswith(".index.json")
            and file.name != "config.json"
            and file.name not in leave_out
        ):
            shutil.copyfile(file, directory / file.name)
