"""What a run leaves behind step by step: metrics.jsonl and completions/, both cut back to a step on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.io.files import write_text

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_DIR = "completions"


def append_metrics(directory: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add one line; a value that is not finite is written as null, because JSON has no NaN."""
    row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in metrics.items()}}
    with (directory / METRICS_FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Every whole line; a last one cut short by a kill is left out."""
    path = directory / METRICS_FILE
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_completions(directory: Path, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
    """One parquet file a step, `completions/step_000012.parquet`."""
    import pyarrow
    import pyarrow.parquet

    folder = directory / COMPLETIONS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.parquet"
    temporary = path.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), temporary)
    os.replace(temporary, path)


def cut_back(directory: Path, step: int) -> int:
    """Forget every step after `step`: a resumed run writes them again. Returns `num_tokens` of the last line that
    stays.
    """
    rows = [row for row in read_metrics(directory) if row["step"] <= step]
    write_text(directory / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    for file in (directory / COMPLETIONS_DIR).glob("step_*"):
        if file.suffix != ".parquet" or int(file.stem.split("_")[1]) > step:
            file.unlink()
    return int(rows[-1]["num_tokens"]) if rows else 0
