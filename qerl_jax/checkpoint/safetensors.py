"""Safetensors files: headers read, checked and written by the `safetensors` package, tensors mapped from the file.

The package's numpy front end copies each tensor and does not know E4M3; mapping does neither.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from qerl_jax.checkpoint.names import is_unused
from qerl_jax.messages import parse_json, shown

DTYPES = {
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I16": np.dtype(np.int16),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FLOATS = ("bfloat16", "float16", "float32")  # what an unquantized weight may be stored in
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BLOCKS, _BLOCK_BYTES = 64, 1 << 12
_OF_A_MODEL = re.compile(
    r".*\.(safetensors|jinja)|.*(config|\.index)\.json|(tokenizer|vocab|added_tokens|special_tokens_map)\.json"
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it claims to be; the message names file, key and both values."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises OSError, or CheckpointError naming the file."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of 5,000 digits, nested too deep
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


class Entry(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
      file: where it stands, or what it is computed from.
      dtype, shape: of its array.
      read: the array: mapped from the file, or computed.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name, each read when it is asked for.

    Attributes:
      entries: by name.
      where: their files, for errors.
    """

    def __init__(self, entries: Mapping[str, Entry], where: str):
        self.entries, self.where = entries, where

    def __getitem__(self, name: str) -> np.ndarray:
        return self.entries[name].read()

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def file_of(self, name: str) -> Path:
        """The file a tensor stands in, or is computed from."""
        return self.entries[name].file


def open_files(files: Iterable[Path]) -> Tensors:
    """The tensors of one or several safetensors files; arrays are memory-mapped and read on first use.

    Raises CheckpointError for a file that the `safetensors` package refuses (cut short, overlapping tensors, a size
    that is not that of the shape), for a dtype that is not in `DTYPES`, and for a tensor that two files hold.
    """
    files, entries = list(files), {}
    for path in files:
        for name, entry in _entries(path).items():
            if name in entries:
                raise CheckpointError(f"tensor {name!r} stands in both {entries[name].file} and {path}")
            entries[name] = entry
    return Tensors(entries, str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)")


def _entries(path: Path) -> dict[str, Entry]:
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} is damaged, or was cut short ({size:,} bytes): {error}") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error}") from error
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, entry in slices.items():
        if entry.get_dtype() not in DTYPES:
            raise CheckpointError(f"{path}: {name!r} has dtype {entry.get_dtype()}, known are {sorted(DTYPES)}")
        specs[name] = DTYPES[entry.get_dtype()], tuple(entry.get_shape())
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in specs.items()}
    # Tensors follow each other to the end of the file without a gap: the package refuses any other file.
    begin, entries = path.stat().st_size - sum(sizes.values()), {}
    for name, spec in specs.items():
        entries[name] = Entry(path, *spec, functools.partial(_mapped, path, *spec, begin))
        begin += sizes[name]
    return entries


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], begin: int) -> np.ndarray:
    """The array whose first byte is at `begin`."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    # The offset need not suit the dtype's alignment (the format promises none), so map bytes and reinterpret them.
    raw = np.memmap(path, np.uint8, "r", offset=begin, shape=(math.prod(shape) * dtype.itemsize,))
    return raw.view(dtype).reshape(shape)


def open_checkpoint(directory: Path) -> Tensors:
    """The tensors of a Hugging Face model directory, single file or sharded. Where both are there, the single file
    counts, as in transformers.

    Raises:
      FileNotFoundError: no weights there.
      CheckpointError: a shard that the index names is missing or lacks a tensor that the index puts there.
    """
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists():
        return open_files([directory / SINGLE_FILE])
    if not index_path.exists():
        raise FileNotFoundError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}{unread_weights(directory)}")
    weight_map = read_index(index_path)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(f"{index_path} names {len(shards)} shards, of which {missing} are missing")
    tensors = open_files(directory / shard for shard in shards)
    for name, shard in weight_map.items():
        if is_unused(name) and name not in tensors:  # older indices name rotary frequencies that nobody saves any more
            continue
        if name not in tensors or tensors.file_of(name).name != shard:
            where = tensors.file_of(name).name if name in tensors else "no shard"
            raise CheckpointError(f"{index_path} puts {name!r} into {shard}, found in {where}")
    return tensors


def unread_weights(directory: Path) -> str:
    """What an error says besides where a directory has weights of another kind; "" where it has none."""
    found = sorted(file.name for file in directory.iterdir() if file.suffix in (".gguf", ".bin", ".pt", ".pth"))
    return f"; {found[0]} is not read: take the model's safetensors" if found else ""


def model_fingerprint(directory: Path) -> str:
    """Fingerprint of names, sizes and bytes of a model's or adapter's weights, configs, tokenizer and template: 64
    evenly spaced blocks of 4 KiB of each, its header and its end among them. Any training changes them.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.iterdir() if _OF_A_MODEL.fullmatch(path.name)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def read_index(path: Path) -> dict[str, str]:
    """tensor name -> shard file name."""
    weight_map = read_json(path).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names, got {shown(weight_map)}")
    return weight_map


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file, replaced if it exists; the caller makes the whole directory atomic. Raises OSError."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # alive until they are written
    specs = {
        name: TensorSpec(dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in arrays.items()
    }
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode  # by the umask, which the temporary file of `serialize_file` does not follow
    try:
        serialize_file(specs, path, {"format": "pt"})
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    with path.open("rb+") as file:
        os.fsync(file.fileno())
