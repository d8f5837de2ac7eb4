"""Records of a run: metrics.jsonl and completions/, one entry per step and cut back on resume, and evaluation.json."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.atomic import naming, write_json, write_text
from qerl_jax.checkpoint.run_files import COMPLETIONS_DIR, EVALUATION_FILE, METRICS_FILE
from qerl_jax.checkpoint.safetensors import CheckpointError, read_json
from qerl_jax.evaluation import Evaluation


class MetricsFile:
    """metrics.jsonl of a run while it is written.

    Attributes:
      rows: those of the file, oldest first.
    """

    def __init__(self, directory: Path):
        """Raises CheckpointError as `read_metrics` does."""
        self.rows, self._path = read_metrics(directory), directory / METRICS_FILE
        self._size = _size(self._path)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line, which is on the disk then; a value that is not finite is null, because JSON has no NaN."""
        self.rows.append({"step": step, **{name: v if math.isfinite(v) else None for name, v in metrics.items()}})
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
            file.flush()
            os.fsync(file.fileno())
            self._size = os.fstat(file.fileno()).st_size

    def mend(self) -> bool:
        """Write all rows again where another program removed or cut the file; returns whether one did."""
        if _size(self._path) == self._size:
            return False
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._size = _size(self._path)
        return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All rows; a last line cut short by a kill is left out. Raises CheckpointError for any other damaged line."""
    path = directory / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")  # after the last newline comes nothing, or a line cut short
    return [_row(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int or type(row.get("num_tokens")) is not int:
        raise CheckpointError(
            f"{path}, line {number} is not a step's metrics: {line[:80]!r}; mend or delete the line to resume"
        )
    return row


def write_completions(directory: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
    """One parquet file a step, `completions/step_000012.parquet`."""
    import pyarrow
    import pyarrow.parquet

    folder = directory / COMPLETIONS_DIR
    path = folder / f"step_{step:06d}.parquet"
    temporary = path.with_suffix(".tmp")
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    with naming(path):
        folder.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, temporary)
        os.replace(temporary, path)


def cut_back(directory: Path, step: int) -> int:
    """Drop all records after `step`, because a resumed run writes them again. Returns `num_tokens` of the last line.
    Raises CheckpointError if a step up to it is missing, doubled or out of order.
    """
    rows = [row for row in read_metrics(directory) if row["step"] <= step]
    for number in range(1, max(step, len(rows)) + 1):
        found = rows[number - 1]["step"] if number <= len(rows) else None
        if found != number:
            there = "ends" if found is None else f"has step {found}"
            raise CheckpointError(
                f"{directory / METRICS_FILE} {there} where step {number} must stand, but the checkpoint is that of "
                f"step {step}: put the file back, or delete the checkpoints after step {number - 1}"
            )
    write_text(directory / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    for file in (directory / COMPLETIONS_DIR).glob("step_*"):
        ours = re.fullmatch(r"step_(\d+)\.(parquet|tmp)", file.name)
        if ours and (ours[2] == "tmp" or int(ours[1]) > step):
            file.unlink()
    return int(rows[-1]["num_tokens"]) if rows else 0


def read_evaluations(directory: Path) -> dict[str, Evaluation]:
    """Evaluation results of a run by name ("before", "after"), from evaluation.json. Raises CheckpointError for a file
    that holds something else.
    """
    path, found = directory / EVALUATION_FILE, {}
    try:
        for name, fields in (read_json(path) if path.exists() else {}).items():
            found[name] = Evaluation.from_json(fields)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {name!r} is not the result of an evaluation ({error}); delete the file to evaluate anew"
        ) from error
    return found


def write_evaluations(directory: Path, results: Mapping[str, Evaluation]) -> None:
    """The inverse of `read_evaluations`."""
    write_json(directory / EVALUATION_FILE, {name: dataclasses.asdict(value) for name, value in results.items()})
