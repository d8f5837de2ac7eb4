"""Numbers in text: reading one, and comparing two answers as numbers."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

_LONGEST = 1000  # characters of an answer that can state a number; the patterns below take quadratic time
_NUMBER = re.compile(r"(?:[-+]\s*)?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}|((?:[-+]\s*)?\d[\d,]*)\s*/\s*(\d[\d,]*)")
_DIGIT = re.compile(r"\d")
_THOUSANDS = re.compile(r"(?<!\d)[1-9]\d{0,2},\d{3}(?!\d)")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d+),(\d+)(?![\d.,]|\s*,)")
_TUPLE = re.compile(r"[(\[][-+\d.\s]*,[-+\d.,\s]*[)\]]")  # a point, an interval, a list: no thousands, no decimals
# Allowed beside a number: words, a variable it is assigned to, currencies, punctuation. No operators.
_WORD = re.compile(r"(?:[^\W\d_]['’-]?)+")
_ASSIGNED = re.compile(r"(?<!\S)[^\W\d_]\s*=\s*$|=\s*$")
_PUNCTUATION = re.compile(r"[\s.,;:?()~≈%°€£¥₹¢\"“”`']|\\%|/(?=[hs]\b|\s*[^\W\d_]{2})")
_UNITS = frozenset({"a", "m", "g", "l", "h", "s"})  # other single letters are variables or labels
_ATTACHED = re.compile(r"(?<=\d)(?=(?:[mglhs]|[cmk]m|[mk]g|ml|lb|ft|hr|[ap]m|[a-z]{3,})\b)")  # units, as in 5km
_SCALES = {"k": 3, "hundred": 2, "thousand": 3, "million": 6, "billion": 9}  # powers of ten
_SCALED = re.compile(rf"({_NUMBER.pattern})(?:\s*(hundred|thousand|million|billion)\b|([kK])\b)")
_COMPUTATION = re.compile(  # the left side of 2 + 3 = 5
    r"\A(?=[^=]*\d)(?:[\d\s.,$()+*/×÷-]|\\[dt]?frac\{[\d.,]+\}\{[\d.,]+\})+="
)
_CHANGES = re.compile(  # words that change the value of the number beside them
    "pi|sqrt|root|log|ln|sin|cos|tan|exp|squared|cubed|plus|minus|factorial|negative|not|"
    "hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half|halves|halved|twice|thrice|doubled?|tripled?"
)
_BOUNDS = re.compile(  # phrases that make it a bound or a part
    r"\b(?:(?:less|more|fewer|greater|larger|smaller|bigger|higher|lower) than|at (?:least|most)|up to|below zero|"
    r"or (?:less|more|fewer)|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s? of)\b"
)
_BOUND_BEFORE = re.compile(r"\b(?:under|over|below|above|exceeds|exceeding)\s*$")
_ANNOUNCE = re.compile(
    "about|answer|approximately|are|equals|exactly|hence|is|it's|just|only|so|sum|therefore|thus|total|usd"
)


def parse_number(text: str, decimal_comma: bool = False) -> Fraction | None:
    """The number stated by an answer, exactly; None if it states none or several different ones.

    Understands thousands commas (`9,500`, `9{,}500`) and spaces, `1\\frac{1}{2}` as 3/2, dashes as minus signs, `$`,
    `%` and other units, an announcing phrase (`x = 12`, `the answer is 12`), the
    computation of a number (`5 + 7 = 12`), a sign, decimals, a scale (`1.45 million`, `276K`), fractions (`3/4`,
    `\\frac{3}{4}`) and `\\boxed{…}`; with `decimal_comma` also `3,5` as 3.5, but `3,500` is 3500. A number inside an
    expression does not count: one that touches a letter (`B3`,
    `2x`), is next to an operator, a variable or a word that changes its value (`x^2`, `2\\sqrt{x}`, `2 dozen`,
    `half of 4`) or makes it a bound (`less than 5`), or belongs to a label (`Room 3`) or tuple (`(1,100)`). A
    text of more than 1000 characters states no number.
    """
    if len(text) > _LONGEST:
        return None
    text = unbox(text).strip()
    if text.isascii() and text.isdigit():  # as most answers of a dataset are; the rest takes 80 µs
        return Fraction(int(text))
    for pattern, replacement in _LATEX if "\\" in text or "{" in text else ():
        text = pattern.sub(replacement, text)
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    text = text.strip()
    if _TUPLE.search(text):
        return None
    if decimal_comma and not _THOUSANDS.search(text):
        text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    text = _SCALED.sub(_plain, _ATTACHED.sub(" ", _COMPUTATION.sub("", text))).strip()
    fraction = _FRACTION.search(text)
    if fraction and not _DIGIT.search(text[: fraction.start()] + text[fraction.end() :]):
        sign = text[: fraction.start()].rstrip().endswith("-")
        before = text[: fraction.start()].rstrip()[:-1] if sign else text[: fraction.start()]
        value = _fraction(fraction) if _is_beside([before, text[fraction.end() :]]) else None
        return -value if sign and value is not None else value
    values, beside, end = set(), [], 0
    for match in _NUMBER.finditer(text):
        values.add(_decimal(match.group()))
        beside.append(text[end : match.start()])
        end = match.end()
    return values.pop() if len(values) == 1 and _is_beside([*beside, text[end:]]) else None


def _is_beside(parts: list[str]) -> bool:
    """Whether the texts before, between and after numbers are units and phrases that do not change their values."""
    before, *between, after = parts
    touching = [part[-1:] for part in (before, *between)] + [part[:1] for part in (*between, after)]
    if any(character.isalpha() for character in touching) or not all(_WORD.search(part) for part in between):
        return False
    last = _WORD.search(before.rstrip(), len(before.rstrip().rpartition(" ")[0]))
    if (
        last
        and last.end() == len(before.rstrip())
        and last[0][0].isupper()
        and not _ANNOUNCE.fullmatch(last[0].lower())
    ):
        return False
    if any(_BOUNDS.search(part.lower()) for part in parts) or _BOUND_BEFORE.search(before.lower()):
        return False
    parts = [_ASSIGNED.sub("", before), *between, after]
    words = [word for part in parts for word in _WORD.findall(part)]
    if _WORD.findall(after)[-1:] == ["a"]:  # a variable, not an article
        return False
    if any(_CHANGES.fullmatch(word.lower()) or (len(word) == 1 and word not in _UNITS) for word in words):
        return False
    return not any(_WORD.sub("", _PUNCTUATION.sub("", part)).strip() for part in parts)


def unbox(text: str) -> str:
    """Contents of the last `\\boxed{…}` with balanced braces; the whole text without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return text[begin:]


def _improper(match: re.Match) -> str:
    """A mixed number as a fraction: 3/2 for `1\\frac{1}{2}`. The text itself where its fraction is not below 1."""
    whole, above, below = (int(part) for part in match.groups() if part is not None)
    return f"{whole * below + above}/{below}" if 0 < above < below else match[0]


def _digits(match: re.Match) -> str:
    """A number in groups without the spaces between them."""
    return re.sub(r"\D", "", match[0])


def _plain(match: re.Match) -> str:
    """A number with its scale in digits: 1450000 for "1.45 million". The text itself where it states none."""
    try:
        value = Decimal("".join(match[1].replace(",", "").split()))
    except InvalidOperation:
        return match[0]
    return f"{value.scaleb(_SCALES[(match[2] or match[3]).lower()]):f}" if abs(value.adjusted()) < 1000 else match[0]


_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf)\{([^{}]*)\}"
# How numbers are written, reduced to plain text, in this order: LaTeX, then all notations.
_LATEX = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{,\}", ","),  # 9{,}500
        (r"\\(?:display|text)style(?![A-Za-z])|\\!", ""),
        (r"\\(?:times|cdot)(?![A-Za-z])", "×"),
        (r"\\div(?![A-Za-z])", "÷"),
        (r"\\approx(?![A-Za-z])", "≈"),  # states its number, as "about" does
        (r"\\[ ,;:]|\\q?quad(?![A-Za-z])|\\{1,2}\Z", " "),  # at the end of a space that was stripped, or of a line
        (r"\A\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\Z", r"\1"),  # {42}
        (rf"({_TEXT})\s*\^(?:[23]|\{{[23]\}})", r"\1"),  # \text{ft}^2
        (r"\^(?:\\circ|\{\\circ\})", "°"),
        (r"(?<=[\d}°])(?:\s|~|\\[ ,;])*\\(?:text|mathrm)\{\s*[ACFJKLNVW]\s*\}", "° "),  # 5\text{ L}
    )
)
_NOTATION = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[−–‒]", "-"),  # minus, en dash, figure dash
        (r"(?<![\d.,])\d{1,3}(?:[ ~\u00a0\u2009\u202f]\d{3})+(?![\d,])", _digits),  # 10 000
        (r"\\[()\[\]$]|\$|^[#\s]+", ""),
        (r"\\[dt]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),  # \frac12
        (r"(\d+)\s*\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+) +(\d+)/(\d+)", _improper),
        (rf"{_TEXT}|(?<!\S)\*\*([^*]+)\*\*(?!\w)", lambda match: match[1] or match[2] or ""),
        (r"°\s*[CFK]\b", "°"),
        (r"(?<=ft|[cmk]m|in)(?:\^(?:[23]|\{[23]\})|[²³])", ""),
    )
)


def _decimal(text: str) -> Fraction | None:
    try:
        value = Decimal("".join(text.replace(",", "").split()))
    except InvalidOperation:
        return None
    return Fraction(value) if abs(value.adjusted()) < 1000 else None


def _fraction(match: re.Match) -> Fraction | None:
    parts = [part for part in match.groups() if part is not None]
    above, below = (_decimal(part.strip()) for part in parts)
    return None if above is None or not below else above / below


def same_answer(given: str, gold: str) -> bool:
    """Whether both answers state the same number. If the gold answer states none, their texts must agree up to case and
    white space.
    """
    gold_number = parse_number(gold)
    given_number = parse_number(given, decimal_comma="," not in gold)
    if gold_number is None:
        return " ".join(unbox(given).split()).lower() == " ".join(unbox(gold).split()).lower()
    return given_number == gold_number
