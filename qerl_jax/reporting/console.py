"""The console of a run, which survives its reader."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO

from rich.console import Console


class RunConsole(Console):
    """A console, by default on standard output, that falls silent when that cannot be written: where its reader goes
    away (`| head`) rich's would end the program, and where the disk is full raise an error. It breaks no line of text:
    a log's paths and commands stay whole.

    Args:
      file: None: standard output.
      quiet: say nothing.

    Attributes:
      is_closed: whether it fell silent; a run then stops as after a SIGTERM.
    """

    is_closed = False

    def __init__(self, file: IO[str] | None = None, quiet: bool = False) -> None:
        super().__init__(file=file or _Output(), highlight=False, quiet=quiet, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Say no more, and let nothing else fail at the closed pipe."""
        self.is_closed = self.quiet = True
        if isinstance(self.file, _Output):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, _stdout().fileno())
            os.close(null)


def _stdout() -> io.TextIOBase:
    """`sys.stdout`, or what stands behind it while a progress bar has replaced it by what prints on the console."""
    return getattr(sys.stdout, "rich_proxied_file", sys.stdout)


class _Output(io.TextIOBase):
    """Standard output. All of its errors are a closed pipe to rich; any but a closed pipe is told on standard error."""

    def write(self, text: str) -> int:
        with self._told():
            return _stdout().write(text)

    def flush(self) -> None:
        with self._told():
            _stdout().flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"standard output cannot be written: {error.strerror}; the run stops", file=sys.stderr, flush=True)
            raise BrokenPipeError from error

    def isatty(self) -> bool:
        return _stdout().isatty()

    def fileno(self) -> int:
        return _stdout().fileno()

    @property
    def encoding(self) -> str:
        return _stdout().encoding
