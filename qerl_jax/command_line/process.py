"""The process of a command line: one line for whatever ends it, and an exit code.

Python's own end is not enough. A write to a full or closed standard output fails once more, with a trace, while the
interpreter shuts down. Ctrl-C is seen only when a call into a compiler or a kernel returns, which may take minutes, and
threads that are still in one when the interpreter shuts down crash the process.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from qerl_jax.io.files import one_line

FAILED, STOPPED = 2, 130
_LONGEST = 2000  # characters of a message; a path can have more
PATIENCE = 2.0
"""Seconds after Ctrl-C in which the main thread may come back from a call before the process ends without it."""


def run(body: Callable[[], int], interrupted: Callable[[], str] = lambda: "interrupted") -> int:
    """Exit code of a command line.

    Args:
      body: all of it but the parsing of flags; returns an exit code.
      interrupted: what to say after Ctrl-C.

    A ValueError, OSError or lack of memory ends in one line on standard error and `FAILED`, Ctrl-C in `STOPPED`. What
    the terminal's encoding lacks is escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _ending_at_interrupts(interrupted):
            code = body()
        sys.stdout.flush()
    except KeyboardInterrupt:
        say(interrupted())
        code = STOPPED
    except (ValueError, OSError, MemoryError) as error:
        say(f"error: {_unwritable_output() or _text(error)}")
        code = FAILED
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(f"error: out of memory: {one_line(error)}")
        code = FAILED
    if trouble := _unwritable_output():  # only now: it was interrupted, or said what went wrong
        say(f"error: {trouble}")
        code = FAILED
    return code


def end(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end the process with its exit code: at once unless it is 0, because other threads may be inside a
    compiler. A run of Weights & Biases that failed is first reported by its own hook.
    """
    code = main()
    is_reported = code == FAILED and getattr(sys.modules.get("wandb"), "run", None) is not None
    if code == 0 or is_reported:
        sys.exit(code)
    sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """Lines on standard error, where it can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _text(error: Exception) -> str:
    """An error in one line; Python's own MemoryError says nothing."""
    text = " ".join(str(error).splitlines())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return text or ("out of memory" if isinstance(error, MemoryError) else repr(error))


def _unwritable_output() -> str:
    """Why standard output cannot take what was printed, "" if it can; it is then the null device."""
    try:
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        return f"standard output cannot be written: {error.strerror}"
    return ""


def silence(stream: io.TextIOBase) -> None:
    """Send what a stream still holds, and all that follows, to the null device."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


@contextlib.contextmanager
def _ending_at_interrupts(interrupted: Callable[[], str]) -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt or, where the main thread does not come back from a call for
    `PATIENCE` seconds, ends the process. Another handler, such as that of a run's steps, takes precedence.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen = threading.Event()

    def interrupt(*_: object) -> NoReturn:
        seen.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while number := os.read(reader, 1):
            ours = number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is interrupt
            if ours and not seen.wait(PATIENCE):
                say(interrupted())
                os._exit(STOPPED)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to when the signal comes, not later
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(before)
        seen.set()
        os.close(writer)
        watcher.join()
        os.close(reader)
