"""Rewards and weights of a run, the datasets' own unless the config names others, and what they are called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.config import Config, ConfigError
from qerl_jax.data.files import DataError
from qerl_jax.data.presets import NUMBER_REWARDS
from qerl_jax.data.problems import Problem, preset_of
from qerl_jax.evaluation.grading import STATED

_VERDICTS = (*STATED, "code")
"""Rewards that say whether a completion is right: those they pay 1."""


def with_rewards(config: Config) -> Config:
    """The config with `reward_funcs` and `reward_weights` filled in, from its datasets where it names none.

    Raises DataError for an unknown dataset, or several whose rewards differ, and ConfigError for weights alone.
    """
    funcs, weights = config.reward_funcs, config.reward_weights
    if funcs is None and weights is not None:
        raise ConfigError(f"reward_weights {list(weights)} without reward_funcs")
    if funcs is None:
        rewards = dataset_rewards(config.dataset)
        funcs, weights = tuple(rewards), tuple(rewards.values())
    return dataclasses.replace(config, reward_funcs=funcs, reward_weights=weights or (1.0,) * len(funcs))


def dataset_rewards(datasets: Sequence[str]) -> Mapping[str, float]:
    """Names and weights of the rewards that datasets come with. Raises DataError where they differ."""
    found = {}
    for name in datasets:
        preset = preset_of(name)
        found[name] = preset.rewards if preset else NUMBER_REWARDS
    first, *others = found.values()
    if any(other != first for other in others):
        described = ", ".join(f"{name} {list(rewards)}" for name, rewards in found.items())
        raise DataError(f"the datasets come with different rewards ({described}): name reward_funcs for all of them")
    return first


def correctness_reward(dataset: str) -> str:
    """The reward by which an evaluation on a dataset counts a completion as correct."""
    return verdict_reward(dataset_rewards((dataset,)))


def verdict_reward(rewards: Mapping[str, float]) -> str | None:
    """Of the rewards that say whether a completion is right the one with the largest weight, the first among equals;
    None where there is none, as with functions of the user's.
    """
    return max((name for name in rewards if name in _VERDICTS), key=rewards.__getitem__, default=None)


def reward_rows(
    config: Config,
    problems: Sequence[Problem],
    prompt_index: Sequence[int],
    completions: Sequence[str],
    lengths: Sequence[int],
) -> tuple[tuple[list[Any], Sequence[str], list[str]], dict[str, list[Any]]]:
    """Prompts, completions and answers, a row for each completion, and the columns beside them, as `functions.score`
    takes them: `outcomes.GIVEN_COLUMNS`, and those of the datasets, None for a row whose dataset lacks one.

    Args:
      config: the run's.
      problems: of the whole batch.
      prompt_index: place of each row's problem among them.
      completions, lengths: text and tokens of each row's completion.
    """
    rows, names = [problems[place] for place in prompt_index], {n for item in problems for n in item.extra}
    if "answer" not in config.reward_columns:  # data_order may ask for it
        names -= {"answer"}
    answers = [row.answer for row in rows] if config.answer_column else []
    return ([row.as_rewards_see_it for row in rows], completions, answers), {
        **{name: [row.extra.get(name) for row in rows] for name in sorted(names)},
        "prompt_index": list(prompt_index),
        "completion_lengths": list(lengths),
        "max_completion_length": [config.max_completion_length] * len(rows),
        "overlong_buffer": [config.overlong_tokens] * len(rows),
        "reward_timeout": [config.reward_timeout] * len(rows),
    }
