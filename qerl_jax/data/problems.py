"""Datasets to problems: a prompt, its gold answer, and an id from which its sampling keys derive."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qerl_jax.data.files import FILE_KINDS, DataError, Source, open_file, open_rows, split_files
from qerl_jax.data.presets import (
    NUMBER_REWARDS,
    PRESETS,
    PROMPT_FORMATS,
    Preset,
    Unusable,
    gold_answer,
)
from qerl_jax.messages import IN_MEMORY, Given, below, did_you_mean, is_unicode
from qerl_jax.rewards.outcomes import GIVEN_COLUMNS, STORED_ANSWER

MAX_CHARACTERS = 1_000_000
"""Longest text of a prompt's message or an answer: some 250,000 tokens, encoded in a second."""
BUNDLED = "arithmetic"
"""The dataset of the package: 4,000 word problems to train on, and 1,000 whose numbers (every other one) or sequences
of clauses (the others) training never has; generated, by a program that git has up to f82698f.
"""
_BUNDLED_FILES = Path(__file__).resolve().parent.parent / "assets" / BUNDLED
ROLES = ("system", "user", "assistant")
_TAKEN = frozenset({"prompts", "completions", STORED_ANSWER, *GIVEN_COLUMNS})  # arguments of every reward


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      id: its place in the dataset, unique over all sets of a run; sampling keys depend on it.
      prompt: the user's message (of several, the last).
      answer: the gold answer as text; "" where only `extra` tells right from wrong.
      messages: the whole conversation as (role, content), where the dataset has one; None: `prompt` is all of it.
      extra: further columns for the rewards.
    """

    id: int
    prompt: str
    answer: str
    messages: tuple[tuple[str, str], ...] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def as_rewards_see_it(self) -> str | list[dict[str, str]]:
        """The prompt as TRL passes it to rewards: a text, or a list of {role, content} where the dataset has that."""
        if self.messages is None:
            return self.prompt
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Problems in the order of their source.

    Attributes:
      name: as requested.
      problems: the usable ones.
      system_prompt: goes with every prompt that is no conversation; "" for none.
      size: records read, usable or not; ids lie in [first_id, first_id + size).
      notes: one sentence for each reason for which records were skipped.
      unread: columns that the problems lack, where no limit ended the reading.
    """

    name: str
    problems: list[Problem]
    system_prompt: str
    size: int
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def load_dataset(
    name: str,
    split: str,
    prompt_column: str = "question",
    answer_column: str = "answer",
    *,
    reward_columns: Sequence[str] = (),
    system_prompt: str | None = None,
    asks_itself: bool = False,
    limit: int | None = None,
    first_id: int = 0,
) -> Dataset:
    """Read a dataset by name.

    Args:
      name: a preset's name (from the Hugging Face hub), PRESET:PATH (a local copy with the same columns), `BUNDLED`,
        the path of a file or directory, or a `Given` whose value are records. A file is .jsonl, .json (a
        list of objects) or .parquet; of a directory the files are read whose names are the split's up to the first "-",
        "_" or ".".
      split: "train" or "test"; ignored for a single file.
      prompt_column, answer_column: columns of a file or directory without a preset; "" for no answers.
      reward_columns: further columns for the rewards, besides the preset's own.
      system_prompt: replaces the dataset's own and that of a conversation; "": none is added to a prompt.
      asks_itself: the model's chat template asks for an answer's form: the dataset's own system prompt is left out.
      limit: largest number of problems.
      first_id: id of the first record.

    Unusable records (no answer, a prompt too long for the preset, …) are skipped and counted in `notes`.

    Raises DataError for an unknown name, an unreadable or malformed file, a missing column or split, and where no
    problem is left.
    """
    if limit is not None and limit < 1:
        raise DataError(f"{limit} problems of dataset {name!r} were asked for: at least 1 is needed")
    check_dataset(name, split)
    if name == BUNDLED:
        prompt_column, answer_column = "question", "answer"
    preset = preset_of(name) or _plain(prompt_column, answer_column)
    preset = dataclasses.replace(preset, system_prompt=own_system_prompt(name, asks_itself))
    preset_name, path = _parse(name)
    extra = tuple(dict.fromkeys((*preset.extra, *reward_columns)))
    if taken := sorted(_TAKEN & set(extra)):
        raise DataError(f"reward_columns {taken} are arguments that every reward has already")
    wanted = {preset.prompt_column, *(column for column, _ in preset.answers), *extra}
    if isinstance(name, Given):
        sources = [open_rows(name, name.value, wanted)]
    else:
        sources = _files(path, split, preset, wanted) if path else [_hub(preset_name, preset, split, wanted)]

    problems: list[Problem] = []
    left_out: dict[str, tuple[int, str]] = {}
    size, columns = 0, set()
    for place, record in _records(sources, preset, extra, columns):
        try:
            problems.append(_problem(record, preset, extra, system_prompt, first_id + size))
        except Unusable as error:
            count, first = left_out.get(str(error), (0, place))
            left_out[str(error)] = (count + 1, first)
        size += 1
        if len(problems) == limit:
            break
    reasons = "; ".join(f"{count} × {reason} (first: {first})" for reason, (count, first) in left_out.items())
    if not problems:
        where = path or preset.hub_id or name
        raise DataError(f"{where} holds no problems" + (f": left out {reasons}" if reasons else ""))
    notes = (f"{name}: left out {size - len(problems)} of {size} records: {reasons}",) if reasons else ()
    system, unread = preset.system_prompt if system_prompt is None else system_prompt, columns - wanted
    return Dataset(name, problems, system, size, notes, tuple(sorted(map(str, unread))))


def check_dataset(name: str, split: str) -> None:
    """Raise DataError for an unknown dataset, or one that has no such split; no record is read."""
    if isinstance(name, Given):
        return
    preset_name, path = _parse(name)
    if path is None and split not in PRESETS[preset_name].splits:
        raise DataError(f"dataset {name!r} has no split {split!r} on the hub, only {list(PRESETS[preset_name].splits)}")
    if path is not None and path.is_dir():
        split_files(path, split, PRESETS[preset_name].subset if preset_name else None)


def preset_of(name: str) -> Preset | None:
    """The preset of a dataset; None for the bundled one and plain files. Raises DataError for an unknown name."""
    preset_name = _parse(name)[0]
    return PRESETS[preset_name] if preset_name else None


def own_system_prompt(name: str, asks_itself: bool) -> str:
    """The system prompt that a dataset comes with, "" for none: where the model's chat template asks for an answer's
    form itself, none that asks for one. Raises DataError for an unknown name.
    """
    preset = preset_of(name)
    own = preset.system_prompt if preset else PROMPT_FORMATS["boxed"]
    return "" if asks_itself and own in PROMPT_FORMATS.values() else own


def _parse(name: str) -> tuple[str | None, Path | None]:
    """Preset and path that a name stands for; both None for records in memory."""
    if isinstance(name, Given):
        return None, None
    if name == BUNDLED:
        return None, _BUNDLED_FILES
    if name in PRESETS:
        return name, None
    before, colon, after = name.partition(":")
    if colon and before in PRESETS:
        preset_name, path = before, Path(after)
    else:
        preset_name, path = None, Path(name)
    if path.name and path.exists():  # an empty path would be the working directory
        return preset_name, path
    if name in IN_MEMORY:
        raise DataError(
            f'the records of {name} were given to train(…) in Python: call it with them again; resume="auto" goes on'
        )
    meant = _nearest(before)
    suggestion = f"; did you mean {meant + colon + after!r}?" if meant else ""
    if preset_name or (not colon and (path.suffix in FILE_KINDS or len(path.parts) > 1)):
        file = after if preset_name else name
        if not preset_name and not suggestion and len(path.parts) == 2 and not path.suffix:
            suggestion = "; of the hub only presets are read: datasets.load_dataset(…).to_json(FILE) writes a file"
        raise DataError(f"dataset file or directory {file!r} does not exist{below(file)}{suggestion}")
    raise DataError(
        f"dataset {name!r} is neither one of {sorted([*PRESETS, BUNDLED])} nor a directory or file ending in "
        f"one of {list(FILE_KINDS)}{suggestion}"
    )


def _nearest(name: str) -> str | None:
    """The dataset that a mistyped name, or an address on the hub, most likely means."""
    known = {name: name for name in (*PRESETS, BUNDLED)}
    addresses = {preset.hub_id: name for name, preset in reversed(PRESETS.items())}
    close = [] if name in known else difflib.get_close_matches(name, [*known, *addresses], n=1)
    return (known | addresses)[close[0]] if close else None


def _plain(prompt_column: str, answer_column: str) -> Preset:
    """A file or directory of no preset."""
    return Preset(
        hub_id="",
        prompt_column=prompt_column,
        answers=((answer_column, gold_answer),) if answer_column else (),
        splits=("train", "test"),
        rewards=NUMBER_REWARDS,
    )


def _files(path: Path, split: str, preset: Preset, wanted: set[str]) -> Iterable[Source]:
    paths = split_files(path, split, preset.subset) if path.is_dir() else [path]
    return (open_file(file, wanted) for file in paths)


def in_cache(hub_id: str, cache: Path) -> bool:
    """Whether the Hugging Face hub's cache in a directory has anything of a dataset."""
    return (cache / f"datasets--{hub_id.replace('/', '--')}").is_dir()


def is_out_of_reach(hub_id: str, cache: Path, api: Any) -> bool:
    """Whether the Hugging Face hub does not answer, and its cache in a directory has nothing of a dataset: `datasets`
    would then ask again for a minute and more. `api`: a `huggingface_hub.HfApi`.
    """
    from huggingface_hub import errors

    if in_cache(hub_id, cache):
        return False
    try:
        api.dataset_info(hub_id, timeout=10)
    except errors.HfHubHTTPError:  # an answer
        return False
    except Exception:  # whatever the hub's client raises without a connection, which differs by version
        return True
    return False


def _hub(name: str, preset: Preset, split: str, wanted: set[str], load: Callable | None = None) -> Source:
    """The rows of a preset by `load`; None: by `datasets.load_dataset`."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    cache, api = Path(constants.HF_HUB_CACHE), huggingface_hub.HfApi()
    if not constants.HF_HUB_OFFLINE and is_out_of_reach(preset.hub_id, cache, api):
        raise DataError(
            f"cannot read {preset.hub_id}: the Hugging Face hub does not answer, and {cache} has no copy; a local one "
            f"is read with {name}:DIRECTORY"
        )
    try:
        rows = (load or datasets.load_dataset)(preset.hub_id, preset.subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"cannot read {preset.hub_id} from the Hugging Face hub: {' '.join(str(error).split())}; "
            f"a local copy is read with {name}:DIRECTORY"
        ) from error
    return open_rows(preset.hub_id, rows, wanted)


def _records(
    sources: Iterable[Source], preset: Preset, extra: tuple[str, ...], read: set[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, record) of all sources, one after the other; `read` gets the columns of each. Raises DataError for a
    source that lacks a column, or of which no record has it.
    """
    for source in sources:
        columns = set(source.columns)
        if columns:
            _check_columns(source.where, columns, preset, extra)
        for place, record in source.records:
            columns |= record.keys()
            yield f"{source.where}, {place}", record
        if columns:
            _check_columns(source.where, columns, preset, extra)
        read |= columns


def _check_columns(where: str, columns: set[str], preset: Preset, extra: tuple[str, ...]) -> None:
    settings = {column: "reward_columns or data_order asks for it" for column in extra if column not in preset.extra}
    if not preset.hub_id:
        settings |= {preset.prompt_column: "set prompt_column"}
        settings |= {column: "set answer_column" for column, _ in preset.answers}
    missing = [column for column in (preset.prompt_column, *extra) if column not in columns]
    answers = [column for column, _ in preset.answers]
    if answers and not columns & set(answers):
        missing.append(" or ".join(answers))
    if missing:
        told = f": {settings[missing[0]]}{did_you_mean(missing[0], columns, 0.75)}" if missing[0] in settings else ""
        raise DataError(f"{where} has no column {missing[0]!r}; its columns are {sorted(columns)}{told}")


def _problem(
    record: Mapping[str, Any], preset: Preset, extra: tuple[str, ...], system: str | None, problem_id: int
) -> Problem:
    """The problem of a record; `system` replaces a conversation's own system message, "" and None keep it; None adds
    the preset's where there is none. Raises Unusable.
    """
    messages = None
    value = record.get(preset.prompt_column)
    if isinstance(value, list):
        messages = _messages(value, preset, system)
        prompt = messages[-1][1]
    else:
        prompt = _text(value, preset.prompt_column)
    if not prompt.strip():
        raise Unusable(f"empty {preset.prompt_column!r}")
    if preset.max_prompt_characters is not None and len(prompt) > preset.max_prompt_characters:
        raise Unusable(f"{preset.prompt_column!r} over {preset.max_prompt_characters} characters")
    answer = ""
    if preset.answers:
        column, read = next(((column, read) for column, read in preset.answers if column in record), preset.answers[0])
        text = _text(record.get(column), column)
        try:
            answer = read(text)
        except Unusable as error:
            raise Unusable(f"{error} in {column!r}") from error
    for column in extra:
        if record.get(column) is None:
            raise Unusable(f"no {column!r}")
    return Problem(problem_id, prompt, answer, messages, MappingProxyType({column: record[column] for column in extra}))


def _text(value: Any, column: str) -> str:
    if value is None or value != value:  # NaN is how pandas writes "none"
        raise Unusable(f"no {column!r}")
    if not isinstance(value, str | int | float | Decimal) or isinstance(value, bool):
        raise Unusable(f"{column!r} is neither text nor a number")
    if isinstance(value, float | Decimal) and math.isinf(value):  # also 1e400 in JSON
        raise Unusable(f"{column!r} is not finite")
    return _legible(str(int(value) if isinstance(value, float) and value.is_integer() else value), column)


def _legible(text: str, column: str) -> str:
    """The text, unless it is longer than any model reads, or holds half of a surrogate pair, which JSON can write and
    no tokenizer reads.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unusable(f"{column!r} over {MAX_CHARACTERS} characters")
    if not is_unicode(text):
        raise Unusable(f"{column!r} is not valid Unicode")
    return text


def _joined(parts: list[Any], column: str) -> str:
    """The text of a message that is given in parts, {type: "text", text}, as for models that also take images."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Unusable(f"{column!r} holds a part of a message that is no text: images and sound are not supported")
    return "".join(texts)


def _messages(value: list[Any], preset: Preset, system: str | None) -> tuple[tuple[str, str], ...]:
    """A conversation that the assistant continues, with the system message that was asked for."""
    column, messages = preset.prompt_column, []
    for message in value:
        if not isinstance(message, Mapping):
            raise Unusable(f"{column!r} is a list of something else than {{role, content}}")
        role, content = message.get("role"), message.get("content")
        if role == "tool" or message.get("tool_calls"):
            raise Unusable(f"{column!r} holds a tool's turn or a call of one: tools are not supported")
        if isinstance(content, list):
            content = _joined(content, column)
        if role not in ROLES or not isinstance(content, str) or (role == "system" and messages):
            raise Unusable(f"{column!r} holds a message that is no {{role, content}} of {list(ROLES)}")
        messages.append((role, _legible(content, column)))
    if not messages or messages[-1][0] != "user":
        raise Unusable(f"{column!r} does not end with a user's message")
    added = preset.system_prompt if system is None else system
    own = messages.pop(0)[1] if messages[0][0] == "system" else added
    system = system or own
    return (("system", system), *messages) if system else tuple(messages)
