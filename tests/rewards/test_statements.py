"""Where completions state their answers; expected texts by hand."""

from __future__ import annotations

import time

import pytest

from qerl_jax.rewards import statements
from qerl_jax.rewards.functions import load_reward


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("<answer> 5 </answer> \\boxed{6}", "5"),
        ("so \\boxed{4} and \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("The answer is 7. The final answer is $8$. I hope it is correct.", "$8$"),
        ("The answer is 7", "7"),
        ("The answer is: 7.5\nDone", "7.5"),
        ("It is 7.", None),
    ],
)
def test_formula_statement(text, stated):
    assert statements.formula_statement(text) == stated


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        (" 2 + 3 = 5. The answer is 5.", "5"),
        ("The answer is 5.\n\nThe answer is 6.", "5"),
        ("The answer is not yet known. So the answer is 6.", "not yet known"),
        ("The answer is the sum.\nThe answer is 6.", "6"),
        ("The answer is $1,234.50.", "$1,234.50"),
        ("The answer is 18 dollars. Good.", "18 dollars"),
        ("The answer is .", None),
        ("5", None),
    ],
)
def test_chain_of_thought_statement(text, stated):
    assert statements.chain_of_thought_statement(text) == stated


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("\\boxed{3}\nFinal Answer: The final answer is $4$. I hope it is correct.", "$4$"),
        ("The final answer is $0.5$. I hope it is correct.\n\nThe final answer is $6$", "$0.5$"),
        ("so \\boxed{3}", "3"),
        ("so 3", None),
    ],
)
def test_minerva_statement(text, stated):
    assert statements.minerva_statement(text) == stated


@pytest.mark.parametrize(
    ("text", "stated"),
    [("a\n#### 7\n#### 8", "7"), ("#### 1,000 eggs", "1,000 eggs"), ("#### ", None), ("\\boxed{2}", "2"), ("2", None)],
)
def test_solution_statement(text, stated):
    assert statements.solution_statement(text) == stated


@pytest.mark.parametrize("name", statements.STATEMENTS)
def test_a_reward_reads_an_answer_in_its_form(name):
    """What extraction takes out of the form is what was put in, and is correct where it is the gold answer."""
    if name == "math_verify":
        pytest.importorskip("math_verify")
    extract, form = statements.STATEMENTS[name]
    for text in ("12", "\\frac{1}{2}", "1,234"):
        completion = form.replace("{}", text)
        assert extract(completion) == text
        assert load_reward(name)(completions=[completion], answer=[text]) == [1]


@pytest.mark.parametrize(
    "text",
    ["The answer is " * 4000, "final answer is" * 4000, "####" * 8000, "\\boxed{" * 4000, "answer is " + "1" * 30_000],
)
def test_a_degenerate_completion_costs_no_time(text):
    for name in ("formula", "chain_of_thought", "minerva", "solution"):
        started = time.process_time()
        getattr(statements, f"{name}_statement")(text)
        assert time.process_time() - started < 0.2, name
