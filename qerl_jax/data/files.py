"""Records of dataset files, read one at a time: JSON lines, JSON lists and parquet, single files or shards."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.messages import parse_json

FILE_KINDS = (".jsonl", ".json", ".parquet")
_Float = type[np.float16] | type[np.float32]
_ROWS_AT_ONCE = 256  # parquet rows a read: few, because a row of a code dataset can hold a megabyte of tests


class DataError(ValueError):
    """A dataset that cannot be used; the message names the file, the line or column, and what was expected."""


@dataclasses.dataclass(frozen=True)
class Source:
    """An iterable of records that can be read once.

    Attributes:
      where: the file, or the name of the dataset on the hub.
      columns: column names that all records have; empty for JSON, whose records have keys of their own.
      records: (place, record): a place is "line 7" or "row 7", counted from 1.
    """

    where: str
    columns: list[str]
    records: Iterable[tuple[str, dict[str, Any]]]


def open_file(path: Path, wanted: Collection[str]) -> Source:
    """A file's records. Only `wanted` columns of a parquet file are read, a few hundred rows at a time; JSON lines are
    read line by line, a JSON list whole.

    Raises DataError naming the file and line, at once or while the records are read.
    """
    if path.suffix not in FILE_KINDS:
        raise DataError(f"dataset file {path} does not end in one of {list(FILE_KINDS)}")
    if path.suffix == ".parquet":
        return _open_parquet(path, wanted)
    return Source(str(path), [], _json_lines(path) if path.suffix == ".jsonl" else _json_list(path))


def _open_parquet(path: Path, wanted: Collection[str]) -> Source:
    import pyarrow
    import pyarrow.parquet

    def bad(error: Exception) -> DataError:
        return DataError(f"{path} is not a parquet file that can be read: {error}")

    broken = (pyarrow.ArrowException, OSError, ValueError)  # the last: text that is not UTF-8
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except broken as error:
        raise bad(error) from error
    names = file.schema_arrow.names
    twice = sorted(name for name, count in collections.Counter(names).items() if count > 1 and name in wanted)
    if twice:
        raise DataError(f"{path} has two columns {twice[0]!r}")

    kinds = {pyarrow.float16(): np.float16, pyarrow.float32(): np.float32}

    def kind_of(column: pyarrow.DataType) -> _Float | None:
        while hasattr(column, "value_type"):  # a list
            column = column.value_type
        return kinds.get(column)

    narrow = {field.name: kind for field in file.schema_arrow if (kind := kind_of(field.type))}

    def records() -> Iterator[tuple[str, dict[str, Any]]]:
        number = itertools.count(1)
        try:
            with file:
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[name for name in names if name in wanted]):
                    for row in batch.to_pylist():
                        yield f"row {next(number)}", _as_written(row, narrow)
        except broken as error:
            raise bad(error) from error

    return Source(str(path), names, records())


def _as_written(row: dict[str, Any], narrow: Mapping[str, _Float]) -> dict[str, Any]:
    """A record whose columns `narrow`, floats or lists of them, have the shortest decimal of their type: as a Python
    float 2.55 of float32 is 2.549999952316284.
    """

    def written(value: Any, kind: _Float) -> Any:
        if isinstance(value, list):
            return [written(item, kind) for item in value]
        return None if value is None else _of_python(kind(value))

    return row | {name: written(row[name], kind) for name, kind in narrow.items() if name in row}


def open_rows(where: str, rows: Iterable[Any], wanted: Collection[str]) -> Source:
    """Records in memory: a `datasets.Dataset`, of which only `wanted` columns are read, or any other iterable of
    mappings. Raises DataError for another kind of row, while the records are read.
    """
    features = getattr(rows, "features", None) or {}
    narrow = {name: kind for name, feature in features.items() if name in wanted and (kind := _kind_of(feature))}
    kept = rows.select_columns([name for name in features if name in wanted]) if features else rows

    def records() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, row in enumerate(kept, 1):
            place = f"row {number}"
            record = _object(row, where, place)
            record |= {name: _of_python(record[name]) for name in wanted if name in record}
            yield place, _as_written(record, narrow)

    return Source(where, list(features), records())


def _of_python(value: Any) -> Any:
    """A value of NumPy's, as the records of pandas hold, as one of Python's; a float has the shortest decimal of its
    type. None for a missing one of pandas'.
    """
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.ndarray):
        return [_of_python(item) for item in value]
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def _kind_of(feature: Any) -> _Float | None:
    """Of a column of `datasets`, or of the items of its lists."""
    while (items := getattr(feature, "feature", None)) is not None:
        feature = items
    return {"float16": np.float16, "float32": np.float32}.get(getattr(feature, "dtype", ""))


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            place = f"line {number}"
            try:
                row = parse_json(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, {place} is not UTF-8 text: {error}") from error
            except (ValueError, RecursionError) as error:
                why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise DataError(f"{path}, {place} is not JSON: {why}") from error
            yield place, _object(row, path, place)


def _json_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":  # an object a line
            yield from _json_lines(path)
            return
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a {type(rows).__name__}, expected a list of objects")
    for number, row in enumerate(rows, 1):
        place = f"row {number}"
        yield place, _object(row, path, place)


def _object(row: Any, where: Path | str, place: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}, {place} is a {type(row).__name__}, expected an object with columns")
    return dict(row)


def split_files(directory: Path, split: str, subset: str | None = None) -> list[Path]:
    """Files of a split in a directory, sorted by name. A file belongs to the split whose name stands before the first
    `-`, `_` or `.`, such as `train.jsonl` and `train-00000-of-00002.parquet`, not `train1.parquet`. They lie in
    the directory itself or, as the hub lays datasets out, in its folder `data/` or that of the subset, where that holds
    data files.

    Raises DataError if there are none, or files of two kinds.
    """
    folders = [folder for name in (subset, "data") if name and (folder := directory / name).is_dir()] + [directory]
    filled = (folder for folder in folders if any(path.suffix in FILE_KINDS for path in folder.iterdir()))
    folder = next(filled, folders[0])
    files = sorted(
        path for path in folder.iterdir() if path.suffix in FILE_KINDS and re.split("[-_.]", path.name)[0] == split
    )
    if not files:
        present = sorted(path.name for path in folder.iterdir())[:10]
        raise DataError(
            f"{folder} has no file of the split {split!r}, named {split}.…, {split}-… or {split}_… and ending in one "
            f"of {list(FILE_KINDS)}; it holds {present}"
        )
    kinds = sorted({path.suffix for path in files})
    if len(kinds) > 1:
        raise DataError(f"{folder} holds the split {split!r} as {' and '.join(kinds)}: name one of the files")
    return files
