"""Values of fields: text, lists and numbers as the types that the fields declare."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

from qerl_jax.untrusted import is_unicode, shown

LARGEST_INT = 2**31 - 1  # counts and seeds are int32 on the device


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
            raise ConfigError(f"{name} {shown(value)} is not one of {list(arguments)}")
        return value
    if origin is tuple:
        if isinstance(value, str) and arguments[0] not in (int, float):
            value = (value,)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} must be a list, got {shown(value)}")
        return tuple(coerce(name, item, arguments[0]) for item in value)
    if hint in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{name} must be a number, got {shown(value)}") from error
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be finite, got {shown(value)}")
        if hint is float:
            return number
        if number == int(number):
            if abs(number) > LARGEST_INT:
                raise ConfigError(f"{name} must be at most {LARGEST_INT}, got {shown(value)}")
            return int(number)
    if hint is str and isinstance(value, str) and not is_unicode(value):
        raise ConfigError(f"{name} must be valid UTF-8, got {shown(value)}")
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise ConfigError(f"{name} must be of type {hint.__name__}, got {shown(value)}")
