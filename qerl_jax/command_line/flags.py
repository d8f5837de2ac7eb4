"""The flags of a command line, from a dataclass of fields."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

from qerl_jax.config import Config, ConfigError, descriptions
from qerl_jax.untrusted import shown

T = TypeVar("T")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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


def parse(
    kind: type[T], argv: Sequence[str], prog: str, description: str, default: T | None = None, also: Sequence[str] = ()
) -> T:
    """An instance of the dataclass `kind` from flags; fields without a default are positional. `also` names flags that
    the caller takes itself, for suggestions. `--help` ends the program.

    Raises ConfigError for a flag that is unknown or given twice, and for what the parser refuses.
    """
    import tyro

    refuse_doubles(argv)
    options = {} if default is None else {"default": default}
    positional = (tyro.conf.PositionalRequiredArgs,)
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            parsed, unknown = tyro.cli(
                _with_names(kind),
                args=argv,
                prog=prog,
                description=description,
                config=positional,
                return_unknown_args=True,
                **options,
            )
        except SystemExit as stop:
            if stop.code == 0:  # help
                raise
            raise ConfigError(_message(box.getvalue())) from None
    _refuse_unknown(unknown, [*_flags(kind), *also, "--help"])
    return parsed


def _with_names(kind: type[T]) -> type[T]:
    """The dataclass with the names of its positional arguments in help and errors, in place of their types."""
    import tyro

    hints = typing.get_type_hints(kind, include_extras=True)
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    named = [(name, Annotated[hints[name], tyro.conf.arg(metavar=name.upper())]) for name in required]
    return dataclasses.make_dataclass(kind.__name__, named, bases=(kind,), frozen=True)


def _message(box: str) -> str:
    """The message in a box that the parser draws around it: what stands between the title and the next rule."""
    lines = [_COLOUR.sub("", line).strip("│ ") for line in box.splitlines()]
    for is_rule, group in itertools.groupby(lines[1:], lambda line: not line.strip("─-╰╯")):
        if not is_rule:
            return " ".join(group).removeprefix("Error parsing ")
    return " ".join(lines)


def _flags(kind: type) -> list[str]:
    """The flags of a dataclass."""
    fields = [field for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING]
    names = [field.name.replace("_", "-") for field in fields]
    opposites = [name for name, field in zip(names, fields, strict=True) if isinstance(field.default, bool)]
    return [*(f"--{name}" for name in names), *(f"--no-{name}" for name in opposites)]


def _refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for arguments that the parser has no use for, which names the nearest known flags."""
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    said = []
    for flag in flags:
        close = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
        said.append(f"unknown flag {shown(flag)[1:-1]}" + (f" (did you mean {close[0]}?)" if close else ""))
    if said:
        raise ConfigError("; ".join(said))
    if arguments:
        raise ConfigError(f"unexpected argument {shown(arguments[0])}")


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
