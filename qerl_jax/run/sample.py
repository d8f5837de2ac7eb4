"""The rewards of a run on its first problem, before anything is compiled; and for `--dry-run` that problem's prompt as
the model sees it, with what the rewards pay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from qerl_jax.config import Config
from qerl_jax.data.presets import PRESETS
from qerl_jax.data.problems import Problem, load_dataset, own_system_prompt
from qerl_jax.data.prompts import EncodedProblem, asks_for_answer, encode_problems
from qerl_jax.rewards.answers import parse_number
from qerl_jax.rewards.functions import score
from qerl_jax.rewards.load import Rewards
from qerl_jax.run.choose_rewards import reward_rows

Pay = tuple[list[float], dict[str, list[float]]]


def try_rewards(config: Config, rewards: Rewards, download: bool) -> None:
    """Call the rewards once on a group of the first problem of every dataset, so that what they lack is said before
    anything is compiled. Without `download` those of the hub whose rewards get columns of their own are left out.
    Raises DataError for a dataset that lacks a column, RewardError for a reward that fails.
    """
    for name in config.dataset:
        if name in PRESETS and not _has_columns(config, name):
            problem = _made_up(name)
        elif name in PRESETS and not download:
            continue
        else:
            dataset = load_dataset(
                name,
                "train",
                config.prompt_column,
                config.answer_column,
                reward_columns=config.read_columns,
                system_prompt=config.system_message,
                limit=1,
            )
            problem = dataset.problems[0]
        texts = _texts(config, problem, tagged=False)
        _pay(config, rewards, problem, dict(itertools.islice(texts.items(), config.num_generations)))


def sample_lines(config: Config, rewards: Rewards, tokenizer: Any, items: Sequence[EncodedProblem]) -> Iterator[str]:
    """Lines to print.

    Args:
      config: with its rewards filled in.
      rewards: these.
      tokenizer: the model's.
      items: the problems of its datasets that are not on the hub, of which nothing is downloaded: without any, a
        made-up problem stands for the first one.
    """
    item = items[0] if items else _encoded(config, config.dataset[0], tokenizer)
    yield "The first prompt:"
    prompt = tokenizer.decode(list(item.tokens))
    yield prompt
    problem = item.problem
    if not items and _has_columns(config, config.dataset[0]):
        return
    texts = _texts(config, problem, tagged="<answer>" in prompt)
    totals, parts = _pay(config, rewards, problem, texts)
    weights = ", ".join(f"{w:g} × {name}" for name, w in zip(config.reward_funcs, config.reward_weights, strict=True))
    gold = f", where the answer is {problem.answer!r}" if problem.answer else ""
    yield f"The reward is {weights}. It pays{gold}:"
    for i, (kind, text) in enumerate(texts.items()):
        each = ", ".join(f"{name} {_paid(parts[name][i])}" for name in config.reward_funcs)
        yield f"  {_paid(totals[i])} for {kind} answer, {text!r} ({each})"
    if not problem.answer and "code" not in config.reward_funcs:
        yield "No answer is known (answer_column), so that what a right one is paid is not shown."
    if all(map(math.isnan, totals)):
        yield "No reward pays a number for any of them: completions without one train nothing."
    elif "a right" in texts and all(str(parts[name][0]) == str(parts[name][1]) for name in config.reward_funcs):
        names = ", ".join(config.reward_funcs)
        compared = "the type of what is compared, and the form that is read"
        yield f"reward_funcs: {names} gave the right and the wrong answer the same: check {compared}"


def _paid(value: float) -> str:
    return "None" if math.isnan(value) else f"{value:g}"


def _texts(config: Config, problem: Problem, tagged: bool) -> dict[str, str]:
    """Completions by kind. Where no answer is known, or programs are run, only one that states nothing."""
    texts = {"an unreadable": "I do not know."}
    if "code" in config.reward_funcs or not problem.answer:
        return texts
    number = parse_number(problem.answer)
    wrong = "0" if number is None else str(number + 1)
    form = "<think>…</think><answer>{}</answer>" if tagged else "So it is \\boxed{{{}}}."
    return {"a right": form.format(problem.answer), "a wrong": form.format(wrong)} | texts


def _pay(config: Config, rewards: Rewards, problem: Problem, texts: dict[str, str]) -> Pay:
    """Totals and components of the rewards for completions of a problem, in whole groups as in training: the texts come
    again where there are more.
    """
    group = config.num_generations
    count = -(-len(texts) // group) * group
    completions = list(itertools.islice(itertools.cycle(texts.values()), count))
    index = [row // group for row in range(count)]
    rows, columns = reward_rows(config, [problem] * (count // group), index, completions, [16] * count)
    return score(rewards, config.reward_weights, *rows, **columns)


def _has_columns(config: Config, name: str) -> bool:
    """Whether rewards get columns of a preset that only its records have."""
    return bool(config.read_columns or PRESETS[name].extra)


def _made_up(name: str) -> Problem:
    """A problem in the place of the first one of a dataset on the hub."""
    return Problem(0, f"(a problem of {name})", "42")


def _encoded(config: Config, name: str, tokenizer: Any) -> EncodedProblem:
    """The made-up problem as tokens."""
    own = own_system_prompt(name, asks_for_answer(tokenizer))
    system = own if config.system_message is None else config.system_message
    return encode_problems([_made_up(name)], tokenizer, system, config.max_prompt_length, "truncate_left")[0][0]
