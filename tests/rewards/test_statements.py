"""Where completions state their answers; expected texts by hand."""

import time

import pytest

from qerl_jax.evaluation.grading import STATED, grader_of
from qerl_jax.rewards.answers import parse_number
from qerl_jax.rewards.functions import load_reward
from qerl_jax.rewards.statements import stated_answer


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        # The last statement counts, whatever its form.
        ("<answer> 5 </answer> \\boxed{6}", "6"),
        ("<answer>The answer is 5</answer> \\boxed{6}", "6"),
        ("\\boxed{6}, so <answer> 5\n</answer>", "5"),
        ("The answer is 7. The final answer is $8$. I hope it is correct.", "$8$"),
        ("The answer is 7.\n#### 8", "8"),
        ("#### 8\nAnswer: 7", "7"),
        ("<answer>1<answer>2</answer> and </answer><answer>", "2"),
        ("<answer>thus \\boxed{4} apples</answer>", "4"),
        ("<answer>First \\boxed{4}, then 3 more. The final answer is $7$.</answer>", "$7$"),
        ("<answer>\\boxed{4}. The answer is in dollars.</answer>", "4"),
        # Forms.
        ("The answer is: 7.5\nDone", "7.5"),
        ("**Final Answer:** 18 dollars. Good.", "18 dollars"),
        ("**Answer**: **73**", "73"),
        ("The final answer is:\n\\[\n\\frac{1}{2}\n\\]", "\\frac{1}{2}"),
        ("Final Answer:\n12", "12"),
        ("\\fbox{3}", "3"),
        ("\\boxed {\\text{odd}}", "\\text{odd}"),
        # Boxes that stand together are one answer, each value once; others are not added up.
        ("so $\\boxed{4}$ and $\\boxed{\\frac{1}{2}}$.", "4, \\frac{1}{2}"),
        ("$x = \\boxed{1}$ or $x = \\boxed{2}$", "1, 2"),
        ("\\(y_1 = \\boxed{1}\\) and \\(y_{12} = \\boxed{2}\\)", "1, 2"),
        ("\\[\\boxed{7}\\]\n\\[\\boxed{7}\\]", "7"),
        ("\\boxed{4}, no: \\boxed{3}", "3"),
        ("\\boxed{4}\n\n\\boxed{3}", "3"),
        ("\\boxed{2 or \\text{\\boxed{1}}, as the answer is 5}", "1"),
        ("Case 1 gives \\boxed{4} apples, case 2 gives \\boxed{5}.", "5"),
        # What has no end is no statement, nor is a number that merely occurs, a heading or a sentence about answers.
        ("\\boxed{3} or rather \\boxed{12", "3"),
        ("Answer: 7\n\\boxed{8", "7"),
        ("#### 7\n<answer>8", "7"),
        ("<answer>7</answer>\n####", "7"),
        ("The final answer is \\(\\boxed{12", None),
        ("</answer><answer>3", None),
        ("It is 7.", None),
        ("#### Step 1: add 2 and 3", None),
        ("#### 1. Add them", None),
        ("\\boxed{3}. The answer is in dollars.", "3"),
        ("\\boxed{3}: the answer is obtained by adding 5 to the boys, " + "then halving what is left" * 3, "3"),
        ("The answer is Evelyn.", "Evelyn"),
        ("The final answer is:\n\\[\n\\boxed{8", None),
        ("", None),
    ],
)
def test_stated_answer(text, stated):
    assert stated_answer(text) == stated


@pytest.mark.parametrize("name", STATED)
def test_a_reward_reads_an_answer_in_its_form(name):
    """What extraction takes out of the form is what was put in, and is correct where it is the gold answer."""
    if name == "math_verify":
        pytest.importorskip("math_verify")
    reward = load_reward(name)
    grader = grader_of(name, reward)
    for text in ("12", "\\frac{1}{2}", "1,234"):
        completion = f"<answer>{text}</answer>"
        assert grader.extract(completion) == text
        assert reward(completions=[completion, f"\\boxed{{{text}}}"], answer=[text] * 2) == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        *("The answer is " * 4000, "final answer is" * 4000, "####" * 8000, "#### \n" * 8000, "\\boxed{" * 4000),
        *("answer is " + "1" * 30_000, "<answer>" * 4000, "\\boxed{1}" * 4000, "Answer: $$" + " " * 30_000),
        *("\\boxed{1}" + " \n" * 15_000 + "\\boxed{2}", "answer" + " " * 30_000, "answer" + "*_" * 15_000),
        *("<answer>\\text{answer:" + "*" * 30_000 + "</answer>", ("Answer:\n" + " " * 900) * 32),
        *(("answer is a" + " " * 900 + "b") * 32, "The answer is x5\n\\boxed{" * 4000, "answer: x5 <answer>" * 4000),
        "\\boxed{3}, " + "x_0 = " * 5000 + "\\boxed{7}",
        *("Answer:\n" + "- 4\n" * 8000, "\\boxed{1}" + "answer: x5\n" * 4000),
    ],
)
def test_a_degenerate_completion_costs_no_time(text):
    started = time.process_time()
    stated_answer(text)
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize(
    ("within", "beyond", "stated", "instead"),
    [
        ("\\boxed{" + "1" * 999 + "}", "\\boxed{" + "1" * 1000 + "}", "1" * 999, None),
        ("\\boxed{7} " + "<answer>" * 31, "\\boxed{7} " + "<answer>" * 32, "7", None),
        ("\\boxed{7} The answer is " + "1" * 80, "\\boxed{7} The answer is " + "1" * 81, "1" * 80, "7"),
    ],
    ids=["characters of a box", "marks", "characters of a sentence beside a box"],
)
def test_both_sides_of_each_limit(within, beyond, stated, instead):
    assert (stated_answer(within), stated_answer(beyond)) == (stated, instead)


def test_a_long_text_states_no_number():
    assert (parse_number("7".rjust(1000)), parse_number("7".rjust(1001))) == (7, None)
