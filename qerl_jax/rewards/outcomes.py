"""What a reward can say besides a plain number or None: numbers that carry the reason why they are what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reward = Callable[..., Sequence[float | None]]
"""`reward(prompts=[…], completions=[…], answer=[…], **columns) -> [float | None, …]`, as TRL calls one; None means
"not applicable here"."""

GIVEN_COLUMNS = ("completion_lengths", "max_completion_length", "overlong_buffer", "reward_timeout")
"""Columns that a run gives to every reward: tokens, tokens, tokens, seconds."""


class RewardError(ValueError):
    """A reward that cannot be loaded or run, or that answers with something else than one number or None for each
    completion.
    """


class Unparsed(float):
    """The score of a completion in which no answer could be read."""


class TimedOut(float):
    """A score in which a time limit had a part; NaN where grading was stopped and there is no score."""


class Crashed(float):
    """NaN: the process that graded the completion died."""


FLAGS: dict[str, type[float]] = {"parse_failure": Unparsed, "timeout": TimedOut, "crash": Crashed}
"""Under which name each of them is counted."""
