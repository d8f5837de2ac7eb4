"""Console output: a live progress bar in a terminal, plain lines elsewhere, and the closing table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from qerl_jax.reporting.console import say

_WIDE = 110  # columns of a terminal that has room for a bar beside the numbers
_PLAIN_LINES = 20  # lines of a whole run where there is no terminal


class TrainingProgress:
    """Progress of a run: step, reward, entropy, σ, completion length, tokens/s, time left."""

    def __init__(self, start: int, total: int, console: Console):
        self._console, self._start, self._total = console, start, total
        self._live = console.is_terminal
        wide = [BarColumn(bar_width=20)] if console.width >= _WIDE else []
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            *wide,
            TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True)),  # alone gives way
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("train", total=total, completed=start, text="compiling …")

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, value, trace)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; `step` counts from 1. One that trained nothing has no entropy."""
        entropy = "nothing trained" if math.isnan(metrics["entropy"]) else f"entropy {metrics['entropy']:.3f}"
        text = (
            f"reward {metrics['reward']:.3f}  {entropy}  σ {metrics['aqn/sigma']:.1e}  "
            f"length {metrics['completions/mean_length']:.0f}  {metrics['tokens_per_second']:.0f} tok/s"
        )
        self._bar.update(self._task, completed=step, text=text)
        if not self._live and (step == self._total or (step - self._start) % max(1, self._total // _PLAIN_LINES) == 0):
            say(self._console, f"step {step}/{self._total}  {text}  {metrics['step_time']:.2f} s/step")


def tensor_bar() -> Progress:
    """The bar of tensors that are written; in a log it is silent."""
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, disable=not Console().is_terminal)


def summary_table(
    console: Console, results: list[tuple[str, str]], directory: str, files: list[tuple[str, str]]
) -> None:
    """Print results, then the files in the run's directory."""
    say(console, f"the finished run is in {directory}")
    table = Table(show_header=False)
    for name, value in results:
        table.add_row(name, value)
    table.add_section()
    for name, path in files:
        table.add_row(name, path)
    console.print(table, soft_wrap=False)
