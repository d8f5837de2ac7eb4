"""Reward values: plain numbers, None, and numbers that carry the reason for their value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reward = Callable[..., Sequence[float | None]]
"""`reward(prompts=[…], completions=[…], answer=[…], **columns) -> [float | None, …]`, as TRL calls one; None means
"not applicable here"."""

GIVEN_COLUMNS = ("prompt_index", "completion_lengths", "max_completion_length", "overlong_buffer", "reward_timeout")
"""Columns that training passes to every reward: the prompt's place in the batch (equal texts can be two prompts), then
tokens, tokens, tokens, seconds."""

STORED_ANSWER = "stored_answer"
"""Column in which `answer` of `reward_columns` travels beside the text of the gold answer; functions of the user's get
it as `answer`."""

NOT_PASSED = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes to a reward and training here does not."""


class RewardError(ValueError):
    """A reward that cannot be loaded or run, or does not return one number or None for each completion."""


class Unparsed(float):
    """Score of a completion without a parsable answer."""


class TimedOut(float):
    """Score affected by a time limit; NaN where grading was stopped without a score."""


class Crashed(float):
    """NaN: the worker process died while grading the completion."""


FLAGS: dict[str, type[float]] = {"parse_failure": Unparsed, "timeout": TimedOut, "crash": Crashed}
"""Metric name of each flagged value."""
