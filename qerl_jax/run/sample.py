"""The first prompt of a run as the model sees it, and what its rewards pay for a right, a wrong and an unreadable
answer: for `--dry-run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config
from qerl_jax.data.presets import PRESETS, PROMPT_FORMATS
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem, asks_for_answer, encode_problems, load_encoded
from qerl_jax.rewards.answers import parse_number
from qerl_jax.rewards.columns import reward_columns
from qerl_jax.rewards.functions import score
from qerl_jax.rewards.load import load_rewards


def sample_lines(config: Config) -> Iterator[str]:
    """Lines to print. Of a dataset on the hub a made-up problem stands for the first one; nothing is downloaded. Every
    other dataset is read up to its first usable problem.

    Raises DataError for a dataset that lacks a column, RewardError for a reward that cannot be loaded or called.
    """
    directory = assets.model_path(config.model, weights=False)
    tokenizer = load_tokenizer(directory, model_config(directory).vocab_size)
    if tokenizer is None:
        yield "The model directory has no tokenizer yet: no prompt is shown."
        return
    items = [_first(config, name, tokenizer) for name in config.dataset]
    yield "The first prompt:"
    prompt = tokenizer.decode(list(items[0].tokens))
    yield prompt
    problem = items[0].problem
    if "code" in config.reward_funcs or not problem.answer:
        return
    number = parse_number(problem.answer)
    wrong = "0" if number is None else str(number + 1)
    texts = [f"So it is \\boxed{{{problem.answer}}}.", f"So it is \\boxed{{{wrong}}}.", "I do not know."]
    if "<answer>" in prompt:
        texts[:2] = [f"<think>…</think><answer>{text}</answer>" for text in (problem.answer, wrong)]
    columns = reward_columns(
        [problem.extra] * 3,
        [0] * 3,
        [16] * 3,
        config.max_completion_length,
        config.overlong_tokens,
        config.reward_timeout,
    )
    with load_rewards(
        config.reward_funcs, config.reward_workers and 1, config.reward_timeout, print, config.allow_code_execution
    ) as rewards:
        totals, parts = score(
            rewards, config.reward_weights, [problem.prompt] * 3, texts, [problem.answer] * 3, **columns
        )
    weights = ", ".join(f"{w:g} × {name}" for name, w in zip(config.reward_funcs, config.reward_weights, strict=True))
    yield f"The reward is {weights}. It pays, where the answer is {problem.answer!r}:"
    for i, kind in enumerate(("a right", "a wrong", "an unreadable")):
        each = ", ".join(f"{name} {parts[name][i]:g}" for name in config.reward_funcs)
        yield f"  {totals[i]:g} for {kind} answer, {texts[i]!r} ({each})"


def _first(config: Config, name: str, tokenizer: Any) -> EncodedProblem:
    """The first problem of a dataset; of one on the hub a made-up one."""
    if preset := PRESETS.get(name):
        is_asked = asks_for_answer(tokenizer) and preset.system_prompt in PROMPT_FORMATS.values()
        own = "" if is_asked else preset.system_prompt
        system = own if config.system_message is None else config.system_message
        problem = Problem(0, f"(a problem of {name})", "42")
        return encode_problems([problem], tokenizer, system, config.max_prompt_length, "truncate_left")[0][0]
    items, _, _ = load_encoded(
        name,
        "train",
        tokenizer,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_message,
        max_prompt_length=config.max_prompt_length,
        overlong_prompts="truncate_left",
        reward_columns=config.reward_columns,
        limit=1,
    )
    return items[0]
