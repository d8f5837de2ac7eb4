"""The flags of a command line, from a dataclass of fields, whose help is tyro's."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from qerl_jax.config.fields import Config, descriptions
from qerl_jax.config.foreign import without_foreign
from qerl_jax.config.values import ConfigError, coerce
from qerl_jax.messages import shown

T = TypeVar("T")


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


def parse(
    kind: type[T],
    argv: Sequence[str],
    prog: str,
    description: str,
    default: T | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """An instance of the dataclass `kind` from flags, over `default`; fields without a default are positional. Values
    are read as those of a YAML file are, and `--train-norms True` as a flag. `--help` ends the program.

    `renamed`: field by flag, where that is no name in Python.

    Raises ConfigError for a flag that is unknown, given twice or without its value, and for what `kind` refuses.
    """
    if {"-h", "--help"} & set(argv):
        _help(kind, prog, description, default)
    hints, found = typing.get_type_hints(kind), given(argv)
    needed = [f.name for f in dataclasses.fields(kind) if default is None and f.default is dataclasses.MISSING]
    words, values, unknown = found.pop(""), {}, []
    for flag, own in (_ours(found, hints) if issubclass(kind, Config) else found).items():
        name = flag[2:].replace("-", "_")
        name, negated = renamed.get(name, name), name.removeprefix("no_")
        hint = hints.get(name)
        if hint is None and hints.get(negated) is bool:
            values[negated], rest = False, own
        elif hint is None or name in needed:
            unknown.append(flag)
            continue
        elif hint is bool:
            is_said = bool(own) and own[0].lower() in ("true", "false")
            values[name], rest = not is_said or own[0].lower() == "true", own[is_said:]
        elif not own:
            raise ConfigError(f"{flag} needs a value")
        else:
            is_list = tuple in (typing.get_origin(hint), *map(typing.get_origin, typing.get_args(hint)))
            value, rest = (own, []) if is_list and own != ["None"] else (own[0], own[1:])
            values[name] = coerce(name, value, hint)
        words += rest
    _refuse(unknown, words[len(needed) :], _flags(kind, renamed))
    if missing := needed[len(words) :]:
        raise ConfigError(f"{missing[0].upper()} is missing: {' '.join([prog, *map(str.upper, needed)])}")
    values |= {name: coerce(name, word, hints[name]) for name, word in zip(needed, words, strict=True)}
    return kind(**({} if default is None else vars(default)) | values)


def _help(kind: type, prog: str, description: str, default: Any) -> None:
    """Print tyro's help and end the program. Positional arguments have their names there, not their types."""
    import tyro

    hints = typing.get_type_hints(kind, include_extras=True)
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    named = [(name, Annotated[hints[name], tyro.conf.arg(metavar=name.upper())]) for name in required]
    kind = dataclasses.make_dataclass(kind.__name__, named, bases=(kind,), frozen=True) if named else kind
    options = {} if default is None else {"default": default}
    config = (tyro.conf.PositionalRequiredArgs,)
    try:
        try:
            tyro.cli(kind, args=["--help"], prog=prog, description=description, config=config, **options)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # a reader that has seen enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit()


def _ours(found: Mapping[str, list[str]], hints: Mapping[str, Any]) -> dict[str, list[str]]:
    """The flags without those of other programs. Raises ConfigError for one that asks for something."""
    names = {flag: flag[2:].replace("-", "_") for flag in found}
    theirs = {name: " ".join(found[flag]) or "true" for flag, name in names.items() if name not in hints}
    kept = without_foreign(theirs, "--", "-").keys() | hints.keys()
    return {flag: own for flag, own in found.items() if names[flag] in kept}


def _flags(kind: type, renamed: Mapping[str, str]) -> list[str]:
    """The flags of a dataclass."""
    fields = [field for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING]
    flag_of = {name: flag for flag, name in renamed.items()}
    names = [flag_of.get(field.name, field.name).replace("_", "-") for field in fields]
    opposites = [name for name, field in zip(names, fields, strict=True) if isinstance(field.default, bool)]
    return ["--help", *(f"--{name}" for name in names), *(f"--no-{name}" for name in opposites)]


def _refuse(unknown: Sequence[str], words: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for unknown flags, with the nearest known ones, and for words that are no flag's."""
    said = []
    for flag in unknown:
        close = difflib.get_close_matches(flag[2:], [name[2:] for name in known], n=1)
        said.append(f"unknown flag {shown(flag)[1:-1]}" + (f" (did you mean --{close[0]}?)" if close else ""))
    if not said and words:
        hint = ": its arguments are flags, such as --model" if "--model" in known else ""
        said = [f"unexpected argument {shown(words[0])}{hint}"]
    if said:
        raise ConfigError("; ".join(said))
