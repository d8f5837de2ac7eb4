"""The flags of a command line, from a dataclass of fields."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from qerl_jax.config import Config, ConfigError, descriptions

T = TypeVar("T")


def fields_of_config(flags: Mapping[str, str], bases: tuple[type, ...] = ()) -> type:
    """A dataclass whose fields have the names of `flags` and the type, default and description of those of Config that
    they name. It checks nothing: Config does, in words of its own, where the parser of flags would draw a box.
    """
    import tyro

    hints, texts = typing.get_type_hints(Config), descriptions()
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    fields = [
        (flag, Annotated[hints[name], tyro.conf.arg(help=texts[name])], dataclasses.field(default=defaults[name]))
        for flag, name in flags.items()
    ]
    return dataclasses.make_dataclass("Arguments", fields, bases=bases, frozen=True)


def parse(kind: type[T], argv: Sequence[str], prog: str, description: str, default: Any = None) -> T:
    """An instance of the dataclass `kind` from flags; fields without a default are positional. Raises ConfigError for a
    flag that is given twice; what the parser refuses ends the program with exit code 2.
    """
    import tyro

    refuse_doubles(argv)
    options = {} if default is None else {"default": default}
    positional = (tyro.conf.PositionalRequiredArgs,)
    return tyro.cli(kind, args=argv, prog=prog, description=description, config=positional, **options)


def refuse_doubles(argv: Iterable[str]) -> None:
    """Raise ConfigError for a flag that is given twice: the parser silently takes the last."""
    seen: dict[str, str] = {}
    for argument in argv:
        if not argument.startswith("--"):
            continue
        flag = argument.partition("=")[0].replace("_", "-")
        name = flag[2:].removeprefix("no-")
        if name in seen:
            again = "is given twice" if flag == seen[name] else f"contradicts {seen[name]}"
            raise ConfigError(f"{flag} {again}")
        seen[name] = flag
