"""Numbers in text: the answer a completion gives, and whether two answers are the same number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_OPEN, _CLOSE = "<answer>", "</answer>"
_LONGEST = 1000  # characters of an answer that can state a number; the patterns below take quadratic time
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}|([-+]?\d[\d,]*)\s*/\s*(\d[\d,]*)")


def extract_answer(completion: str) -> str | None:
    """Text of the last `<answer>` that is closed, up to its `</answer>`, stripped; None without one.

    Searches, no pattern: a completion that repeats an opening tag thousands of times must not cost seconds.
    """
    start = completion.rfind(_OPEN, 0, max(completion.rfind(_CLOSE), 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return completion[start : completion.index(_CLOSE, start)].strip()


def parse_number(text: str) -> Fraction | None:
    """The number an answer states, exactly; None if it states none or several different ones.

    Understands thousands commas, `$`, `%` and other units around it, a sign, decimals, fractions (`3/4`,
    `\\frac{3}{4}`) and `\\boxed{…}`. A text of more than 1000 characters states none.
    """
    if len(text) > _LONGEST:
        return None
    text = (
        unbox(text).replace("\\$", "").replace("$", "").replace("\\,", "").replace("\\!", "").replace("−", "-").strip()
    )
    fraction = _FRACTION.search(text)
    if fraction and not _NUMBER_BEYOND.search(text[: fraction.start()] + text[fraction.end() :]):
        return _fraction(fraction)
    values = {value for match in _NUMBER.finditer(text) if (value := _decimal(match.group())) is not None}
    return values.pop() if len(values) == 1 else None


_NUMBER_BEYOND = re.compile(r"\d")


def unbox(text: str) -> str:
    """Contents of the last `\\boxed{…}`, braces balanced; the text itself without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return text[begin:]


def _decimal(text: str) -> Fraction | None:
    if not any(character.isdigit() for character in text):
        return None
    try:
        value = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return Fraction(value) if abs(value.adjusted()) < 1000 else None


def _fraction(match: re.Match) -> Fraction | None:
    parts = [part for part in match.groups() if part is not None]
    above, below = (_decimal(part.strip()) for part in parts)
    sign = -1 if match.string[: match.start()].endswith("-") else 1
    return None if above is None or not below else sign * above / below


def same_answer(given: str, gold: str) -> bool:
    """Whether both state the same number; two answers without numbers must be the same text but for case and white
    space.
    """
    given_number, gold_number = parse_number(given), parse_number(gold)
    if gold_number is None:
        return " ".join(unbox(given).split()).lower() == " ".join(unbox(gold).split()).lower()
    return given_number == gold_number
