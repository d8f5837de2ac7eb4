"""Safetensors files read memory-mapped and written tensor by tensor.

The library's numpy front end knows neither bf16 nor E4M3 and writes only from memory; the format is a JSON header and
raw little-endian bytes (huggingface/safetensors, README "Format"), so it is read here directly.
"""

from __future__ import annotations

import abc
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from qerl_jax.untrusted import parse_json, require_regular, shown

# In the order in which the library lays tensors out: widest first, and among equals the reverse of its enumeration.
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; the library's own limit
_MAX_DIMENSIONS, _MAX_DIMENSION = 32, 2**40  # NumPy holds 64, of 63 bits together


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it claims to be; the message names file, key and both values."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises OSError, or CheckpointError naming the file."""
    try:
        require_regular(path)
        value = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of 5,000 digits, nested too deep
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_header(path: Path) -> tuple[dict[str, dict], int]:
    """Tensor table of a file and the offset of its first byte. Raises CheckpointError for a truncated or malformed
    file, with the path.
    """
    require_regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: the header claims {length} bytes, the file has {size}")
        try:
            table = parse_json(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the header is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: the header is a {type(table).__name__}, not a table of tensors")
    table.pop("__metadata__", None)
    start = 8 + length
    for name, entry in table.items():
        _check_entry(path, name, entry, size - start)
    _check_cover(path, table, size - start)
    return table, start


def _check_entry(path: Path, name: str, entry: object, available: int) -> None:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sane = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: entry {shown(name)} is malformed: {shown(entry)}") from error
    if not sane:
        raise CheckpointError(f"{path}: entry {shown(name)} is malformed: {shown(entry)}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {shown(name)} has dtype {shown(dtype)}, known are {sorted(DTYPES)}")
    if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > _MAX_DIMENSION:
        raise CheckpointError(
            f"{path}: {shown(name)} has the shape {shown(shape)}; at most {_MAX_DIMENSIONS} dimensions of at most "
            f"{_MAX_DIMENSION:,} are read"
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name!r} of {dtype} {shown(shape)} needs {expected} bytes, its entry spans {end - begin}"
        )
    if end > available:
        raise CheckpointError(
            f"{path}: {name!r} ends at byte {end}, but only {available} follow the header: the file is cut short"
        )


def _check_cover(path: Path, table: dict[str, dict], available: int) -> None:
    """Refuse entries that overlap or leave bytes without an owner, as the library does: a changed offset would
    otherwise read another tensor's bytes.
    """
    reached = 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != reached:
            raise CheckpointError(
                f"{path}: {name!r} starts at byte {begin}, but the tensors before it end at {reached}: the header or "
                "the file is damaged"
            )
        reached = end
    if reached != available:
        raise CheckpointError(
            f"{path}: the tensors end at byte {reached}, but {available} follow the header: the file is damaged"
        )


Spec = tuple[np.dtype, tuple[int, ...]]


class TensorSource(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name: those of files (`Tensors`), or values computed when they are asked for."""

    @abc.abstractmethod
    def spec(self, name: str) -> Spec:
        """dtype and shape without touching the data."""

    @abc.abstractmethod
    def file_of(self, name: str) -> Path:
        """The file a tensor stands in, or is computed from."""

    @abc.abstractmethod
    def where(self) -> str:
        """The files, for errors."""

    def require(self, name: str) -> None:
        """Raise CheckpointError naming the files if there is no such tensor."""
        if name not in self:
            raise CheckpointError(f"{self.where()}: tensor {name!r} is missing from the checkpoint")


class Overlay(TensorSource):
    """The names, files, dtypes and shapes of another checkpoint; a subclass computes the values of some tensors."""

    def __init__(self, tensors: TensorSource):
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def where(self) -> str:
        """The files of the checkpoint."""
        return self._tensors.where()

    def file_of(self, name: str) -> Path:
        """The file of the checkpoint's own tensor."""
        return self._tensors.file_of(name)

    def spec(self, name: str) -> Spec:
        """dtype and shape."""
        return self._tensors.spec(name)


class Tensors(TensorSource):
    """Read-only view of one or several safetensors files; arrays are memory-mapped and read on first use."""

    def __init__(self, files: Iterable[Path]):
        self._files = list(files)
        self._entries: dict[str, tuple[Path, dict, int]] = {}
        for path in self._files:
            table, start = read_header(path)
            for name, entry in table.items():
                if name in self._entries:
                    raise CheckpointError(f"tensor {name!r} stands in both {self._entries[name][0]} and {path}")
                self._entries[name] = (path, entry, start)

    def __getitem__(self, name: str) -> np.ndarray:
        path, entry, start = self._entries[name]
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        # The offset need not suit the dtype's alignment (the format promises none), so map bytes and reinterpret them.
        begin, end = entry["data_offsets"]
        raw = np.memmap(path, np.uint8, "r", offset=start + begin, shape=(end - begin,))
        return raw.view(dtype).reshape(shape)

    def __contains__(self, name: object) -> bool:  # Mapping's own would map the tensor
        return name in self._entries

    def __iter__(self):
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def where(self) -> str:
        """The file, or the directory and the number of its files."""
        return str(self._files[0]) if len(self._files) == 1 else f"{self._files[0].parent} ({len(self._files)} files)"

    def file_of(self, name: str) -> Path:
        """The file a tensor stands in."""
        return self._entries[name][0]

    def spec(self, name: str) -> Spec:
        """dtype and shape without touching the data."""
        entry = self._entries[name][1]
        return DTYPES[entry["dtype"]], tuple(entry["shape"])


def open_checkpoint(directory: Path) -> Tensors:
    """The tensors of a Hugging Face model directory, single file or sharded. Where both are there, the single file
    counts, as in transformers.

    Raises:
      FileNotFoundError: no weights there.
      CheckpointError: a shard that the index names is missing or lacks a tensor that the index puts there.
    """
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists():
        return Tensors([directory / SINGLE_FILE])
    if not index_path.exists():
        raise FileNotFoundError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_index(index_path)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(f"{index_path} names {len(shards)} shards, of which {missing} are missing")
    tensors = Tensors(directory / shard for shard in shards)
    for name, shard in weight_map.items():
        if name not in tensors or tensors.file_of(name).name != shard:
            where = tensors.file_of(name).name if name in tensors else "no shard"
            raise CheckpointError(f"{index_path} puts {name!r} into {shard}, found in {where}")
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """tensor name -> shard file name."""
    weight_map = read_json(path).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names, got {shown(weight_map)}")
    return weight_map


def write_file(path: Path, specs: Mapping[str, Spec], tensor: Callable[[str], np.ndarray]) -> None:
    """Write a file one tensor at a time, so that memory holds one tensor.

    Args:
      path: replaced if it exists; the caller makes the whole directory atomic.
      specs: dtype and shape by name. The order on disk is that of the library: by dtype as in `DTYPES`, then by name.
      tensor: gives each tensor when its turn comes.
    """
    ranks = list(DTYPES.values())
    names = sorted(specs, key=lambda name: (ranks.index(specs[name][0]), name))
    table: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        dtype, shape = specs[name]
        end = offset + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in names:
            array = np.asarray(tensor(name), order="C")  # ascontiguousarray would turn a scalar into a vector
            if (array.dtype, array.shape) != (specs[name][0], tuple(specs[name][1])):
                raise AssertionError(f"{name}: announced {specs[name]}, got {array.dtype} {array.shape}")
            file.write(array.reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays that are in memory."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    write_file(path, {name: (array.dtype, array.shape) for name, array in arrays.items()}, arrays.__getitem__)
