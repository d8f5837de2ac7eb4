"""Rewards: pure functions from texts to numbers, and their weighted sum.

A reward is called as TRL calls it, `reward(prompts=[…], completions=[…], answer=[…], **columns) -> [float | None, …]`;
None means "not applicable"; it may be a coroutine function. Training passes the columns of `GIVEN_COLUMNS`; a dataset
may add its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from typing import Any

from qerl_jax.messages import Given, below, did_you_mean
from qerl_jax.rewards import code as programs
from qerl_jax.rewards import mathematics
from qerl_jax.rewards.answers import same_answer
from qerl_jax.rewards.outcomes import FLAGS, NOT_PASSED, STORED_ANSWER, Reward, RewardError, Unparsed
from qerl_jax.rewards.statements import stated_answer

_BETWEEN = re.compile(r"</think>\s*<answer>")
_STRICT = re.compile(
    r"\A\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*\Z",
    re.DOTALL,
)


def answer(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float | None]:
    """1 where the last answer that the completion states (`statements.stated_answer`) is the gold number, else 0; None
    without a gold answer.

    Departures from QeRL's GSM8K scorers: its reward compares texts, so that a gold answer with a comma requires the
    comma, and its evaluation compares only the first character.
    """
    return [_score_answer(stated_answer(text), gold) for text, gold in zip(completions, answer, strict=True)]


def _score_answer(given: str | None, gold: str) -> float | None:
    if not gold:
        return None
    return Unparsed(0.0) if given is None else float(same_answer(given, gold))


def soft_format(*, completions: Sequence[str], **_: object) -> list[float]:
    """1 where `<think>…</think>` is followed by `<answer>…</answer>` somewhere.

    Three searches instead of the pattern `<think>.*?</think>\\s*<answer>.*?</answer>`, which takes cubic time on a
    completion that repeats its tags: minutes for a few thousand tokens.
    """
    return [float(_has_both_blocks(completion)) for completion in completions]


def _has_both_blocks(text: str) -> bool:
    start = text.find("<think>")
    between = _BETWEEN.search(text, start) if start >= 0 else None
    return between is not None and text.find("</answer>", between.end()) >= 0


def strict_format(*, completions: Sequence[str], **_: object) -> list[float]:
    """1 where the completion is exactly one think block and one answer block. Departure from QeRL: thoughts may have
    several lines.
    """
    return [float(_STRICT.search(completion) is not None) for completion in completions]


def overlong(
    *,
    completion_lengths: Sequence[int],
    max_completion_length: Sequence[int],
    overlong_buffer: Sequence[int],
    **_: object,
) -> list[float]:
    """DAPO's soft overlong penalty, arXiv 2503.14476 equation 13: 0 up to `max − buffer` tokens, then linear down to −1
    at `max`.
    """
    lengths = zip(completion_lengths, max_completion_length, overlong_buffer, strict=True)
    return [-min(max(length - (limit - buffer), 0) / buffer, 1.0) for length, limit, buffer in lengths]


BUILT_IN: dict[str, Reward] = {
    "answer": answer,
    "soft_format": soft_format,
    "strict_format": strict_format,
    "overlong": overlong,
    "math_verify": mathematics.math_verify,
    "dapo": mathematics.dapo,
    "code": programs.code,
}
LARGEST_TOTAL = 1e15
"""Largest reward of a completion: the squares of a whole batch's stay finite in float32."""
# Requirements checked when a reward is loaded, not at the first completion.
_REQUIREMENTS = {"math_verify": mathematics.require_math_verify, "code": programs.require_sandbox}


def load_reward(name: str) -> Reward:
    """A built-in reward by name, `function` of a Python file written as "file.py:function", or a function that a
    `Given` holds. Raises RewardError.
    """
    if isinstance(name, Given):
        return name.value
    if name in BUILT_IN:
        _REQUIREMENTS.get(name, lambda: None)()
        return BUILT_IN[name]
    path, function = reward_file(name)
    spec = importlib.util.spec_from_file_location(f"qerl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that dataclasses and pickles in it work
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f", line {line}," if line else ""
        hint = "; it can import from the working directory, by full names" if isinstance(error, ImportError) else ""
        raise RewardError(f"reward {name!r}: {path}{place} failed to load: {error!r}{hint}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise RewardError(f"reward {name!r}: {path} has no function {function!r}")
    return found


def reward_file(name: str) -> tuple[Path, str]:
    """File and function of "file.py:function". Raises RewardError where there is no such file."""
    file, separator, function = name.rpartition(":")
    if not separator:
        hint = did_you_mean(name, BUILT_IN)
        raise RewardError(
            f"reward {name!r} is neither one of {sorted(BUILT_IN)} nor of the form file.py:function{hint}"
        )
    if not Path(file).is_file():
        raise RewardError(f"reward {name!r}: file {file} does not exist{below(file)}")
    return Path(file), function


def score(
    rewards: Mapping[str, Reward],
    weights: Sequence[float],
    prompts: Sequence[str | list[dict[str, str]]],
    completions: Sequence[str],
    answers: Sequence[str],
    /,
    **columns: Sequence[object],
) -> tuple[list[float], dict[str, list[float]]]:
    """Weighted sum of the rewards of each completion, and its components by name.

    Args:
      rewards: rewards by name.
      weights: one weight for each reward.
      prompts, completions: one for each row. Where a prompt is a list of messages, functions of the user's get the
        completion as such a list, too.
      answers: one for each row, or none, as without an `answer_column`: then no reward gets `answer`.
      columns: further columns, passed to the rewards by name; `answer` to functions of the user's alone, which then
        get it in the place of `answers`.

    Returns the totals and the components: "NAME" has each reward's values with NaN for None, "NAME/FLAG" has 1 where
    the flag of `FLAGS` was raised. The total is NaN where every reward of a weight is None or grading failed; such a
    completion does not contribute to the update. A reward of weight 0 is a component alone.

    Raises RewardError if a reward raises, returns the wrong number of values, or one that is neither a finite number
    nor None, and for a total beyond `LARGEST_TOTAL`.
    """
    rows = as_rows(prompts, completions, answers, **columns)
    each = {name: call(name, reward, rows) for name, reward in rewards.items()}
    totals = []
    for i, row in enumerate(zip(*each.values(), strict=True)):
        known = [weight * value for weight, value in zip(weights, row, strict=True) if weight and value is not None]
        totals.append(sum(known) if known else math.nan)
        if abs(totals[-1]) > LARGEST_TOTAL:
            raise RewardError(f"the rewards of completion {i}, {row}, add up to {totals[-1]:g}: more than squares bear")
    components = {
        name: [math.nan if value is None else float(value) for value in values] for name, values in each.items()
    }
    for name, values in each.items():
        components |= {
            f"{name}/{flag}": [float(isinstance(value, kind)) for value in values] for flag, kind in FLAGS.items()
        }
    return totals, components


def as_rows(
    prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[str], /, **columns: Sequence[object]
) -> dict[str, list[Any]]:
    """What `score` calls rewards with; a column `answer` has the name `STORED_ANSWER`."""
    own = {"answer": list(answers)} if answers else {}
    rows = {"prompts": list(prompts), "completions": list(completions)} | own
    return rows | {STORED_ANSWER if name == "answer" else name: list(values) for name, values in columns.items()}


def call(name: str, reward: Reward, rows: Mapping[str, Sequence[object]]) -> list[float | None]:
    """Call a reward on rows and check its values. Raises RewardError as `score` does, also for exceptions that are none
    of `Exception`, as those of func_timeout and a cancelled coroutine; MemoryError passes through and ends a worker.
    """
    try:
        given = reward(**rows)
        if inspect.iscoroutine(given):  # in a thread, because a notebook's has an event loop already
            with ThreadPoolExecutor(1) as pool:
                given = pool.submit(asyncio.run, given).result()
        values = given if isinstance(given, Mapping | Set | str | bytes) else list(given)
    except (RewardError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RewardError(f"reward {name!r} raised {error!r}{_place(error, reward, rows)}") from error
    if not isinstance(values, list):
        raise RewardError(
            f"reward {name!r} returned a {type(given).__name__}, not one value for each completion in order"
        )
    expected = len(rows["completions"])
    if len(values) != expected:
        raise RewardError(f"reward {name!r} returned {len(values)} values for {expected} completions")
    scores = []
    for i, value in enumerate(values):
        try:
            scores.append(_score_of(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(
                f"reward {name!r} returned {value!r} for completion {i}; expected a finite number or None"
            ) from error
    return scores


def _place(error: BaseException, reward: Reward, rows: Mapping[str, object]) -> str:
    """The last line of the reward's own file that an error came through, or else that of its definition, and columns
    that it asks for and nobody has.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is `call`
    if own := [frame for frame in frames if frame.filename == frames[0].filename]:
        keys = map(str, error.args) if isinstance(error, KeyError) else ()
        asked = [key for key in keys if key.isidentifier()]
        return f" in {own[-1].filename}, line {own[-1].lineno}" + _missing(asked, rows)
    code = getattr(reward, "__code__", None)
    place = f" in {code.co_filename}, line {code.co_firstlineno}" if code else ""
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        parameters = inspect.signature(reward).parameters.values()
        asked = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if missing := _missing(asked, rows):
            return place + missing
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return f"{place}: it must take every column, the last as **columns"
    return place


def _missing(asked: Sequence[str], rows: Mapping[str, object]) -> str:
    """How a reward comes by the columns that it asks for and `rows` lack; "" where they lack none."""
    missing = [column for column in asked if column not in rows]
    if theirs := [column for column in missing if column in NOT_PASSED]:
        return f": {', '.join(theirs)} of TRL is not passed here: give it a default, or leave it out"
    if missing == ["answer"]:
        return ": name answer in reward_columns, or the column of the dataset's gold answers in answer_column"
    names = ", ".join(missing)
    return f": name {names} in reward_columns, if the dataset has it (the answer is `answer`)" if missing else ""


def _score_of(value: Any) -> float | None:
    """A reward's value as a float; None and the types of `FLAGS` unchanged."""
    if value is None or isinstance(value, tuple(FLAGS.values())):
        if isinstance(value, Unparsed) and not math.isfinite(value):
            raise ValueError("not finite")
        return value
    if getattr(value, "shape", None) == ():  # NumPy scalars: `bool_` is not a Real
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError("no finite number")
    return float(value)
