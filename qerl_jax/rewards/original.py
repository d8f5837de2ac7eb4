"""Rewards of the released QeRL, defects included, for comparison with its runs.

Source: NVlabs/QeRL at e8c6e79, `utils/rewards.py` and `eval/gsm8k.py`. The weights are in the config here (QeRL
has 2.0 for a correct answer and 0.2 for the format inside the functions).
"""

from __future__ import annotations

from collections.abc import Sequence


def _xml_answer(text: str) -> str:
    """Text after the last `<answer>`, up to a `</answer>`; the whole text without tags."""
    return text.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0].strip()


def qerl_exact(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 where the text of `<answer>` is the gold text, character for character (`correctness_reward_func`).

    Defects: "1234" and "$5" are wrong if the gold answer is written "1,234" and "5"; a completion without tags is
    correct if it consists of the answer alone.
    """
    return [float(_xml_answer(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def qerl_first_character(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 where answer and gold answer start with the same character: the accuracy reported by QeRL's `eval/gsm8k.py`.

    It passes a single text and answer to the batched function, which pairs their characters, and takes the first pair
    as the result: "19" is correct if the answer is "1234". An empty answer scores 0 here and raises IndexError there.
    """
    pairs = zip(map(_xml_answer, completions), answer, strict=True)
    return [float(given[:1] == gold[:1] != "") for given, gold in pairs]


def xml_count(*, completions: Sequence[str], **_: object) -> list[float]:
    """1/8 for each of the four tags that occurs once on a line of its own, minus 0.001 for each character after the
    answer (`xmlcount_reward_func`); negative for a long tail.

    As in the original, the tail counts twice where `</answer>` ends a line; where it does not, the whole text counts as
    the tail of `<answer>`.
    """
    return [_count_tags(text) for text in completions]


def _count_tags(text: str) -> float:
    total = 0.125 * (text.count("<think>\n") == 1) + 0.125 * (text.count("\n</think>\n") == 1)
    if text.count("\n<answer>\n") == 1:
        total += 0.125 - 0.001 * len(text.split("\n</answer>\n")[-1])
    if text.count("\n</answer>") == 1:
        total += 0.125 - 0.001 * (len(text.split("\n</answer>")[-1]) - 1)
    return total
