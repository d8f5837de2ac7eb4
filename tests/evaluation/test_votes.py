"""Verdicts and votes, with the rewards that training uses."""

import pytest

from qerl_jax.evaluation.grading import grader_of
from qerl_jax.rewards.functions import load_reward

# Answers, index of the winner, whether it was a tie.
VOTES = {
    "answer": [
        (["12", "13", "12.0"], 0, False),
        (["13", "$12", "12 apples", "13"], 0, True),
        (["12", "13", "13", "12"], 0, True),
        (["1,234", "7", "1234"], 0, False),
        ([None, "5", None, None], 1, False),  # an answer that is missing has no vote
        ([None, None], None, False),
        (["7", "twelve", " Twelve"], 1, False),  # texts agree up to case and white space
        (["3", "1", "2", "2"], 2, False),
        (["3,5", "4", "4", "3.5", "3.5"], 0, False),  # right where 3.5 is the answer, but not the other way round
        (["3.5", "4", "4", "3,5", "3,5"], 0, False),
    ],
    "math_verify": [
        (["\\frac{1}{2}", "3", "0.5", "3", "1/2"], 0, False),
        (["3", "x^2-1", "(x-1)(x+1)"], 1, False),
        (["[2,5)", "[2,5]", "[2, 5]"], 1, False),
    ],
    "dapo": [(["12", "x=7", "7"], 1, False), (["1,000", "1", "1000"], 0, False)],
}


@pytest.mark.parametrize("name", VOTES)
def test_equivalent_answers_vote_together_and_the_first_wins_a_tie(name):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    grader = grader_of(name, load_reward(name))
    assert grader.votes and grader.extract("\\boxed{5}") == "5"
    for answers, winner, tied in VOTES[name]:
        assert grader.majority(answers) == (winner, tied), answers


def test_equal_texts_are_compared_once():
    calls = []

    def reward(*, completions, answer, **_):
        calls.append((completions, answer))
        return [0.0] * len(completions)

    assert grader_of("answer", reward).majority(["a", "b", "a", "b", "a"]) == (0, False)
    assert calls == [(["<answer>b</answer>", "<answer>a</answer>"], ["a", "b"])]  # either may be the answer


def test_verdicts_of_whole_completions():
    completions = ["<answer>5</answer>", "<answer>6</answer>", "It is 5. The answer is 5.", "5"]
    rows = (["p"] * 4, ["5"] * 4, completions, [0, 1, 2, 3])
    grader = grader_of("answer", load_reward("answer"))
    assert grader.verdicts(*rows) == ["correct", "wrong", "correct", "unreadable"]
    assert grader.verdicts(["p"], [""], ["<answer>5</answer>"], [0]) == ["no gold"]


def test_a_reward_that_compares_no_texts_takes_no_votes():
    grader = grader_of("code", load_reward("soft_format"))
    assert not grader.votes and grader.extract("<answer>5</answer>") is None
