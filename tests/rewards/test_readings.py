"""Whole completions, read and graded by `answer`, `math_verify` and `dapo`; verdicts by hand."""

import pytest

from qerl_jax.rewards.functions import load_reward

# Completion, gold answer, verdict.
INSIDE = [  # an announcement inside a tag or box belongs to it
    ("<answer>The answer is 42</answer>", "42", 1), ("<answer>Answer: 42</answer>", "42", 1),
    ("<answer>**Answer:** 42</answer>", "42", 1), ("<answer>**Answer: 42**</answer>", "42", 1),
    ("<answer>Final answer: 42 dollars</answer>", "42", 1), ("<answer>The final answer is $42.</answer>", "42", 1),
    ("<answer>\n#### 42\n</answer>", "42", 1), ("\\boxed{\\text{Answer: } \\frac{1}{2}}", "\\frac{1}{2}", 1),
    ("\\boxed{\\text{The answer is } 42}", "42", 1), ("<answer>Answer: less than 42</answer>", "42", 0),
    ("<answer>The answer is 41 or 42</answer>", "42", 0), ("<answer>Answer: half of 42</answer>", "42", 0),
]  # fmt: skip
AFTER = [  # a heading or prose after a box or tag speaks about it
    ("\\boxed{42}\n\n#### Conclusion\nWe added 40 and 2.", "42", 1), ("\\boxed{42}\n#### Verification", "42", 1),
    ("\\boxed{42}\n\n#### Conclusion: 40 and 2 make it", "42", 1), ("\\boxed{42}\n#### Note", "42", 1),
    ("\\boxed{42}\n\n#### Final Result", "42", 1), ("\\boxed{42}\n#### 2) Check", "42", 1),
    ("\\boxed{42}\n\nThe answer is correct because 40 + 2 = 42.", "42", 1),
    ("\\boxed{42}\n\nThe answer is 42 because 40 + 2 = 42.", "42", 1),
    ("**Verified answer:** 42", "42", 1), ("Check: 6 * 7. The answer is 42.", "42", 1),
    ("\\boxed{3}\nCheck answer: 3*4=12", "3", 1), ("\\boxed{3}\nVerify the answer: 3*4=12", "3", 1),
    ("<answer>42</answer>\nThe answer is more than 40.", "42", 1),
    ("\\boxed{41}, no. The answer is 42.", "42", 1), ("\\boxed{41}, no. The answer is 42.", "41", 0),
    ("\\boxed{41}\n#### 42", "42", 1), ("\\boxed{41}\n#### 42", "41", 0), ("\\boxed{41}\n**Answer:** $42$", "42", 1),
    ("\\boxed{41}. The final answer is:\n\\[x = 42\\]", "42", 1), ("\\boxed{41}\nAnswer: -42", "-42", 1),
]  # fmt: skip
LISTS = [  # markers of a list are no values, and a list of several values is not one of them
    ("Answer:\n1. 42", "42", 1), ("Answer:\n1. 42", "1", 0), ("Answer:\n- 42", "42", 1), ("Answer:\n- 42", "-42", 0),
    ("**Answer:**\n\n* **42**", "42", 1), ("Answer:\n2) 42", "42", 1), ("Answer:\n-42", "-42", 1),
    ("Answer: - 42", "-42", 1), ("Answer:\n1. 42\n2. 43", "42", 0), ("Answer:\n- 42\n- 43", "43", 0),
    ("Answer:\n1.5", "1.5", 1),
]  # fmt: skip
TUPLES = [  # points, intervals and lists are no numbers, whatever their comma looks like
    ("\\boxed{1.2}", "(1,2)", 0), ("\\boxed{1.2}", "1,2", 0), ("\\boxed{1100}", "(1,100)", 0),
    ("\\boxed{(1,2)}", "1.2", 0), ("\\boxed{(1,100)}", "1100", 0), ("\\boxed{1.2}", "[1,2]", 0),
    ("\\boxed{1,100}", "1100", 1),
]  # fmt: skip
LATEX = [
    ("\\boxed{2\\times 3 = 6}", "6", 1), ("\\boxed{2 \\cdot 3 = 6}", "6", 1), ("\\boxed{\\frac{12}{2}=6}", "6", 1),
    ("\\boxed{12 \\div 2 = 6}", "6", 1), ("\\boxed{5\\ \\text{dollars}}", "5", 1),
    ("\\boxed{5\\quad\\mbox{km}}", "5", 1),
    ("\\boxed{120 \\text{ ft}^2}", "120", 1), ("\\boxed{120\\,\\text{cm}^{3}}", "120", 1),
    ("\\boxed{120 ft²}", "120", 1),
    ("\\boxed{\\approx 42}", "42", 1),  # as "about 42"
    ("\\boxed{{42}}", "42", 1), ("\\boxed{{\\frac{1}{2}}}", "0.5", 1), ("\\boxed{\\displaystyle 5}", "5", 1),
    ("\\boxed{6 \\times 7}", "6", 0), ("\\boxed{2\\times 10^3}", "2", 0), ("\\boxed{\\text{half of }4}", "4", 0),
    ("\\boxed{\\cdots 5 x^2}", "5", 0), ("\\boxed{5^2}", "5", 0), ("\\boxed{2\\,3}", "23", 0),
]  # fmt: skip


@pytest.mark.parametrize("name", ["answer", "math_verify", "dapo"])
@pytest.mark.parametrize(
    "rows", [INSIDE, AFTER, LISTS, TUPLES, LATEX], ids=["inside", "after", "lists", "tuples", "latex"]
)
def test_readings(rows, name):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    reward = load_reward(name)
    wrong = [row for row in rows if reward(completions=[row[0]], answer=[row[1]]) != [row[2]]]
    assert wrong == []


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("\\boxed{1.0, 2.0}", "1,2", 1),
        ("\\boxed{(1.0, 2.0)}", "(1,2)", 1),
        ("\\boxed{12}", "1,2", 0),
        ("\\boxed{0.5}", "0,5", 1),
        ("\\boxed{\\text{Answer: } x^2+1}", "1+x^2", 1),
        ("<answer>**Answer:** $x^2+1$</answer>", "1+x^2", 1),
    ],
)
def test_readings_of_formulas(completion, gold, value):
    pytest.importorskip("math_verify")
    assert load_reward("math_verify")(completions=[completion], answer=[gold]) == [value]
