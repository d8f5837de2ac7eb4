"""Signs that a run learns nothing, or the wrong thing, read off the rows of metrics.jsonl."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.checkpoint.run_files import NONFINITE_DIR
from qerl_jax.config import Config

MAX_SKIPPED_STEPS = 10
"""Steps in a row that may change nothing before a run is an error."""
DEAD_STEPS = 3
"""Steps in a row without a learning signal, before that is said."""
WINDOW = 10
"""Steps that are averaged: the first ones of a run are compared with the newest."""


def warnings(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Kind -> one sentence with what to try, for what the newest steps show; empty for a healthy run.

    Args:
      rows: metrics of all steps from the first, values that are not finite as None or NaN.
    """
    found = dict(_dead(rows)) if len(rows) >= DEAD_STEPS else {}
    if len(rows) >= 2 * WINDOW:
        found |= dict(_drifted(rows[:WINDOW], rows[-WINDOW:]))
    return found


class UntrainedError(ValueError):
    """No step of a run has trained anything: its checkpoint would be of no use."""


def refuse_skipped(rows: Sequence[Mapping[str, Any]], config: Config) -> None:
    """Raise ValueError if the updates of the last `MAX_SKIPPED_STEPS` steps were not finite."""
    last = rows[-MAX_SKIPPED_STEPS:]
    if len(last) == MAX_SKIPPED_STEPS and all(untrained(row, config) == _NOT_FINITE for row in last):
        kind = UntrainedError if all(untrained(row, config) for row in rows) else ValueError
        raise kind(f"steps {len(rows) - len(last) + 1} to {len(rows)} changed nothing: {_NOT_FINITE}")


def refuse_untrained(rows: Sequence[Mapping[str, Any]], config: Config) -> str:
    """Raise UntrainedError if no step of a run that is over trained anything. Returns the same sentence for a trial of
    less than `DEAD_STEPS` steps which met equal rewards, as hard problems give them, or whose learning rates were 0; ""
    for a run that has trained.
    """
    without_rate = _NO_RATE if config.learning_rate and config.num_iterations == 1 else None
    reasons = [untrained(row, config) or (row.get("learning_rate") == 0 and without_rate) or None for row in rows]
    if not reasons or None in reasons:
        return ""
    said = _told(reasons)
    if len(rows) < DEAD_STEPS and {_EQUAL, _CUT_OFF, _NO_RATE} & set(reasons):
        return said
    raise UntrainedError(said)


def untrained_steps(rows: Sequence[Mapping[str, Any]], config: Config) -> str:
    """How many steps trained nothing, and why; "" where each did."""
    return _told([untrained(row, config) for row in rows])


def _told(reasons: Sequence[str | None]) -> str:
    counts = collections.Counter(filter(None, reasons)).most_common()
    if not counts:
        return ""
    idle = sum(count for _, count in counts)
    said = counts[0][0] if len(counts) == 1 else "; ".join(f"{count} × {reason}" for reason, count in counts)
    if idle == len(reasons):
        return f"none of {idle} steps trained anything: {said}"
    return f"{idle} of {len(reasons)} steps trained nothing: {said}"


_NOT_FINITE = (
    f"loss, gradient or new parameters of updates were not finite (batches in {NONFINITE_DIR}/); lower "
    "learning_rate, or look for values that are not finite in the model"
)
_FAILED = "the largest logit of every completion was not finite: look for values that are not finite in the model"
_NO_REWARD = "no completion had a reward; what do the rewards return None for?"
_CUT_OFF = "all completions were cut off at max_completion_length: raise it"
_LEFT_OUT = "every completion was left out of the loss"
_EQUAL = (
    "the rewards of every group were equal; try easier or harder problems, a larger num_generations, or another "
    "prompt, and read completions/"
)
_NO_RATE = "its learning rate was 0, where the warm-up begins: set warmup_ratio 0, or a larger max_steps"
_NO_GRADIENT = "the gradient was 0; read completions/ and metrics.jsonl"


def untrained(row: Mapping[str, Any], config: Config) -> str | None:
    """Why a step trained nothing, with what to try; None for one that did."""
    if row.get("skipped") == config.num_iterations:
        return _NOT_FINITE
    if row.get("grad_norm") != 0:
        return None
    if row.get("completions/failed") == config.batch_size:
        return _FAILED
    if _value(row, "reward") is None:
        return _NO_REWARD
    if row.get("completions/clipped_ratio") == 1:
        return _CUT_OFF
    if row.get("tokens") == 0:
        return _LEFT_OUT
    return _EQUAL if row.get("frac_reward_zero_std") == 1 else _NO_GRADIENT


def _dead(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    last = rows[-DEAD_STEPS:]
    steps = f"in {len(last)} steps in a row"
    if all(row.get("skipped", 0) > 0 for row in last):
        yield "not finite", f"{steps} {_NOT_FINITE}"
    elif all(_value(row, "reward") is None for row in last):
        yield "no reward", f"{steps} {_NO_REWARD}"
    elif all(_value(row, "frac_reward_zero_std") == 1 for row in last):
        yield "equal rewards", f"{steps} {_EQUAL}"
    elif all(row.get("grad_norm") == 0 for row in last):
        yield "no gradient", f"{steps} {_NO_GRADIENT}"
    if all(_value(row, "completions/clipped_ratio") == 1 for row in last):
        collapsed = ", or lower learning_rate" if any(row.get("grad_norm") for row in rows) else ""
        yield "truncated", f"{steps} {_CUT_OFF}{collapsed}"


def _drifted(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    def change(name: str) -> tuple[float, float]:
        return tuple(_mean(rows, name) for rows in (first, last))

    (reward, new_reward), (accuracy, new_accuracy) = change("reward"), change("accuracy")
    (length, new_length), (entropy, new_entropy) = change("completions/mean_length"), change("entropy")
    is_flat = new_accuracy < accuracy + 0.01
    if is_flat and new_reward > reward + 0.05:
        yield (
            "paid for something else",
            f"the reward rose from {reward:.2f} to {new_reward:.2f}, accuracy stayed ({accuracy:.1%} to "
            f"{new_accuracy:.1%}): something else than being right is paid for; look at rewards/*/mean, reward_funcs",
        )
    if is_flat and new_length < length / 3:
        yield (
            "shorter",
            f"completions shrank from {length:.0f} to {new_length:.0f} tokens, accuracy did not rise: read "
            "completions/; take another prompt_format or reward, or a smaller learning_rate",
        )
    if new_entropy < 0.05 and new_entropy < entropy / 4 and not new_accuracy > 0.8:  # a task that is learnt has little
        yield (
            "entropy",
            f"the entropy fell from {entropy:.2f} to {new_entropy:.3f} nats a token: samples hardly differ; try a "
            "smaller learning_rate or a larger epsilon_high",
        )


def _value(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return None if value is None or value != value else value


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [value for row in rows if (value := _value(row, name)) is not None]
    return float(np.mean(values)) if values else float("nan")
