"""The end of a command line's process: one line for an error in the input or the system, and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from qerl_jax.lowered import as_in_sources
from qerl_jax.messages import one_line

FAILED, STOPPED = 2, 130
_code: list[int] = []  # of this process, once it is known


@atexit.register
def _end_without_jax() -> None:
    """What Python does last at the end of a command, but for what was registered before this module was imported: JAX
    gives a GPU's memory back piece by piece, which takes seconds, and the system does it at once. Loggers and files,
    which a user's function may hold open, are flushed, as Python does.
    """
    if _code:
        logging.shutdown()
        objects = gc.get_objects()
        # Not by `isinstance` of each, which asks proxies for what they stand for, and takes seconds for millions.
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
        for file in (each for each in objects if type(each) in kinds):
            with contextlib.suppress(Exception):
                file.flush()
        os._exit(_code[0])


def run(body: Callable[[], int], interrupted: Callable[[], str] = lambda: "interrupted") -> int:
    """Exit code of a command line.

    Args:
      body: all of it but the parsing of flags; returns an exit code.
      interrupted: what to say after Ctrl-C, where the KeyboardInterrupt itself says nothing.

    A ValueError, OSError (a closed pipe or a full disk behind standard output among them) or lack of memory ends in one
    line on standard error and `FAILED`, Ctrl-C in `STOPPED`. What the terminal's encoding lacks is escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = body()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        print(str(error) or interrupted(), file=sys.stderr)
        return STOPPED
    except (ValueError, OSError) as error:
        said = " ".join(str(error).splitlines()) or repr(error)
    except MemoryError as error:
        said = " ".join(str(error).splitlines()) or "out of memory"
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = f"out of memory: {one_line(error)}"
    print(f"error: {said}", file=sys.stderr)
    return FAILED


def open_standard_streams() -> None:
    """Open /dev/null in the place of standard streams that are closed (`>&-`). The next files to be opened would else
    have their numbers, and get what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode))


def _interrupt_again(unraisable: Any) -> None:
    """As `sys.__unraisablehook__`, but Ctrl-C comes once more where it met a callback that nothing is raised from, as
    that of JAX at every garbage collection.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    # To this thread, because a call that it waits in is to end, but once it has left this hook, which raises nothing.
    again = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()


def end(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end the process with its exit code: at once unless it is 0, because other threads may be inside a
    compiler, which crashes an interpreter that shuts down, and a standard output that failed would fail once more. A
    run of Weights & Biases that failed is first reported by its own hook. Where it is 0, all hooks are called but
    JAX's.
    """
    open_standard_streams()
    sys.unraisablehook = _interrupt_again
    with as_in_sources():
        code = main()
    is_reported = code == FAILED and getattr(sys.modules.get("wandb"), "run", None) is not None
    if code == 0 or is_reported:
        _code.append(code)
        sys.exit(code)
    sys.stderr.flush()
    os._exit(code)
