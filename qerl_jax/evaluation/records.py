"""Items of an evaluation in a file of JSON lines, written as they come, so that a killed evaluation can go on.

The first line holds the settings, every other one an item.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from qerl_jax.atomic import check_file_writable, lock, naming
from qerl_jax.evaluation.summary import Item


class RecordsError(ValueError):
    """A file that holds something else than records of this evaluation."""


class Records:
    """An open file of records.

    Attributes:
      items: those in the file.
    """

    def __init__(self, path: Path, file: BinaryIO, items: list[Item]):
        self._path, self._file, self.items = path, file, items
        self._size = os.fstat(file.fileno()).st_size

    def append(self, items: Sequence[Item]) -> None:
        """Write items, which are on the disk when this returns. Raises RecordsError where another program has removed
        or changed the file: what is written after that would be no records.
        """
        there = self._path.stat() if self._path.exists() else None
        own = os.fstat(self._file.fileno())
        if there is None or (there.st_ino, there.st_size) != (own.st_ino, self._size):
            raise RecordsError(
                f"records {self._path} were removed or changed by another program after {len(self.items)} problems: "
                "begin again, in a file that nothing else writes"
            )
        _write(self._path, self._file, "".join(_line(dataclasses.asdict(item)) for item in items))
        self.items, self._size = self.items + list(items), os.fstat(self._file.fileno()).st_size


@contextlib.contextmanager
def open_records(
    path: Path, settings: Mapping[str, Any], ids: Sequence[int], at_once: int, generations: int
) -> Iterator[Records]:
    """The records of an evaluation, new or continued, locked for the length of a block.

    Args:
      path: the file. One that exists keeps its whole parts; what a kill left behind them is cut off.
      settings: all that the items depend on, as JSON values.
      ids: the problems', in order.
      at_once: problems of a part, which are sampled together.
      generations: completions of each problem.

    Raises RecordsError for a file of other settings, naming the first that differs and both values, one that holds
    something else, one that another process writes, or a device; OSError if it cannot be written.
    """
    check_file_writable(path, "records")
    if path.exists() and not path.is_file():
        raise RecordsError(f"records {path} is a device or a pipe, which nothing can be read back from: name a file")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        if not lock(file.fileno()):
            raise RecordsError(f"records {path} are being written by another process")
        file.seek(0)
        header = _line({"settings": dict(settings)})
        first = file.readline()
        if not first.endswith(b"\n") and header.encode().startswith(first):  # new, or killed in its first write
            os.ftruncate(file.fileno(), 0)
            _write(path, file, header)
            yield Records(path, file, [])
            return
        _compare(path, first, json.loads(header))
        items, ends = _read(path, file, ids, generations)
        kept = len(items) if len(items) == len(ids) else len(items) // at_once * at_once
        os.ftruncate(file.fileno(), ends[kept])
        yield Records(path, file, items[:kept])


def kept_settings(path: Path) -> dict[str, Any]:
    """Settings of the records in a file; none where it has no header."""
    if path.is_file():
        with path.open("rb") as file, contextlib.suppress(RecordsError):
            return _settings(path, file.readline())
    return {}


def _settings(path: Path, first: bytes) -> dict[str, Any]:
    """Those of a first line. Raises RecordsError for one that is no header."""
    try:
        return dict(json.loads(first)["settings"])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise RecordsError(f"records {path} holds something else than records of an evaluation") from error


def _compare(path: Path, first: bytes, ours: dict[str, Any]) -> None:
    """Raise RecordsError unless the first line is a header with our settings."""
    found, wanted = _settings(path, first), ours["settings"]
    for name in (*wanted, *found):
        if found.get(name) != wanted.get(name):
            raise RecordsError(
                f"records {path} were written with {name} {found.get(name)!r}, this call has {wanted.get(name)!r}: "
                "name another file for other settings"
            )


def _read(path: Path, file: BinaryIO, ids: Sequence[int], generations: int) -> tuple[list[Item], list[int]]:
    """The items after the header, and where each of them begins and the last one ends."""
    items: list[Item] = []
    ends = [file.tell()]
    for line in file:
        if not line.endswith(b"\n"):
            break  # a kill cut it off
        where = f"records {path}, line {len(items) + 2}"
        try:
            item = Item(**json.loads(line))
            of_completions = item.completions, item.answers, item.verdicts, item.lengths, item.finish
            is_whole = all(len(values) == generations for values in of_completions)
        except (ValueError, RecursionError, TypeError) as error:
            raise RecordsError(f"{where} is no item of an evaluation: {error}") from error
        if not is_whole:
            raise RecordsError(f"{where} is no item of {generations} completions")
        if len(items) == len(ids) or item.id != ids[len(items)]:
            expected = f"problem {ids[len(items)]}" if len(items) < len(ids) else "the end"
            raise RecordsError(f"{where} holds problem {item.id!r} where {expected} should be")
        items.append(item)
        ends.append(ends[-1] + len(line))
    return items, ends


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _write(path: Path, file: BinaryIO, text: str) -> None:
    with naming(path):
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
