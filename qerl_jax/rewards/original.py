"""Scores as the released QeRL gives them, defects included: to compare runs with it, not to train better ones.

Source: NVlabs/QeRL at e8c6e79, `utils/rewards.py` and `eval/gsm8k.py`. Weights stand in the config here (QeRL writes
2.0 for a right answer and 0.2 for the format into the functions).
"""

from __future__ import annotations

from collections.abc import Sequence


def _xml_answer(text: str) -> str:
    """What stands behind the last `<answer>`, up to a `</answer>`; without tags the whole text."""
    return text.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0].strip()


def qerl_exact(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 where the text of `<answer>` is the gold text, character for character (`correctness_reward_func`).

    Its defects: "1234" and "$5" are wrong where the gold answer is written "1,234" and "5", and a completion without
    tags is right if it is nothing but the answer.
    """
    return [float(_xml_answer(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def qerl_first_character(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """1 where answer and gold answer begin with the same character: the accuracy that QeRL's `eval/gsm8k.py` reports.

    There a single text and answer go through the batched function, which then pairs their characters, and the first
    pair is taken for the result: "19" is right where "1234" was asked for. An empty answer, 0 here, ends the original
    with an IndexError.
    """
    pairs = zip(map(_xml_answer, completions), answer, strict=True)
    return [float(given[:1] == gold[:1] != "") for given, gold in pairs]


def xml_count(*, completions: Sequence[str], **_: object) -> list[float]:
    """An eighth for each of the four tags that stands once, on a line of its own, less 0.001 for each character behind
    the answer (`xmlcount_reward_func`); far below zero for a long tail.

    As in the original the tail counts twice where `</answer>` ends a line, and where it does not the whole text is
    counted as the tail of `<answer>`.
    """
    return [_count_tags(text) for text in completions]


def _count_tags(text: str) -> float:
    total = 0.125 * (text.count("<think>\n") == 1) + 0.125 * (text.count("\n</think>\n") == 1)
    if text.count("\n<answer>\n") == 1:
        total += 0.125 - 0.001 * len(text.rsplit("\n</answer>\n", 1)[-1])
    if text.count("\n</answer>") == 1:
        total += 0.125 - 0.001 * (len(text.rsplit("\n</answer>", 1)[-1]) - 1)
    return total
