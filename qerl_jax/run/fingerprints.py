"""SHA-256 fingerprints of a run's inputs, kept with its checkpoints: a config's names do not show an exchanged file."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import inspect
import tokenize
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint.orbax import model_input, saved_inputs
from qerl_jax.checkpoint.safetensors import model_fingerprint
from qerl_jax.config import Config
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.messages import Given
from qerl_jax.parallel import Replicas
from qerl_jax.rewards.functions import BUILT_IN, reward_file

PROMPTS_DATE = "date in prompts"
"""Name of the input that is the date of the run's start, in ISO's form: its prompts keep it when the run is resumed."""


def fingerprints(
    config: Config, problems: Sequence[Sequence[EncodedProblem]], eval_problems: Sequence[EncodedProblem]
) -> dict[str, str]:
    """Fingerprint of each input by the name that an error gives it.

    Args:
      config: with its rewards filled in.
      problems: those of each of `config.dataset`, as loaded.
      eval_problems: those of `config.eval_dataset`.
    """
    model = assets.model_path(config.model)
    found = {model_input(config): model_fingerprint(model)}
    for name, items in zip(config.dataset, problems, strict=True):
        found[f"dataset {name}"] = problems_fingerprint(items)
    if config.eval_dataset:
        found[f"eval_dataset {config.eval_dataset}"] = problems_fingerprint(eval_problems)
    for name in config.reward_funcs or ():
        if isinstance(name, Given):
            found[f"reward {name}"] = function_fingerprint(name.value)
        elif name not in BUILT_IN:
            found[f"reward {name}"] = hashlib.sha256(reward_file(name)[0].read_bytes()).hexdigest()
    return found


def prompts_date(config: Config, replicas: Replicas) -> datetime.date:
    """The date that the chat template writes into prompts: that of the run to resume, or today on replica 0: the
    day may change while replicas start.
    """
    saved = None if config.resume == "never" else saved_inputs(Path(config.output_dir)).get(PROMPTS_DATE)
    return replicas.broadcast(datetime.date.fromisoformat(saved) if saved else datetime.date.today())


def evaluation_date(kept: Any, adapter: Path | None) -> datetime.date:
    """The date in prompts of an evaluation: the one `kept` with its records, that of its adapter's run, or today."""
    found = kept or (adapter and saved_inputs(adapter.absolute().parent).get(PROMPTS_DATE))
    try:
        return datetime.date.fromisoformat(found or "")
    except (ValueError, TypeError):  # none, or no date: records with such settings are refused
        return datetime.date.today()


def function_fingerprint(function: Any) -> str:
    """Fingerprint of a function, an optax transformation or another object that is called: its source, or its name
    where Python has none, and what it holds: numbers and texts, and functions, tuples and dataclasses of these, in
    defaults, closures and fields. Not lists, dicts and arrays, which may be a function's own record. Of nothing for
    None.
    """
    text = "" if function is None else "\n".join(_described(function, {}))
    return hashlib.sha256(text.encode()).hexdigest()


def _described(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Sources and plain values that make up a value; what was `seen`, by its id, is left out."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that nothing else gets its id
    if isinstance(value, tuple):
        held = value
    elif isinstance(value, functools.partial):
        held = (value.func, value.args, tuple(sorted(value.keywords.items())))
    elif inspect.ismethod(value):
        held = (value.__func__, value.__self__)
    elif inspect.isfunction(value):
        yield _source(value)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = (value.__defaults__, tuple(sorted((value.__kwdefaults__ or {}).items())), *map(_content, cells))
    elif inspect.isclass(value) or inspect.ismodule(value):
        yield name_of(value)
        return
    else:
        yield _source(type(value))
        held = (getattr(value, "__wrapped__", None),)
        if dataclasses.is_dataclass(value):
            held += tuple((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    for item in held:
        yield from _described(item, seen)


def _content(named: tuple[str, types.CellType]) -> tuple[str, Any]:
    try:
        return named[0], named[1].cell_contents
    except ValueError:  # not assigned yet
        return named[0], None


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # no file, or one that is not Python
        return name_of(function)


def name_of(function: Any) -> str:
    """Module and name of a function, or of an optax transformation."""
    function = getattr(function, "update", function)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def problems_fingerprint(items: Iterable[EncodedProblem]) -> str:
    """Fingerprint of ids, prompts as tokens, answers and further columns, in order."""
    digest = hashlib.sha256()
    for item in items:
        problem = item.problem
        digest.update(repr((problem.id, problem.answer, sorted(problem.extra.items()))).encode("utf-8", "replace"))
        digest.update(item.tokens.tobytes())
    return digest.hexdigest()
