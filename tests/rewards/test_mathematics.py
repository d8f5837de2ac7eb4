"""Rewards for formulas: Minerva's normalization against the released one, math-verify against worked cases."""

import json
from pathlib import Path

import pytest

from qerl_jax.rewards import mathematics
from qerl_jax.rewards.outcomes import Unparsed

CASES = Path(__file__).resolve().parent.parent / "data" / "grading" / "math_verify_cases.jsonl"

# Text and what `normalize_final_answer` of QeRL's utils/math_dapo.py (e8c6e79) makes of it.
NORMALIZED = [
    ("x = 12", "12"), ("\\frac12", "\\frac{1}{2}"), ("\\dfrac{1}{2}", "\\dfrac{1}{2}"), ("\\sqrt3", "\\sqrt{3}"),
    ("1,234", "1234"), ("1,234.5", "1,234.5"), ("12 dollars", "12"), ("$\\frac{3}{4}$", "\\frac{3}{4}"),
    ("so $x$ is", "x"), ("\\text{Evelyn}", "Evelyn"), ("\\boxed{7}", "7"), ("90^\\circ", "90"), ("10\\%", "10\\%"),
    ("3\\text{ cm}", "3"), ("\\mathrm{th}5", "5"), ("an apple", "apple"), ("a banana", "banana"),
    ("5 square units", "5"), ("\\$42.", "42."), ("{,}", ""), ("100\\ \\text{m}", "100"),
    ("\\text{A}\\text{B}", "AB"), ("\\overline{AB}", "AB"), ("7.0", "7.0"), ("  8 ", "8"),
]  # fmt: skip

# Completion, gold answer, what the release's `compute_score` gives, and where ours departs from it.
DAPO = [
    ("Answer: 5", "5", 1), ("answer : 5\nmore", "5", 1), ("Answer: 6\nAnswer: 5", "5", 1),
    ("Answer: 5" + " " * 300, "5", 1), ("<answer>5</answer>", "5", 1),
    ("The answer is 5", "5", 1), ("Answer: $x = \\frac12$", "\\frac{1}{2}", 1), ("Answer: 1,234", "1234", 1),
    ("Answer: 1234", "1,234", 1), ("**Answer:** 5", "5", 1), ("Answer: 0.5", "1/2", 1), ("Answer:5.", "5", 1),
    ("Answer: 6", "5", 0), ("Answer: x", "\\frac{1}{2}", 0),
    ("Answer: x^2", "y = x^2", 1), ("Answer: y = x^2", "x^2", 1), ("Answer: x^2", "x^2 = y", 0),
    ("Answer: x^2", "y = " + 300 * "1 + " + "x^2 = x^2", 1),
]  # fmt: skip

_COLUMN = "\\begin{pmatrix} -1/3 \\\\ 2 \\end{pmatrix}"


@pytest.mark.parametrize(("text", "normal"), NORMALIZED)
def test_normalize_is_minervas(text, normal):
    assert mathematics.normalize(text) == normal


@pytest.mark.parametrize(("completion", "gold", "value"), DAPO, ids=range(len(DAPO)))
def test_dapo(completion, gold, value):
    assert mathematics.dapo(completions=[completion], answer=[gold]) == [value]


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("<answer> 42 </answer>", "42", 1),  # 0 with the release's settings, see below
        ("<answer>1234</answer>", "1,234", 1),
        ("<answer>0.5</answer>", "\\frac{1}{2}", 1),
        ("<answer>\\frac12</answer>", "1/2", 1),
        ("<answer>(x-1)(x+1)</answer>", "x^2-1", 1),
        ("<answer>(x-1)(x+2)</answer>", "x^2-1", 0),
        ("<answer>$18</answer>", "\\$18", 1),
        ("<answer>" + _COLUMN + "</answer>", _COLUMN, 1),
        ("<answer>thus \\boxed{4}</answer>", "4", 1),
        ("<answer>\\text{Evelyn}</answer>", "Evelyn", 1),
        ("<answer>an ellipse.</answer>", "\\text{ellipse}", 1),
        ("<answer>a circle</answer>", "\\text{ellipse}", 0),
        ("<answer>Sam and the dog</answer>", "\\text{Sam and the dog}", 1),
        ("<answer>52_{8}</answer>", "52_8", 1),  # math-verify itself takes any base, see the next two
        ("<answer>52_9</answer>", "52_8", 0),
        ("<answer>52</answer>", "52_8", 1),
        ("first \\boxed{3}, no: \\boxed{4}", "4", 1),
        ("first \\boxed{4}, no: \\boxed{3}", "4", 0),
        ("The final answer is $4$.", "4", 1),
        ("$\\boxed{1}$ and $\\boxed{2}$", "\\{1, 2\\}", 1),
        ("<answer>\\boxed{2}, \\boxed{1}</answer>", "1, 2", 1),
        ("\\boxed{1} or \\boxed{2}", "2", 0),
        ("<answer>0.333333</answer>", "\\frac{1}{3}", 1),
        ("<answer>0.22</answer>", "0,22", 1),
        ("<answer>0.333</answer>", "\\frac{1}{3}", 0),
        ("<answer>12.0000001</answer>", "12", 1),
        ("<answer>12.00001</answer>", "12", 0),
        ("<answer>1.414214</answer>", "\\sqrt{2}", 1),
        *((f"<answer>{stated}</answer>", "0.5", 1) for stated in ("50\\%", "50.0 %", "0.5\\%")),
        *((f"<answer>{stated}</answer>", "12.5\\%", 1) for stated in ("12.5", "\\frac{1}{8}", "12.50\\%")),
        *((f"<answer>{stated}</answer>", "12.5\\%", 0) for stated in ("1250", "1250\\%", "0.125\\%", "12.6")),
        *((f"<answer>{stated}\\%</answer>", stated, 1) for stated in ("12.5", "-5", "1,250", "33\\frac{1}{3}")),
        *((f"<answer>{stated}</answer>", "33\\frac{1}{3}\\%", 1) for stated in ("\\frac{100}{3}", "1/3", "100/3\\%")),
        *((f"<answer>{stated}</answer>", "33\\frac{1}{3}\\%", 0) for stated in ("33", "33\\%", "33.3\\%", "1/3\\%")),
        ("<answer>33.333333\\%</answer>", "\\frac{100}{3}", 1),
        ("<answer>x\\%</answer>", "x\\%", 1),
        # What math-verify pays for, and is wrong: its tolerance is absolute, it drops an ellipsis, and reads an
        # interval as the set of its ends.
        ("<answer>0.0000002</answer>", "0.0000001", 0),
        ("<answer>0.0000002x</answer>", "0.0000001", 0),
        ("<answer>0.0000002</answer>", "\\frac{\\sqrt{2}}{10000000}", 0),
        ("<answer>1, 2, \\ldots, 10</answer>", "\\{1, 2, 10\\}", 0),
        ("<answer>\\{1, 2, \\ldots, 10\\}</answer>", "\\{1, 2, \\ldots, 10\\}", 1),
        ("<answer>(1,5)</answer>", "\\{1,5\\}", 0),
        ("<answer>x^2</answer>", "x^2+C", 0),
        ("<answer>3</answer>", "3\\pi", 0),
        ("<answer>1-10</answer>", "\\{1,10\\}", 0),
        ("<answer>1000001</answer>", "1000000", 0),
        ("<answer>5</answer>", "", None),
        # It drops all that stands after `\\mathrm{e}` and other units.
        ("<answer>1 + \\frac{1}{\\mathrm{e}}</answer>", "1 - \\frac{1}{\\mathrm{e}}", 0),
        ("<answer>1</answer>", "1 - \\frac{1}{\\mathrm{e}}", 0),
        ("<answer>1 - 1/e</answer>", "1 - \\frac{1}{\\mathrm{e}}", 1),
        ("<answer>e^{2\\pi i/3}</answer>", "\\mathrm{e}^{2\\pi\\mathrm{i}/3}", 1),
        *((f"<answer>{stated}</answer>", "5 - \\mathrm{m}^2", None) for stated in ("5", "1, 2, \\ldots")),
    ],
)  # fmt: skip
def test_math_verify(completion, gold, value):
    pytest.importorskip("math_verify")
    assert mathematics.math_verify(completions=[completion], answer=[gold]) == [value]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, 6))])
def test_math_verifys_own_cases(part):
    """Ours agrees with the expectations of math-verify's tests (options at their defaults) but in rows that say why."""
    pytest.importorskip("math_verify")
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    differ = [row for row in rows if "why" in row]
    assert len(rows) == 261 and len(differ) == 8 and all(row["ours"] != row["expected"] for row in differ)
    rows = [row for row in rows if "why" not in row][part::6] + (differ if part == 0 else [])
    rewards = [
        mathematics.math_verify(completions=[f"<answer>{row['text']}</answer>"], answer=[row["gold"]]) for row in rows
    ]
    assert [
        row for row, reward in zip(rows, rewards, strict=True) if reward != [row.get("ours", row["expected"])]
    ] == []


def test_math_verify_reads_no_answer_into_a_text_without_one():
    """A number that merely occurs is not an answer: guessing many of them must not pay."""
    pytest.importorskip("math_verify")
    values = mathematics.math_verify(completions=["3 and 4 make 7", "", "<answer></answer>"], answer=["7"] * 3)
    assert values == [0, 0, 0] and all(isinstance(value, Unparsed) for value in values)
