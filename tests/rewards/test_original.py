"""Parity with the released scorers: the values beside each text were computed by QeRL's own functions (e8c6e79).
Those of `xml_count` are in `tests/golden`.
"""

from __future__ import annotations

import pytest

from qerl_jax.rewards import functions
from qerl_jax.rewards.functions import load_reward

# Completion, gold answer, `correctness_reward_func` / 2 of utils/rewards.py, accuracy of eval/gsm8k.py.
ANSWERS = [
    ("<answer>19</answer>", "1234", 0, 1),  # the evaluation compares first characters
    ("<answer>1234</answer>", "1,234", 0, 1),  # the reward cannot do without the comma
    ("<answer>1,234</answer>", "1,234", 1, 1),
    ("<answer> 42 </answer>", "42", 1, 1),
    ("42", "42", 1, 1),  # no tags needed
    ("<answer>$42</answer>", "42", 0, 0),
    ("<answer>1</answer><answer>42</answer>", "42", 1, 1),
    ("<answer>42.0</answer>", "42", 0, 1),
    ("no tags", "42", 0, 0),
]


@pytest.mark.parametrize(("text", "gold", "reward", "evaluation"), ANSWERS)
def test_answers_as_the_release_scores_them(text, gold, reward, evaluation):
    assert load_reward("qerl_exact")(completions=[text], answer=[gold]) == [reward]
    assert load_reward("qerl_first_character")(completions=[text], answer=[gold]) == [evaluation]


def test_an_empty_answer_is_wrong_where_the_original_crashes():
    assert load_reward("qerl_first_character")(completions=["<answer></answer>"], answer=["42"]) == [0.0]


def test_ours_differ_where_the_release_is_wrong():
    """Each defect once more, as `answer` and `strict_format` see it."""
    texts = ["<answer>19</answer>", "<answer>1234</answer>", "<answer>$42</answer>", "42"]
    assert functions.answer(completions=texts, answer=["1234", "1,234", "42", "42"]) == [0, 1, 1, 0]
    two_lines = "<think>\na\nb\n</think>\n<answer>\n5\n</answer>"  # the release's strict format: 0.2 only for one line
    assert functions.strict_format(completions=[two_lines]) == [1]
