"""The console of a run, which survives its reader."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class RunConsole(Console):
    """A console that falls silent when its reader goes away (`| head`), where rich's would end the program.

    Attributes:
      is_closed: whether that happened; a run then stops as after a SIGTERM.
    """

    is_closed = False

    def on_broken_pipe(self) -> None:
        """Say no more, and let nothing else fail at the closed pipe."""
        self.is_closed = self.quiet = True
        if self.file is sys.stdout:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
