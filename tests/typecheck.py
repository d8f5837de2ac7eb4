"""The run-time type checker of the tests: beartype, where an int will do for a float (PEP 484's numeric tower).

A dataclass that is a pytree is checked where the code builds it, not where jax rebuilds it: there the leaves may be
gradients (`float0`), placeholders or None.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    """`function` with its annotations checked at every call."""
    try:
        checked = _check(function)
    except BeartypeDecorHintPep673Exception:  # `Self` means something to beartype within a decorated class only
        return function
    if (
        function.__qualname__ == "Config.__init__"
    ):  # turns text and lists into its own types, and refuses what it cannot
        return function
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(function)
    def init(*args, **kwargs):
        return (function if _called_by_jax() else checked)(*args, **kwargs)

    return init


def _called_by_jax() -> bool:
    frame = sys._getframe(2)
    while frame is not None and ("jaxtyping" in frame.f_code.co_filename or frame.f_code.co_filename == "<string>"):
        frame = frame.f_back
    return frame is not None and "/jax/_src/" in frame.f_code.co_filename.replace("\\", "/")
