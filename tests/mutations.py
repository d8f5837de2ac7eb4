"""Random damage to files, the same for the same generator: what disks, editors, copies and merges do to them."""

import copy
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

# Values that have broken readers of JSON and YAML before.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 10**6, 10**12, 10**30, 0.0, -0.5, 1.5, 1e-30, 1e300,
    float("nan"), float("inf"), float("-inf"), "", "0", "1", "1e-3", "nan", "default", "none", "auto", "bf16", "../x",
    "\x00", "\ud800", "a" * 500, [], [1], ["a"], [None], [[1]], {}, {"a": 1}, {"rope_type": "yarn"}, [2, "b"],
)  # fmt: skip


def change_bytes(data: bytes, rng: np.random.Generator, start: int = 0, end: int | None = None) -> bytes:
    """One to four bytes of `data[start:end]` flipped in one bit, or set to any value."""
    changed = bytearray(data)
    for at in rng.integers(start, max(start + 1, len(data) if end is None else end), rng.integers(1, 5)):
        if at < len(changed):
            changed[at] = changed[at] ^ (1 << rng.integers(8)) if rng.random() < 0.5 else rng.integers(256)
    return bytes(changed)


def change_length(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut short, cut at the front, a piece lost, doubled or zeroed, or something appended."""
    at, to = sorted(int(x) for x in rng.integers(0, len(data) + 1, 2))
    return [
        data[:at], data[:-1], data[to:], b"", data[:at] + data[to:], data[:to] + data[at:],
        data[:at] + bytes(to - at) + data[to:], data + rng.bytes(int(rng.integers(1, 9))),
    ][rng.integers(8)]  # fmt: skip


def change_text(data: bytes, rng: np.random.Generator) -> bytes:
    """A text with a line lost, doubled, moved or joined with the next, or with other bytes or another length."""
    lines, kind = data.splitlines(keepends=True), rng.integers(6)
    at, to = (int(x) for x in rng.integers(0, max(1, len(lines)), 2))
    if kind == 4 or not lines:
        return change_bytes(data, rng)
    if kind == 5:
        return change_length(data, rng)
    line = lines.pop(at)
    if kind == 1:
        lines[at:at] = [line, line]
    elif kind == 2:
        lines.insert(to, line)
    elif kind == 3:
        lines.insert(at, line.rstrip(b"\r\n"))
    return b"".join(lines)


def change_value(value: Any, rng: np.random.Generator) -> Any:
    """A copy of a JSON value in which one leaf or one key is another, is gone or is doubled."""
    value = copy.deepcopy(value)
    spots = [(owner, key) for owner in _containers(value) for key in _keys(owner)]
    if not spots:
        return VALUES[rng.integers(len(VALUES))]
    owner, key = spots[rng.integers(len(spots))]
    kind = rng.random()
    if kind < 0.55:
        owner[key] = VALUES[rng.integers(len(VALUES))]
    elif kind < 0.7:
        del owner[key]
    elif kind < 0.8 and isinstance(owner, dict):
        owner[misspelt(str(key), rng)] = owner.pop(key)
    else:  # the value of another spot, often of the right type
        other, its = spots[rng.integers(len(spots))]
        owner[key] = copy.deepcopy(other[its])
    return value


def misspelt(word: str, rng: np.random.Generator) -> str:
    """The word with one letter lost, doubled or in upper case."""
    at = int(rng.integers(max(1, len(word))))
    return [word[:at] + word[at + 1 :], word[: at + 1] + word[at:], word[:at] + word[at:].upper()][rng.integers(3)]


def _containers(value: Any) -> list[dict | list]:
    if not isinstance(value, dict | list):
        return []
    return [value, *(inner for key in _keys(value) for inner in _containers(value[key]))]


def _keys(owner: dict | list) -> list:
    return list(owner) if isinstance(owner, dict) else list(range(len(owner)))


def change_file(path: Path, rng: np.random.Generator) -> str:
    """Damage a file in a way that suits its kind; returns what was done."""
    data, kind = path.read_bytes(), rng.random()
    if path.suffix == ".safetensors" and kind < 0.75:
        body = 8 + struct.unpack("<Q", data[:8])[0]
        if kind < 0.2:
            path.write_bytes(change_bytes(data, rng, 0, body))
            return "header bytes"
        if kind < 0.4:
            path.write_bytes(change_bytes(data, rng, body))
            return "data bytes"
        header = json.dumps(change_value(json.loads(data[8:body]), rng)).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[body:])
        return "header value"
    if path.suffix == ".json" and kind < 0.6:
        path.write_text(json.dumps(change_value(json.loads(data), rng)))
        return "value"
    if kind < 0.8:
        path.write_bytes(change_bytes(data, rng))
        return "bytes"
    path.write_bytes(change_length(data, rng))
    return "length"


def change_directory(folder: Path, rng: np.random.Generator) -> str:
    """Damage one file of a directory, take it away, move it, exchange it with another, or put a directory in its
    place; returns what was done.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other = files[rng.integers(len(files))], files[rng.integers(len(files))]
    kind = rng.random()
    name = str(path.relative_to(folder))
    if kind < 0.76:
        return f"{name}: {change_file(path, rng)}"
    if kind < 0.84:
        path.unlink()
        return f"{name}: gone"
    if kind < 0.9:
        path.rename(path.with_name(misspelt(path.name, rng) or "x"))
        return f"{name}: renamed"
    if kind < 0.96:
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return f"{name}: exchanged with {other.relative_to(folder)}"
    path.unlink()
    path.mkdir()
    return f"{name}: a directory"
