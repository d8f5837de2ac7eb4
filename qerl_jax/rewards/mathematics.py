"""Rewards for formulas as answers: symbolic comparison, and DAPO's normalized text."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from qerl_jax.rewards.answers import extract_answer, unbox
from qerl_jax.rewards.outcomes import RewardError, Unparsed

_BASE = re.compile(r"\d_\{?(\d+)\}?")  # the 8 of 52_8
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}|[$.]")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*")
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed\b")
_LONGEST = 1000  # characters of a gold answer; the patterns of `normalize` take quadratic time
_TAIL = 300  # characters at the end of a completion in which DAPO looks for the answer
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def require_math_verify() -> None:
    """Raise RewardError where the optional package is not installed."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise RewardError(
            f"reward 'math_verify' needs the package math-verify: pip install 'qerl-jax[math]' ({error})"
        ) from error


def math_verify(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float | None]:
    """1 where the answer equals the gold answer as mathematics (package `math-verify`), else 0; None where the gold
    answer cannot be parsed.

    The answer is the text of the last `<answer>`, else the last `\\boxed{…}`, else whatever math-verify finds announced
    as the answer; never an arbitrary number. Departure from QeRL's `accuracy_reward`, which accepts only delimited
    LaTeX and therefore scores `<answer> 42 </answer>` 0.

    math-verify implements time limits by signals, which outside the main thread silently turn every score into 0. They
    are off; a worker that takes too long is killed instead (`pool`).

    Two departures from math-verify, which ignores the base of `52_8` and reads words as products of letters: numbers
    with different bases differ, and words equal the gold answer's words up to case and an article.
    """
    return [_verify(text, gold) for text, gold in zip(completions, answer, strict=True)]


def _verify(completion: str, gold: str) -> float | None:
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning that the time limits are off
    expected = _parse(_delimited(gold), bare=True)
    if not expected:
        return None
    stated = extract_answer(completion)
    stated = unbox(completion) if stated is None and "\\boxed{" in completion else stated
    if stated is not None and (words := _words(gold)) is not None and words == _words(stated):
        return 1.0
    if stated is not None and (base := _BASE.findall(gold)) and _BASE.findall(stated) not in ([], base):
        return 0.0
    given = _parse(completion, bare=False) if stated is None else _parse(_delimited(unbox(stated)), bare=True)
    if not given:
        return Unparsed(0.0)
    try:
        return float(verify(expected, given, timeout_seconds=None))
    except Exception:  # SymPy raises what it meets in an expression that no author foresaw
        return Unparsed(0.0)


def _words(answer: str) -> str | None:
    """The words of an answer that has no number or formula, in lower case without an article; None for others."""
    text = " ".join(_TEXT.sub(lambda match: match[1] or "", unbox(answer)[:_LONGEST]).split()).lower()
    text = _ARTICLE.sub("", text)
    return text if _WORDS.fullmatch(text) else None


def _parse(text: str, bare: bool) -> list[Any]:
    """Expressions that math-verify finds in a text; `bare`: also unannounced ones."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = (LatexExtractionConfig(bare, boxed_match_priority=0), ExprExtractionConfig(bare))
    try:
        return parse(text, extraction_config=configs, parsing_timeout=None)
    except Exception:  # likewise
        return []


def _delimited(text: str) -> str:
    """The answer in dollar signs unless it is delimited, so that it parses as a formula; currency signs are removed."""
    text = text.replace("\\$", "")
    return text if _DELIMITED.search(text) else f"${text}$"


def dapo(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float | None]:
    """1 where the last `Answer: …` in the final 300 characters is the gold answer, both normalized as in Minerva,
    else 0 (QeRL's and verl's `math_dapo`; DAPO itself scores −1 for 0); None without a gold answer. No answer equals a
    gold one of more than 1000 characters after its last "=".
    """
    return [_score_line(text, gold) for text, gold in zip(completions, answer, strict=True)]


def last_answer_line(completion: str) -> str | None:
    """What the last `Answer: …` in the final 300 characters states; None without one."""
    found = _ANSWER_LINE.findall(completion[-_TAIL:])
    return found[-1] if found else None


def _score_line(completion: str, gold: str) -> float | None:
    if not gold:
        return None
    stated = last_answer_line(completion)
    if stated is None:
        return Unparsed(0.0)
    gold = gold.rsplit("=", 1)[-1]
    return float(len(gold) <= _LONGEST and normalize(stated) == normalize(gold))


# Minerva's tables (arXiv 2206.14858, appendix D.1, from lm-evaluation-harness). Order and oddities matter: "a " is
# removed inside words, too, on both sides of the comparison.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
        (r"(\\text\{)(.*?)(\})", r"\2"),
        (r"(\\textbf\{)(.*?)(\})", r"\2"),
        (r"(\\overline\{)(.*?)(\})", r"\2"),
        (r"(\\boxed\{)(.*)(\})", r"\2"),
        (r"(frac)([^{])(.)", r"frac{\2}{\3}"),  # \frac12 is \frac{1}{2}
        (r"(sqrt)([^{])", r"sqrt{\2}"),
    )
)


def normalize(text: str) -> str:
    """An answer in Minerva's normal form: the text after the last "=", without units, spaces, dollar signs and
    thousands commas, with `\\frac12` as `\\frac{1}{2}`.
    """
    text = text.rsplit("=", 1)[-1]
    for before, after in (*_REPLACED, *((word, "") for word in _REMOVED)):
        text = text.replace(before, after)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return digits.strip() if digits.isdigit() else text.strip()
