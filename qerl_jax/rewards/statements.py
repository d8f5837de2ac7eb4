"""Where a completion states its answer, as a text: for rewards, evaluations and votes alike."""

from __future__ import annotations

import re
from types import MappingProxyType

_LONGEST = 1000  # characters of a statement
_SHORT = 80  # characters of a sentence that states an answer, and does not speak about it
_MOST_MARKS = 32  # looked at, from the end: a completion that repeats a mark thousands of times costs no time
_AFTER_PROSE = r"(?:[*_ \t]*:|[ \t]+is\b)[*_ \t]*:?"
_MARK = re.compile(  # each alternative begins with a letter of its own, without a group: four times as fast
    r"\\boxed\s*\{|\\fbox\s*\{|<answer>|####(?!#)|"
    + "|".join(f"{word}{_AFTER_PROSE}" for word in ("answer", "Answer", "ANSWER"))
)
_BETWEEN_BOXES = re.compile(
    r"(?:[ \t,;$&.:]|\n(?!\s*\n)|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\}|\\q?quad\b|\\[()\[\],; ]|"
    r"[A-Za-z](?:_?+\{?\w+\}?)?\s*=)*"
)
_HEADING = re.compile(r"\d+[.)]\s|step\b", re.IGNORECASE)
_CHECKED = re.compile(
    r"\b(?:check(?:ing)?|verify(?:ing)?|verification)(?:\s+(?:of|the|my|our|this|final))*\s*\Z", re.IGNORECASE
)
_REASON = re.compile(r",?\s(?:because|since)\b")
_ITEM = re.compile(r"[ \t]*(?:[-+*•]|\d{1,2}[.)])[ \t]+(\S[^\n]*)")
_BEGIN_OF_LIST = re.compile(r"[ \t*_]*\n\s*(?=(?:[-+*•]|\d{1,2}[.)])[ \t])")
_BEGINS_WITH_VALUE = re.compile(  # a number or formula
    r"[\s*_\"'`“~≈•€£¥+−–([-]*(?:\.?\d|\$|\\[A-Za-z(\[$]|[A-Za-z]\w?\s*=)"
)
_LEAD = re.compile(  # an announcement before the answer in a tag or box
    r"[#*_\s]*(\\text\w*\{\s*)?(?:the\s+)?(?:final\s+)?answer(?:[*_ \t]*:|\s+is\b:?)[*_\s]*(?(1)\}\s*)",
    re.IGNORECASE,
)
_DISPLAY = re.compile(r"\s*(?:\\\[|\$\$)(.*?)(?:\\\]|\$\$)", re.DOTALL)
_VALUE = re.compile(r"\d|\\[A-Za-z]|\$")
_WORD = re.compile(r"\w")
_BRACE = re.compile(r"[{}]")
_SENTENCE = re.compile(r"\.(?:\s|$)")


def stated_answer(completion: str) -> str | None:
    """The last answer that a completion states; None if it states none.

    Statements are `\\boxed{…}` (or `\\fbox`), `<answer>…</answer>`, a line that begins with `####`, and "the answer is
    …" or "Answer: …" up to the end of its sentence or display. Boxes that stand together (`\\boxed{1}` and
    `\\boxed{2}`) are one answer of several values, "1, 2"; statements in different places are not added up. A statement
    without an end (`\\boxed{12`) is none. A sentence or `####` that is long, or without a number or formula, counts
    only where nothing else is stated; after a box or tag it has to begin with a number or formula.
    """
    marks, weak = _outer(completion, list(_MARK.finditer(completion))[-_MOST_MARKS:]), None
    while marks:
        kind = marks[-1][0][0]
        text = _STATED.get(kind, _announced)(completion, marks)
        if text and (kind in _ENCLOSING or _is_value(completion, marks, text)):
            lead = _LEAD.match(text) if len(text) > len("answer:") else None
            return (text[lead.end() :].strip("*_ \n") if lead else None) or text
        weak = weak or (text if text and _WORD.search(text) else None)
        marks.pop()
    return weak


def _outer(completion: str, marks: list[re.Match]) -> list[re.Match]:
    """The marks without announcements and "####" inside a closed box, or a closed tag without a box: those belong to
    its contents. A tag around a box holds a text of its own.
    """
    if len(marks) < 2 or len({mark[0][0] in _ENCLOSING for mark in marks}) < 2:
        return marks
    kept, inside = [], 0
    for mark in marks:
        if mark[0][0] in _ENCLOSING:
            end = _end(completion, mark) or 0
            holds_box = mark[0][0] == "<" and "\\boxed" in completion[mark.end() : end]
            inside = max(inside, 0 if holds_box else end)
        elif mark.start() < inside:
            continue
        kept.append(mark)
    return kept


def _end(completion: str, mark: re.Match) -> int | None:
    """Where the contents of a tag or box end; None where it is not closed."""
    if mark[0][0] == "\\":
        return _closing_brace(completion, mark.end())
    end = completion.find("</answer>", mark.end())
    return None if end < 0 else end


def _is_value(completion: str, marks: list[re.Match], text: str) -> bool:
    """Whether a sentence states a value, rather than speaks about it or about an answer in a box or tag before it."""
    if len(text) > _SHORT or not _VALUE.search(text):
        return False
    if _BEGINS_WITH_VALUE.match(completion, marks[-1].end()):
        return True
    return not any(mark[0][0] in _ENCLOSING and _end(completion, mark) for mark in marks[:-1])


def _tagged(completion: str, marks: list[re.Match]) -> str | None:
    end = _end(completion, marks[-1])
    return None if end is None else completion[marks[-1].end() : end].strip()


def _hashed(completion: str, marks: list[re.Match]) -> str | None:
    """The rest of the line, unless it is a heading of Markdown."""
    line, begin = completion.rfind("\n", 0, marks[-1].start()) + 1, marks[-1].end()
    if completion[line : marks[-1].start()].strip():
        return None
    text = completion[begin : begin + _LONGEST].partition("\n")[0].strip()
    return None if _HEADING.match(text) else text or None


def _announced(completion: str, marks: list[re.Match]) -> str | None:
    """The first sentence after the mark, or the display or list that follows it; no check of an answer."""
    begin = marks[-1].end()
    rest = completion[begin : begin + _LONGEST].partition("</answer>")[0]
    if _CHECKED.search(completion, max(marks[-1].start() - 40, 0), marks[-1].start()):
        return None
    if display := _DISPLAY.match(rest):
        return display[1].strip() or None
    sentences = _items(rest) or [rest.lstrip(" \t*_\n").partition("\n")[0]]
    values = [_REASON.split(_clean(sentence) or "", maxsplit=1)[0].strip("*_ \t") for sentence in sentences]
    text = ", ".join(dict.fromkeys(values))
    return None if "boxed{" in text else text or None  # a box that was not closed


def _items(text: str) -> list[str]:
    """The items of a list that begins on the next line, without their markers."""
    begin = _BEGIN_OF_LIST.match(text)
    items: list[str] = []
    item = _ITEM.match(text, begin.end()) if begin else None
    while item:
        items.append(item[1])
        item = _ITEM.match(text, item.end() + 1)
    return items


def _boxed(completion: str, marks: list[re.Match]) -> str | None:
    """Contents of the last box and of those that stand together with it, each once, with commas between."""
    values: list[str] = []
    after = None
    for mark in reversed([mark for mark in marks if mark[0][0] == "\\"]):
        end = _closing_brace(completion, mark.end())
        if end is None or (after is not None and not _BETWEEN_BOXES.fullmatch(completion, end + 1, after)):
            break
        values.insert(0, completion[mark.end() : end].strip())
        after = mark.start()
    return ", ".join(dict.fromkeys(values)) or None


def _closing_brace(text: str, begin: int) -> int | None:
    """Index of the brace that closes a group whose contents begin at `begin`; None within `_LONGEST` characters."""
    depth = 1
    for brace in _BRACE.finditer(text, begin, begin + _LONGEST):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


_ENCLOSING = frozenset("\\<")
_STATED = MappingProxyType({"\\": _boxed, "<": _tagged, "#": _hashed})
"""How a statement is read, by the first character of its mark; `_announced` for the word "answer"."""


def _clean(text: str) -> str | None:
    """The first sentence of a statement, without its full stop."""
    text = text.strip()[:_LONGEST]
    end = _SENTENCE.search(text)
    return (text[: end.start()] if end else text).strip() or None
