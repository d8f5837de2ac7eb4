"""The run-time type checker of the tests: beartype, where an int will do for a float (PEP 484's numeric tower).

jaxtyping's import hook checks `qerl_jax` by it. At every call jaxtyping binds the arguments and opens a scope for the
names of axes; a function without an array in its annotations has no use for that, and is checked by beartype alone, in
a tenth of the time. A function within a function is not checked: beartype would compile its checks anew, in some 4 ms,
at each call of the outer one, whose own arguments and results are checked.

A dataclass that is a pytree is checked where the code builds it, not where jax rebuilds it: there the leaves may be
gradients (`float0`), placeholders or None. Nothing is checked where programs are recorded from shapes.
"""

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Checks every function and dataclass of `qerl_jax` that is imported from now on."""
    jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = jaxtyped  # the hook's decorator, and its recursion for classes
    jaxtyping.install_import_hook("qerl_jax", "typecheck.check")


def jaxtyped(function: Any = None, *, typechecker: Callable) -> Any:
    """jaxtyping's decorator where an annotation has axes, the type checker alone where none has."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isfunction(function):
        if "<locals>" in function.__qualname__:
            return function
        if not _may_have_axes(function):
            return typechecker(function)
    return _jaxtyped(function, typechecker=typechecker)


def _may_have_axes(function: Callable) -> bool:
    """Whether an annotation holds a type of jaxtyping, or is unreadable, as with a name that is not defined yet."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # jaxtyping's way with it, too
        return True
    return any(_has_axes(hint) for hint in hints.values())


def _has_axes(hint: Any) -> bool:
    if isinstance(hint, (list, tuple)):  # the parameters of a Callable
        return any(map(_has_axes, hint))
    return getattr(hint, "__module__", "").startswith("jaxtyping") or any(map(_has_axes, typing.get_args(hint)))


def check(function: Callable) -> Callable:
    """`function` with its annotations checked at every call."""
    if function.__qualname__ == "Config.__init__":
        return function  # it turns texts and lists into its own types, and refuses what it cannot
    is_init = function.__name__ == "__init__"
    checked = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal checked
        if _is_recording() or (is_init and _called_by_jax()):
            return function(*args, **kwargs)
        if checked is None:  # beartype takes 2 ms to compile the checks, and a process calls few of all functions
            try:
                checked = _check(function)
            except BeartypeDecorHintPep673Exception:  # `Self` means something to it within a decorated class only
                checked = function
        return checked(*args, **kwargs)

    return call


def _is_recording() -> bool:
    """Whether a function runs on shapes in place of arrays (`qerl_jax.programs.record`), outside of any program."""
    programs = sys.modules.get("qerl_jax.programs")
    caller = getattr(programs, "_caller", None)  # none yet while the module is imported
    return caller is not None and getattr(caller.get(), "__name__", None) == "note"


def _called_by_jax() -> bool:
    frame = sys._getframe(2)
    while frame is not None and ("jaxtyping" in frame.f_code.co_filename or frame.f_code.co_filename == "<string>"):
        frame = frame.f_back
    return frame is not None and "/jax/_src/" in frame.f_code.co_filename.replace("\\", "/")
