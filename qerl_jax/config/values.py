"""Values of fields: text, lists and numbers as the types that the fields declare."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

_LARGEST_INT = 2**31 - 1  # counts and seeds are int32 on the device


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field, and both values where two contradict."""


def coerce(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type: lists become tuples, one text a tuple of one, and numbers written as text ("1e-5" is
    text in YAML 1.1) numbers.

    Raises ConfigError where that loses something.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = [a for a in arguments if a is not type(None)]
        return coerce(name, value, inner)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{name} {value!r} is not one of {list(arguments)}")
        return value
    if origin is tuple:
        if isinstance(value, str) and arguments[0] not in (int, float):
            value = (value,)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} must be a list, got {value!r}")
        return tuple(coerce(name, item, arguments[0]) for item in value)
    if hint in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{name} must be a number, got {value!r}") from error
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be finite, got {value!r}")
        if hint is float:
            return number
        if number == int(number):
            if abs(number) > _LARGEST_INT:
                raise ConfigError(f"{name} must be at most {_LARGEST_INT}, got {value!r}")
            return int(number)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise ConfigError(f"{name} must be of type {hint.__name__}, got {value!r}")
