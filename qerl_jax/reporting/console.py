"""The console of a run, which survives its reader, and how texts are printed."""

from __future__ import annotations

import os
from typing import IO

from rich.console import Console


class RunConsole(Console):
    """A console, by default on standard output, that falls silent where its reader goes away (`| head`), at which
    rich's would end the program. It breaks no line of text: a log's paths and commands stay whole.

    Args:
      file: None: standard output.
      quiet: say nothing.

    Attributes:
      is_closed: whether it fell silent; a run then stops as after a SIGTERM.
    """

    is_closed = False

    def __init__(self, file: IO[str] | None = None, quiet: bool = False) -> None:
        super().__init__(file=file, highlight=False, quiet=quiet, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Say no more, and let nothing else fail at the closed pipe."""
        self.is_closed = self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)


def say(console: Console, text: str) -> None:
    """Print a text as it is: a path may hold brackets, which rich would take for a style, and is not broken."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
