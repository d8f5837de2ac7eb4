"""Published datasets as data: location, columns, filters, system prompt, rewards.

The first six are the sets of QeRL's `utils/data.py` and `qerl.py`, from the same places, with the same columns and
filters. The others are sets of mathematics for training (`math`) and evaluation. Departures: mathematical problems ask
for `\\boxed{}`, which published models know, and pay for correctness alone; QeRL asks for `<think>` and `<answer>` and
pays 0.2 for the tags (`prompt_format: think_answer` and the `release-*` recipes). A Qwen2.5-Coder-0.5B-Instruct learned
the tags and nothing else from it (`tools/results/notes/real-weights.md`). Gold answers keep their commas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from qerl_jax.rewards.answers import parse_number, unbox

PROMPT_FORMATS = MappingProxyType(
    {
        "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",  # Qwen2.5-Math's own
        "think_answer": (
            "Solve the problem step by step. Put your reasoning between <think> and </think>, then give only the "
            "final answer between <answer> and </answer>."
        ),
    }
)
"""System prompts by the form of the answer that they ask for (`prompt_format`)."""
ANSWER_LINE_SYSTEM_PROMPT = (
    'Solve the problem step by step. End with a line that holds nothing but "Answer: " and the final answer.'
)
PROGRAM_SYSTEM_PROMPT = (
    "Think the problem through first. Then give one complete Python program that reads standard input and writes "
    "standard output, in a block that opens with ```python and closes with ```."
)


class Unusable(ValueError):
    """An unusable record; records are counted by this message."""


def whole_answer(text: str) -> str:
    """The text itself, stripped. Raises Unusable if nothing is left."""
    if not text.strip():
        raise Unusable("empty answer")
    return text.strip()


def hash_answer(text: str) -> str:
    """The number after the last "####", the format of GSM8K, verbatim. Raises Unusable without one."""
    _, mark, answer = text.rpartition("####")
    if not mark or parse_number(answer) is None:
        raise Unusable("no single number after '####'")
    return answer.strip()


def gold_answer(text: str) -> str:
    """The number after the last "####"; a text without that mark is the answer itself. Raises Unusable."""
    return hash_answer(text) if "####" in text else whole_answer(text)


def boxed_answer(text: str) -> str:
    """Contents of the last `\\boxed{…}`, where MATH's solutions put the answer. Raises Unusable without one."""
    if "\\boxed{" not in text:
        raise Unusable("no \\boxed{…}")
    return whole_answer(unbox(text))


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published dataset.

    Attributes:
      hub_id: on the Hugging Face hub.
      prompt_column: a text, or a list of {role, content}.
      answers: columns that can hold the answer, each with how it is read; the first that a file has counts. Without
        any, only `extra` tells right from wrong.
      rewards: names of reward functions and their weights.
      splits: names of its splits.
      subset: its configuration there, and the folder of it in a local copy; None for the only one.
      system_prompt: goes with prompts that bring none of their own; "" for none.
      max_prompt_characters: longer prompts are skipped.
      extra: further columns passed to the rewards.
    """

    hub_id: str
    prompt_column: str
    answers: tuple[tuple[str, Callable[[str], str]], ...]
    rewards: Mapping[str, float]
    splits: tuple[str, ...] = ("train",)
    subset: str | None = None
    system_prompt: str = PROMPT_FORMATS["boxed"]
    max_prompt_characters: int | None = None
    extra: tuple[str, ...] = ()


NUMBER_REWARDS = MappingProxyType({"answer": 1.0})
"""Rewards of GSM8K, the generated problems and plain files."""
_FORMULA_REWARDS = MappingProxyType({"math_verify": 1.0})
_ANSWER_LINE_REWARDS = MappingProxyType({"dapo": 1.0})


def _contest(name: str, prompt_column: str = "problem") -> Preset:
    """A contest whose answers are integers, as math-ai publishes it: AIME24 boxes them in `solution`."""
    return Preset(
        hub_id=f"math-ai/{name}",
        splits=("test",),
        prompt_column=prompt_column,
        answers=(("answer", whole_answer), ("solution", boxed_answer)),
        rewards=_FORMULA_REWARDS,
    )


_BIGMATH = Preset(
    hub_id="open-r1/Big-Math-RL-Verified-Processed",
    subset="level_3_4_5",
    prompt_column="prompt",
    answers=(("solution", whole_answer),),
    rewards=_FORMULA_REWARDS,
    max_prompt_characters=1024,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gsm8k": Preset(
            hub_id="openai/gsm8k",
            subset="main",
            splits=("train", "test"),
            prompt_column="question",
            answers=(("answer", hash_answer),),
            rewards=NUMBER_REWARDS,
        ),
        "bigmath": _BIGMATH,
        "bigmath_hard": dataclasses.replace(_BIGMATH, subset="level_4_5"),
        "dapomath": Preset(
            hub_id="open-r1/DAPO-Math-17k-Processed",
            subset="en",
            prompt_column="source_prompt",  # a user's message that asks for the answer line itself
            answers=(("solution", whole_answer),),
            system_prompt="",
            rewards=_ANSWER_LINE_REWARDS,
            max_prompt_characters=1024,
        ),
        "miromind": Preset(
            hub_id="miromind-ai/MiroMind-M1-RL-62K",
            prompt_column="problem",
            answers=(("clean_answer", whole_answer),),
            system_prompt=ANSWER_LINE_SYSTEM_PROMPT,
            rewards=_ANSWER_LINE_REWARDS,
            max_prompt_characters=1024,
        ),
        "codeforces": Preset(
            hub_id="open-r1/verifiable-coding-problems-python_decontaminated-tested-shuffled",
            prompt_column="problem",
            answers=(),
            system_prompt=PROGRAM_SYSTEM_PROMPT,
            rewards=MappingProxyType({"code": 1.0}),
            extra=("verification_info",),
        ),
        "math": Preset(
            hub_id="DigitalLearningGmbH/MATH-lighteval",
            splits=("train", "test"),
            prompt_column="problem",
            answers=(("answer", whole_answer), ("solution", boxed_answer)),
            rewards=_FORMULA_REWARDS,
        ),
        "math500": Preset(
            hub_id="HuggingFaceH4/MATH-500",
            splits=("test",),
            prompt_column="problem",
            answers=(("answer", whole_answer),),
            rewards=_FORMULA_REWARDS,
        ),
        "aime24": _contest("aime24"),
        "aime25": _contest("aime25"),
        "amc23": _contest("amc23", "question"),
    }
)
