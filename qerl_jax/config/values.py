"""Values of fields: texts, lists and numbers as the types that the fields declare."""

from __future__ import annotations

import math
import re
import types
import typing
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, Literal

from qerl_jax.messages import is_unicode, shown

LARGEST_INT = 2**31 - 1  # counts and seeds are int32 on the device
_LARGEST, _SMALLEST = {int: LARGEST_INT, float: 3.4e38}, 1.2e-38  # normal float32
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,9})?", re.ASCII)


_TRLS = {  # values that TRL takes besides
    "scale_rewards": {"True": "group", "False": "none"},
    "min_p": {"None": 0.0},
    "lr_scheduler_type": {"Constant_With_Warmup": "constant"},
}


_GIVEN_TO_TRAIN = {
    "reward_funcs": ": give functions to train(config, reward_funcs=…)",
    "dataset": ": give records to train(config, train_dataset=…)",
    "eval_dataset": ": give records to train(config, eval_dataset=…)",
}


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field, and both values where two contradict."""


def _number(value: Any, kind: type[int] | type[float]) -> int | float:
    """A number, or the text of one (decimal digits, a point, an exponent), as an int or a float. Raises ConfigError for
    anything else, and for what that, or int32 and float32 on the device, would make another number.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        exact = Decimal(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        exact = int(value) if isinstance(value, Integral) else float(value)  # numpy's, too
    else:
        raise ConfigError(f"must be a number, got {shown(value)}")
    if isinstance(exact, float) and not math.isfinite(exact):
        raise ConfigError(f"must be finite, got {shown(value)}")
    if abs(exact) > _LARGEST[kind]:
        raise ConfigError(f"must be at most {_LARGEST[kind]}, got {shown(value)}")
    if kind is int and exact != int(exact):
        raise ConfigError(f"must be of type int, got {shown(value)}")
    if 0 < abs(exact) < _SMALLEST:
        raise ConfigError(f"must be 0 or at least {_SMALLEST}, got {shown(value)}")
    return kind(exact)


def is_none(value: Any) -> bool:
    """None, or the text of it in Python or YAML."""
    return str(value).lower() in ("none", "null")


def coerce(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type: lists become tuples, a single value a tuple of one, texts of numbers numbers. Raises
    ConfigError where that is not possible.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    value = _TRLS.get(name, {}).get(str(value).title(), value)
    if origin in (types.UnionType, typing.Union):
        inner, _ = arguments  # X | None
        if is_none(value):
            return None
        return coerce(name, value, inner)
    if origin is tuple:
        values = value if isinstance(value, list | tuple) else (value,)
        if typing.get_origin(arguments[0]) is Literal and list(values) in ([None], ["none"]):
            values = ()  # report_to, as TRL writes it
        return tuple(coerce(name, item, arguments[0]) for item in values)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{name} {shown(value)} is not one of {list(arguments)}")
        return value
    if hint in (int, float):
        try:
            return _number(value, hint)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from error
    if not isinstance(value, hint):
        said = shown(value) if type(value).__module__ == "builtins" else f"an object of type {type(value).__name__}"
        raise ConfigError(f"{name} must be of type {hint.__name__}, got {said}{_GIVEN_TO_TRAIN.get(name, '')}")
    if hint is str and not (is_unicode(value) and "\0" not in value):
        raise ConfigError(f"{name} must be valid UTF-8 without zero bytes, got {shown(value)}")
    return value
