"""Which answers are correct: 352 pairs of words around a number, decided by hand, 196 of ways to write a number, held
against math-verify, and 380 pairs of a real gold answer and an answer judged by hand, and 158 completions of published
models judged by their authors (`tests/data/grading`), each in three forms of a whole completion, beside math-verify and
the extraction of lm-evaluation-harness (`tools/compare_graders.py`).
"""

import pytest

from qerl_jax.rewards.answers import same_answer

NUMBERS = ("2", "4", "5", "9", "12", "250", "3.5", "1,234")
# The number is stated, whatever stands beside it.
STATED = (
    "{}", "{} apples", "${}", "the answer is {}", "x = {}", "about {}", "= {}", "{} minutes", "so {}", "{} more apples",
    "**{}**", "\\boxed{{{}}}", "$ {} $", "{} dollars", "It is {}.", "the total is {} miles", "{} left over", "+{}",
    "{} km/h", "{} pairs",
)  # fmt: skip
# The number is a part, a multiple or a bound of the answer.
CHANGED = (
    "half of {}", "{} dozen", "less than {}", "more than {}", "at least {}", "at most {}", "twice {}", "a third of {}",
    "double {}", "up to {}", "under {}", "over {}", "{} and a half", "a quarter of {}", "fewer than {}", "{} or more",
    "minus {}", "{} below zero", "{} million", "{} squared", "greater than {}", "no more than {}", "-{}", "{} halves",
)  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_words_beside_a_number(number):
    assert [text for text in STATED if not same_answer(text.format(number), number)] == []
    assert [text for text in CHANGED if same_answer(text.format(number), number)] == []


@pytest.mark.parametrize(
    "unit", ["\\text{ L}", "\\ \\mathrm{W}", "^\\circ\\text{F}", "^{\\circ} C", "°C", "°\\,\\text{K}"]
)
def test_units_of_one_capital(unit):
    """Where it stands behind a degree sign or is written as text; `5A` and `5 N` may be anything."""
    assert same_answer(f"\\boxed{{68{unit}}}", "68") and not same_answer(f"\\boxed{{68{unit}3}}", "683")
    assert not any(same_answer(text, "5") for text in ("5 A", "5N", "5\\text{ X}", "5\\text{ A} + \\text{ B}"))


WRITTEN = (
    "42", "42.0", "-42", "84/2", "\\frac{84}{2}", "0.5", "1/2", "\\frac{1}{2}", "0.25", "1234", "1,234", "3", "2",
)  # fmt: skip


def test_numbers_agree_with_math_verify():
    """Every way of writing against every other."""
    math_verify = pytest.importorskip("math_verify")
    parsed = {text: math_verify.parse(f"${text}$", parsing_timeout=None) for text in WRITTEN}
    differ = [
        (given, gold)
        for given in WRITTEN
        for gold in WRITTEN
        if same_answer(given, gold) != math_verify.verify(parsed[gold], parsed[given], timeout_seconds=None)
    ]
    assert differ == []


SPACES, FRACTIONS = ("\\ ", "\\,", "\\;", "\\:", "\\quad", "\\qquad"), ("\\frac", "\\dfrac", "\\tfrac")
TEXTS = ("text", "textbf", "textit", "textrm", "mbox", "mathrm", "mathbf")
SPELLINGS = {
    "9500": [
        *("9500\\", "9500 \\\\", "\\boxed{9500\\ }"),
        *("9{,}500", "9,\\!500", "\\displaystyle 9500", "\\textstyle 9500", "{9500}"),
        *("\\(9500\\)", "\\[9500\\]", "\\$9500"),
        *(f"9{space}500" for space in " ~\u00a0\u2009\u202f"),
        *(f"9500{space} dollars" for space in SPACES), *(f"\\{text}{{9500}}" for text in TEXTS),
    ],
    "120": [
        *(f"120 \\{text}{{ ft}}^{power}" for text in TEXTS for power in ("2", "3", "{2}", "{3}")),
        *(f"120 {unit}{power}" for unit in ("ft", "cm", "km", "mm", "in") for power in ("^2", "^{3}", "²", "³")),
        "120^\\circ", "120^{\\circ}",
    ],
    "-7": ["−7", "–7", "‒7"],
    "0.5": [f"{name}{digits}" for name in FRACTIONS for digits in ("12", " 1 2", "{1}{2}")],
    "1.5": ["1 1/2", *(f"1{name}{{1}}{{2}}" for name in FRACTIONS)],
}  # fmt: skip


def test_every_spelling_of_a_number():
    """Each alternative of `answers._LATEX` and `_NOTATION`."""
    for gold, texts in SPELLINGS.items():
        assert [text for text in texts if not same_answer(text, gold)] == []


# Answers that our grader judges wrong, and why it stays so.
KNOWN = {
    ("18", "eighteen"): "number words are not read",
    ("160", "2 hours and 40 minutes"): "nor are two units",
    ("(2,\\infty)", "x > 2"): "an inequality for an interval: so that the inequality of the question is no answer",
    ("(-\\infty, 0]", "x \\le 0"): "likewise",
    ("x \\in [-2,7]", "-2 \\le x \\le 7"): "likewise",
    ("3R^2", "3r^2"): "math-verify takes letters in any case",
    ("19", "19 \\pmod{1000}"): "a modulus is not read",
}
# In forms that math-verify knows, the other answers to MATH, AIME and AMC that it judges differently: it is wrong.
OURS_ALONE = {("52_8", "52_9"), ("4210_{5}", "4210_6"), ("\\text{ellipse}", "an ellipse")}


def test_real_gold_answers_in_whole_completions(tool):
    """Ours is right but for `KNOWN`: each pair in one of the three forms of its dataset, in turn."""
    pytest.importorskip("math_verify")
    graders = tool("compare_graders")
    cases = list(graders.hand_cases())
    cases = [cases[3 * pair + (pair + 1) % 3] for pair in range(len(cases) // 3)]
    wrong = [case for case in cases if graders.is_correct(graders.ours(case.dataset), case) != case.correct]
    assert len(cases) == 380 and sorted((case.gold, case.answer) for case in wrong) == sorted(KNOWN)


@pytest.mark.nightly
def test_real_gold_answers_by_all_graders(tool):
    """In every form: ours is right wherever any other grader is, in the forms that it knows."""
    pytest.importorskip("math_verify")
    rows = tool("compare_graders").compare(tool("compare_graders").hand_cases())
    assert len(rows) == 3 * 380
    assert {row["dataset"] for row in rows} == {"gsm8k", "math500", "aime24", "aime25", "amc23"}
    wrong = [row for row in rows if row["verdicts"]["ours"] != row["correct"]]
    assert {(row["gold"], row["answer"]) for row in wrong} == set(KNOWN) and len(wrong) == 3 * len(KNOWN)
    for row in wrong:
        others = dict(row["verdicts"])
        if row["form"] == "tags":  # math-verify does not know them
            del others["math-verify"]
        assert row["correct"] not in others.values(), row
    formulas = [row for row in rows if row["form"] in ("boxed", "minerva")]
    differ = [row for row in formulas if row["verdicts"]["ours"] != row["verdicts"]["math-verify"]]
    assert {(row["gold"], row["answer"]) for row in differ} == OURS_ALONE
    assert len(differ) == 2 * len(OURS_ALONE)  # tags are no form of formulas


def test_completions_of_published_models(tool):
    """Judged by their authors (openai/grade-school-math): ours agrees in every form, and so does lm-eval's extraction,
    also where a completion breaks off.
    """
    pytest.importorskip("math_verify")
    rows = tool("compare_graders").compare(
        tool("compare_graders").model_cases(tool("compare_graders").stored_completions())
    )
    assert len(rows) == 3 * 158 and sum(row["correct"] for row in rows) == 3 * 72
    for row in rows:
        assert row["verdicts"]["ours"] == row["correct"], row
        assert {row["verdicts"][name] for name in row["verdicts"] if "lm-eval" in name} == {row["correct"]}, row
    assert any(row["answer"] == "" for row in rows) and any("," in row["gold"] for row in rows)
