"""Reading what may be wrong on purpose: values in messages, strict JSON, files that are none, code without an end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def shown(value: Any) -> str:
    """A value in a message: its repr, the middle of a long one left out."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= 100 else f"{text[:60]}…{text[-20:]} ({len(text)} characters)"


def is_unicode(text: str) -> bool:
    """Whether a text can be written to a file: a byte of a command line that is not UTF-8 becomes half of a surrogate
    pair, and so may an escape in JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(text: str | bytes) -> Any:
    """A JSON value. Raises ValueError for what is no JSON, and for a key that an object has twice, of which Python
    takes the last; RecursionError for what is nested too deep.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} is given twice")
    return found


def require_regular(path: Path) -> None:
    """Raise OSError for a pipe, a socket or a device, which may hold a reader for ever. Anything else, also nothing, is
    left to whoever opens it.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
        if kind is not None:
            raise OSError(f"{path} is {kind}, not a regular file")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block of Python code that takes longer, in any thread. A call into a library is first
    waited for.
    """
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    thread = ctypes.c_ulong(threading.get_ident())
    timer = threading.Timer(seconds, lambda: set_exception(thread, ctypes.py_object(TimeoutError)))
    timer.daemon = True
    timer.start()
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"no end after {seconds:g} s") from None
    finally:
        timer.cancel()
        timer.join()
        set_exception(thread, None)  # one that came too late
