"""A table of differences: for each quantity the largest one, its bound, and departures on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
    """A quantity.

    Attributes:
      name: the quantity.
      cases: numbers compared.
      difference, bound: at the case where their ratio is largest.
      departures: cases beyond the bound that are meant to be.
      reason: why.
    """

    name: str
    cases: int
    difference: float
    bound: float
    departures: int = 0
    reason: str = ""

    @property
    def is_within(self) -> bool:
        """False also for what is no number."""
        return self.difference <= self.bound


def compared(name: str, ours: Any, theirs: Any, bound: Any, meant: Any = False, reason: str = "") -> Row:
    """A row of two arrays of one shape.

    Args:
      name: the quantity.
      ours, theirs: the values; NaN in both is no difference.
      bound: largest absolute difference admitted, a number or one for each value.
      meant: True where a difference is a departure on purpose.
      reason: why.
    """
    ours, theirs = np.asarray(ours, np.float64).ravel(), np.asarray(theirs, np.float64).ravel()
    if ours.shape != theirs.shape:
        raise ValueError(f"{name}: {ours.size} values here, {theirs.size} of the release")
    bound, meant = (np.broadcast_to(np.asarray(x).ravel(), ours.shape) for x in (bound, meant))
    difference = np.where(np.isnan(ours) & np.isnan(theirs), 0, np.abs(ours - theirs))
    departs = meant & ~(difference <= bound)
    rest = np.where(departs, 0, np.where(np.isnan(difference), np.inf, difference))
    if not rest.size:
        return Row(name, 0, 0.0, 0.0)
    worst = int(np.argmax(rest / np.maximum(bound, np.finfo(np.float64).tiny)))
    return Row(name, rest.size, float(rest[worst]), float(bound[worst]), int(departs.sum()), reason)


def show(title: str, rows: Sequence[Row], console: Console) -> int:
    """Print the table; the exit code."""
    table = Table(title=title, title_justify="left")
    for column in ("quantity", "numbers", "largest difference", "bound", "departures on purpose"):
        table.add_column(column, justify="left" if column.startswith(("quantity", "departures")) else "right")
    for row in rows:
        departures = f"{row.departures}: {row.reason}" if row.departures else ""
        mark = "" if row.is_within else " !"
        table.add_row(row.name, str(row.cases), f"{row.difference:.3g}{mark}", f"{row.bound:.3g}", departures)
    console.print(table)
    beyond = [row.name for row in rows if not row.is_within]
    console.print(f"{beyond[0]} is beyond its bound" if beyond else "all within the bounds", markup=False)
    return 1 if beyond else 0
