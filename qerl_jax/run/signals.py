"""Graceful stop: the first SIGINT, SIGTERM or SIGHUP is a request, the second has its default effect. In an
evaluation of the run the first one interrupts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Self


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, unless they have a handler or are ignored."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL and _can_handle()]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _can_handle() -> bool:
    """Whether this is the main thread, which alone may have handlers."""
    return threading.current_thread() is threading.main_thread()


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop after the step; a second one acts as usual.
    A signal that is ignored stays so, as SIGHUP is under nohup. In another thread than the main one it does nothing.

    Args:
      answers: whether to say on standard error that the request was heard, since a step may take minutes.

    Attributes:
      requested: number of the signal, 0 before one came.
    """

    def __init__(self, answers: bool = True) -> None:
        self._answers = answers
        self.requested = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if _can_handle() and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _request(self, number: int, _: object) -> None:
        if self.requested:
            self._restore()
            signal.raise_signal(number)
            return
        self.requested = number
        if self._answers:
            said = f"\n{signal.Signals(number).name}: the run stops after this step; a second signal ends it at once\n"
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, said.encode())  # a handler may not enter the streams of the code it interrupts

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
