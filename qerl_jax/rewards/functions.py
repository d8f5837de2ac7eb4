"""Rewards: pure functions from texts to numbers, and their weighted sum.

A reward is called as TRL calls it, `reward(prompts=[…], completions=[…], answer=[…]) -> [float | None, …]`; None means
"not applicable here".
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qerl_jax.rewards.answers import extract_answer, same_answer

Reward = Callable[..., Sequence[float | None]]
_SOFT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_STRICT = re.compile(
    r"\A\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*\Z",
    re.DOTALL,
)


class RewardError(ValueError):
    """A reward that cannot be loaded or that answers with something else than one number or None a completion."""


def answer(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 where the text of `<answer>` states the gold number, else 0.

    Departures from QeRL's GSM8K scorer, which compares the first character only, can never match a gold answer with a
    comma, and scores `<answer> 42 </answer>` 0.
    """
    given = [extract_answer(completion) for completion in completions]
    return [float(text is not None and same_answer(text, gold)) for text, gold in zip(given, answer, strict=True)]


def soft_format(*, completions: Sequence[str], **_: object) -> list[float]:
    """1 where `<think>…</think>` is followed by `<answer>…</answer>` somewhere."""
    return [float(_SOFT.search(completion) is not None) for completion in completions]


def strict_format(*, completions: Sequence[str], **_: object) -> list[float]:
    """1 where the completion is exactly one think block and one answer block; thoughts may have several lines (in QeRL
    they may not).
    """
    return [float(_STRICT.search(completion) is not None) for completion in completions]


BUILT_IN: dict[str, Reward] = {"answer": answer, "soft_format": soft_format, "strict_format": strict_format}


def load_reward(name: str) -> Reward:
    """A built-in reward by name, or `function` of a Python file written as "file.py:function". Raises RewardError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    file, separator, function = name.rpartition(":")
    if not separator:
        raise RewardError(f"reward {name!r} is neither one of {sorted(BUILT_IN)} nor of the form file.py:function")
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"reward {name!r}: file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"qerl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that dataclasses and pickles in it work
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward {name!r}: {path} failed to load: {error!r}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise RewardError(f"reward {name!r}: {path} has no function {function!r}")
    return found


def score(
    rewards: dict[str, Reward],
    weights: Sequence[float],
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    /,
    **columns: Sequence[object],
) -> tuple[list[float], dict[str, list[float]]]:
    """Weighted sum of the rewards of each completion, and each reward's own values; NaN stands for None. Every reward
    gets the dataset's further `columns` by name.

    A completion for which every reward is None gets NaN in all: it can teach nothing.

    Raises RewardError if a reward raises, returns the wrong number of values, or one that is neither a finite number
    nor None.
    """
    each = {name: _call(name, reward, prompts, completions, answers, columns) for name, reward in rewards.items()}
    totals = []
    for row in zip(*each.values(), strict=True):
        known = [weight * value for weight, value in zip(weights, row, strict=True) if not math.isnan(value)]
        totals.append(sum(known) if known else math.nan)
    return totals, each


def _call(
    name: str,
    reward: Reward,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[object]],
) -> list[float]:
    more = {column: list(values) for column, values in columns.items()}
    try:
        values = list(reward(prompts=list(prompts), completions=list(completions), answer=list(answers), **more))
    except Exception as error:
        raise RewardError(f"reward {name!r} raised {error!r}") from error
    if len(values) != len(completions):
        raise RewardError(f"reward {name!r} returned {len(values)} values for {len(completions)} completions")
    for i, value in enumerate(values):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise RewardError(
                f"reward {name!r} returned {value!r} for completion {i}; expected a finite number or None"
            )
    return [math.nan if value is None else float(value) for value in values]
