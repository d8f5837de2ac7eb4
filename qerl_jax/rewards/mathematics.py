"""Rewards for formulas as answers: symbolic comparison, and DAPO's normalized text."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from qerl_jax.rewards.answers import parse_number, same_answer, unbox
from qerl_jax.rewards.outcomes import RewardError, Unparsed
from qerl_jax.rewards.statements import stated_answer

_BASE = re.compile(r"\d_\{?(\d+)\}?")  # the 8 of 52_8
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\{([^{}]*)\}|[$.]")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*")
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed\b")
_CONSTANT = re.compile(r"\\(?:mathrm|text|operatorname)\{\s*([ei])\s*\}")
_CUT = re.compile(r"(?:[-+*/^={(]|\\(?:cdot|times|div))\s*\Z")
_BETWEEN_FORMULAS = re.compile(r"\$\s*\band\b\s*\$")
_ELLIPSIS = re.compile(r"\\[lc]?dots|…|\.\.\.")
_NO_PLAIN_NUMBER = re.compile(r"\d_|[A-Za-z]\s*=")  # bases, equations: for math-verify
_DECIMAL_COMMA = re.compile(r"\$?-?0,\d+\$?")  # `1,2` is a list of two numbers
_PLAIN = re.compile(r"[-+\d.,\s$]+|\$?[-+]?\\[dt]?frac\{-?\d+\}\{\d+\}\$?")
_BRACED_PAIR = re.compile(r"\$?\\\{[^,{}]+,[^,{}]+\\\}\$?")
_PARENTHESIZED = re.compile(r"\$?(?:\\left)?[(\[].*[)\]]\$?")
_TOLERANCE = Fraction(1, 10**5)  # relative: of a decimal for a fraction or a root
_LONGEST = 1000  # characters of an answer; the patterns of `normalize` take quadratic time


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

    The answer is what `statements.stated_answer` finds, never an arbitrary number. Departure from QeRL's
    `accuracy_reward`, which accepts only delimited LaTeX and therefore scores `<answer> 42 </answer>` 0. Numbers that
    `answers.parse_number` reads on both sides are compared exactly, without SymPy.

    math-verify implements time limits by signals, which outside the main thread silently turn every score into 0. They
    are off; a worker that takes too long is killed instead (`pool`).

    Departures from math-verify: numbers with different bases differ (`52_8`), words equal the gold answer's words up to
    case and an article, a decimal stands for a fraction or a root within 1e-5 of it (math-verify: six decimals,
    whatever the size), an ellipsis is not left out, and an interval is no set of its two ends.
    """
    return [_verify(text, gold) for text, gold in zip(completions, answer, strict=True)]


def _verify(completion: str, gold: str) -> float | None:
    if not gold.strip():
        return None
    stated = stated_answer(completion)
    gold = (stated_answer(gold) or gold) if "\\boxed" in gold else gold
    verdict = Unparsed(0.0) if stated is None else _by_text(stated, gold)
    if verdict is None:
        return _by_algebra(stated, gold)
    return verdict if verdict or parse_number(gold) is not None or _parse(_delimited(gold)) else None


def _by_text(stated: str, gold: str) -> float | None:
    """The verdict on answers that need no algebra: numbers, words, bases, ellipses, intervals; None for others."""
    if "%" in stated + gold and (verdict := _by_percent(stated, gold)) is not None:
        return verdict
    decimal = "." in stated and _DECIMAL_COMMA.fullmatch(gold.strip()) is not None
    expected = None if _NO_PLAIN_NUMBER.search(gold) else parse_number(gold, decimal_comma=decimal)
    if expected is not None and not _NO_PLAIN_NUMBER.search(stated):
        given = parse_number(stated, decimal_comma="," not in gold)
        if given == expected:
            return 1.0
        if _PLAIN.fullmatch(gold) and _PLAIN.fullmatch(stated):
            return float(given is not None and _is_rounded(expected, given))
    words = _words(gold)
    if words is not None and words == _words(stated):
        return 1.0
    if (base := _BASE.findall(gold)) and _BASE.findall(stated) not in ([], base):
        return 0.0
    if bool(_ELLIPSIS.search(gold)) != bool(_ELLIPSIS.search(stated)):
        return 0.0
    pairs = ((gold, stated), (stated, gold))
    if any(_BRACED_PAIR.fullmatch(one) and _PARENTHESIZED.fullmatch(other) for one, other in pairs):
        return 0.0
    return None


def _by_percent(stated: str, gold: str) -> float | None:
    """The verdict where one answer at least has a percent sign and both state a number: 50 % is 0.5, and 50 without
    the sign, too. None for others. (math-verify takes the sign of `33\\frac{1}{3}\\%` for a factor of the fraction
    alone, or drops it with the fraction.)
    """
    expected, given = parse_number(gold), parse_number(stated, decimal_comma="," not in gold)
    if expected is None or given is None:
        return None
    pairs = [(expected, given)]
    if "%" not in stated:
        pairs.append((expected / 100, given))
    elif "%" not in gold:
        pairs.append((expected, given / 100))
    return float(any(one == other or _is_rounded(one, other) for one, other in pairs))


def _is_rounded(expected: Fraction, given: Fraction) -> bool:
    """Whether two different numbers are equal to six decimals, as for math-verify, and to the relative tolerance."""
    if expected.denominator == given.denominator == 1:
        return False
    return abs(expected - given) <= min(Fraction(1, 10**6), _TOLERANCE * abs(expected))


def _by_algebra(stated: str, gold: str) -> float | None:
    """math-verify's verdict, but for its absolute tolerance."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences its warning that the time limits are off
    expected = _parse(_delimited(gold))
    if not expected:
        return None
    given = _parse(_delimited(unbox(stated)))
    if not given:
        return Unparsed(0.0)
    try:
        is_far = "%" not in stated + gold and _is_far(expected[0], given[0])
        return float(verify(expected, given, timeout_seconds=None) and not is_far)
    except Exception:  # SymPy raises what it meets in an expression that no author foresaw
        return Unparsed(0.0)


def _is_far(expected: Any, given: Any) -> bool:
    """Whether both are numbers, one of them a decimal, that differ by more than the tolerance."""
    from sympy import Expr, Float

    if not all(isinstance(value, Expr) and value.is_number for value in (expected, given)):
        return False
    if not any(value.has(Float) for value in (expected, given)):
        return False
    ours, theirs = complex(expected), complex(given)
    return abs(ours - theirs) > _TOLERANCE * abs(ours)


def _words(answer: str) -> str | None:
    """The words of an answer that has no number or formula, in lower case without an article; None for others."""
    text = " ".join(_TEXT.sub(lambda match: match[1] or "", unbox(answer)[:_LONGEST]).split()).lower()
    text = _ARTICLE.sub("", text)
    return text if _WORDS.fullmatch(text) else None


def _parse(text: str) -> list[Any]:
    """Expressions that math-verify finds in an answer; none where it read its beginning only (it drops all that stands
    after some units: `1 -` of `1 - \\mathrm{m}`).
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = (LatexExtractionConfig(True, boxed_match_priority=0), ExprExtractionConfig(True))
    try:
        found = parse(text, extraction_config=configs, parsing_timeout=None)
    except Exception:  # likewise
        return []
    return [] if found and _CUT.search(str(found[-1])) else found


def _delimited(text: str) -> str:
    """The answer in dollar signs unless it is delimited, so that it parses as a formula; currency signs are removed."""
    text = _BETWEEN_FORMULAS.sub(" and ", _CONSTANT.sub(r" \1", text.replace("\\$", "")))
    return text if _DELIMITED.search(text) else f"${text}$"


def dapo(*, completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float | None]:
    """1 where the stated answer is the gold answer, as the same number or normalized as in Minerva, else 0 (DAPO itself
    scores −1 for 0); None without a gold answer. Departures from QeRL's and verl's `math_dapo`: any statement counts
    (`statements.stated_answer`), where they read the last `Answer: …` of the final 300 characters, and numbers are
    compared as numbers.
    """
    return [_score_text(text, gold) for text, gold in zip(completions, answer, strict=True)]


def _score_text(completion: str, gold: str) -> float | None:
    if not gold:
        return None
    stated = stated_answer(completion)
    if stated is None:
        return Unparsed(0.0)
    if parse_number(gold) is not None or same_answer(stated, gold):
        return float(same_answer(stated, gold))
    gold = gold.rsplit("=", 1)[-1]  # as normalize does, but before its length is looked at
    return float(len(gold) <= _LONGEST and normalize(stated[:_LONGEST]) == normalize(gold))


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
