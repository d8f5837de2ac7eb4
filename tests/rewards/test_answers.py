"""Which answers state the gold number: 352 pairs of words around a number, decided by hand, and 196 of ways to write
a number, held against math-verify.
"""

from __future__ import annotations

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


WRITTEN = (
    "42",
    "42.0",
    "-42",
    "84/2",
    "\\frac{84}{2}",
    "0.5",
    "1/2",
    "\\frac{1}{2}",
    "0.25",
    "1234",
    "1,234",
    "3",
    "2",
)


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
