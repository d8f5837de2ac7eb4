"""Where a completion states its answer, as a text: for votes among completions, and for completions that continue
few-shot examples and so follow the examples' form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType

from qerl_jax.rewards.answers import extract_answer, parse_number, unbox
from qerl_jax.rewards.mathematics import last_answer_line

Extract = Callable[[str], str | None]
_LONGEST = 1000  # characters of a statement
_THE_ANSWER_IS = re.compile(r"[Tt]he answer is:?[ \t]*([^\n]*)")
_FINAL_ANSWER_IS = re.compile(r"[Ff]inal answer is:?[ \t]*([^\n]*)")
_HOPE = re.compile(r"\.?\s*I hope it is correct")
_SENTENCE = re.compile(r"\.(?:\s|$)")


def formula_statement(completion: str) -> str | None:
    """Text of the last `<answer>`, else of the last `\\boxed{…}`, else what follows the last "answer is" of a line."""
    stated = extract_answer(completion)
    if stated is not None:
        return stated
    if "\\boxed{" in completion:
        return unbox(completion).strip()
    found = _FINAL_ANSWER_IS.findall(completion) or _THE_ANSWER_IS.findall(completion)
    return _clean(found[-1]) if found else None


def chain_of_thought_statement(completion: str) -> str | None:
    """The first "The answer is …" that states a number, else the first one (Wei et al. 2022)."""
    found = [text for line in _THE_ANSWER_IS.findall(completion) if (text := _clean(line))]
    return next((text for text in found if parse_number(text) is not None), found[0] if found else None)


def minerva_statement(completion: str) -> str | None:
    """The first "final answer is …", up to "I hope it is correct" (Lewkowycz et al. 2022); else the last box."""
    found = _FINAL_ANSWER_IS.search(completion)
    if found:
        return _clean(_HOPE.split(found[1])[0])
    return unbox(completion).strip() if "\\boxed{" in completion else None


def solution_statement(completion: str) -> str | None:
    """The rest of the line after the first "####" (GSM8K's solutions); else the last `\\boxed{…}` (MATH's)."""
    _, mark, rest = completion.partition("####")
    if mark:
        return rest.partition("\n")[0].strip()[:_LONGEST] or None
    return unbox(completion).strip() if "\\boxed{" in completion else None


def _clean(text: str) -> str | None:
    """The first sentence of a statement, without its full stop."""
    text = text.strip()[:_LONGEST]
    end = _SENTENCE.search(text)
    return (text[: end.start()] if end else text).strip() or None


STATEMENTS = MappingProxyType(
    {
        "answer": (extract_answer, "<answer>{}</answer>"),
        "math_verify": (formula_statement, "<answer>{}</answer>"),
        "dapo": (last_answer_line, "Answer: {}"),
    }
)
"""Rewards that compare one text with the gold answer: how it is extracted, and a completion that states a text."""
