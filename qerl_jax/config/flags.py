"""The flags of a command line, from a dataclass of fields: tyro's, with refusals in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from qerl_jax.config.fields import Config, descriptions
from qerl_jax.config.foreign import without_foreign
from qerl_jax.config.values import ConfigError, coerce
from qerl_jax.messages import shown

T = TypeVar("T")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def fields_of_config(flags: Mapping[str, str], bases: tuple[type, ...] = ()) -> type:
    """A dataclass whose fields have the names of `flags` and the type, default and description of those of Config that
    they name.
    """
    import tyro

    hints, texts = typing.get_type_hints(Config), descriptions()
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    fields = [
        (flag, Annotated[hints[name], tyro.conf.arg(help=texts[name])], dataclasses.field(default=defaults[name]))
        for flag, name in flags.items()
    ]
    return dataclasses.make_dataclass("Arguments", fields, bases=bases, frozen=True)


def given(argv: Sequence[str]) -> dict[str, list[str]]:
    """The values behind each flag, which is spelled with `-`; under "" those before the first flag. Raises ConfigError
    for a flag that is given twice, of which parsers take the last.
    """
    found: dict[str, list[str]] = {"": []}
    for word in argv:
        if not word.startswith("--"):
            found[next(reversed(found))].append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        if flag in found or opposite in found:
            raise ConfigError(f"{flag} " + ("is given twice" if flag in found else f"contradicts {opposite}"))
        found[flag] = [value] if equals else []
    return found


def parse(kind: type[T], argv: Sequence[str], prog: str, description: str, default: T | None = None) -> T:
    """An instance of the dataclass `kind` from flags, over `default`; fields without a default are positional. `--help`
    ends the program.

    Raises ConfigError for a flag that is unknown or given twice, and for what `kind` or the parser refuses.
    """
    import tyro

    words = _as_expected(given(argv), kind)
    options = {} if default is None else {"default": default}
    positional = (tyro.conf.PositionalRequiredArgs,)
    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            parsed, unknown = tyro.cli(
                _with_names(kind),
                args=words,
                prog=prog,
                description=description,
                config=positional,
                return_unknown_args=True,
                **options,
            )
        except SystemExit as stop:
            if stop.code == 0:  # help
                raise
            cause = stop.__context__
            raise ConfigError(str(cause) if isinstance(cause, ConfigError) else _message(box.getvalue())) from None
    _refuse_unknown(unknown, _flags(kind))
    return parsed


def _as_expected(found: dict[str, list[str]], kind: type) -> list[str]:
    """The words of a command line as the parser takes them: values as a YAML file's would be read (Python makes 10 of
    1_0 and 0 of 1e-400), `--train-norms True` as a flag. Names of other programs are answered.
    """
    hints = typing.get_type_hints(kind)
    if issubclass(kind, Config):
        names = {flag[2:].replace("-", "_"): flag for flag in found if flag}
        theirs = {name: " ".join(found[flag]) for name, flag in names.items() if name not in hints}
        kept = without_foreign(theirs, "--", "-").keys() | hints.keys()
        found = {flag: values for flag, values in found.items() if not flag or flag[2:].replace("-", "_") in kept}
    words = list(found.pop(""))
    for flag, values in found.items():
        name = flag[2:].replace("-", "_")
        hint = hints.get(name)
        if hint is bool and values and values[0].lower() in ("true", "false"):
            flag, values = flag if values[0].lower() == "true" else f"--no-{flag[2:]}", values[1:]
        elif hint not in (None, bool) and values and (values != ["None"] or hint in (int, float)):
            if tuple in (typing.get_origin(hint), *map(typing.get_origin, typing.get_args(hint))):
                values = [str(value) for value in coerce(name, values, hint)]
            else:
                values = [str(coerce(name, values[0], hint)), *values[1:]]
        words += [f"{flag}={values[0]}"] if values and values[0].startswith("--") else [flag, *values]
    return words


def _with_names(kind: type[T]) -> type[T]:
    """The dataclass with the names of its positional arguments in help and errors, in place of their types."""
    import tyro

    hints = typing.get_type_hints(kind, include_extras=True)
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if not required:
        return kind
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
    return ["--help", *(f"--{name}" for name in names), *(f"--no-{name}" for name in opposites)]


def _refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for arguments that the parser has no use for, which names the nearest known flags."""
    said = []
    for flag in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        close = difflib.get_close_matches(flag[2:], [name[2:] for name in known], n=1)
        said.append(f"unknown flag {shown(flag)[1:-1]}" + (f" (did you mean --{close[0]}?)" if close else ""))
    if not said and arguments:
        hint = ": its arguments are flags, such as --model" if "--model" in known else ""
        said = [f"unexpected argument {shown(arguments[0])}{hint}"]
    if said:
        raise ConfigError("; ".join(said))
