"""Rewards: numbers in text, formats, and the calling convention; each defect of the released scorer is a case."""

import math
import re
import time
from fractions import Fraction

import numpy as np
import pytest

from qerl_jax.data.presets import PRESETS
from qerl_jax.rewards import functions
from qerl_jax.rewards.answers import parse_number, same_answer, unbox
from qerl_jax.rewards.functions import RewardError, load_reward, score
from qerl_jax.rewards.outcomes import Crashed, TimedOut, Unparsed

NUMBERS = [
    ("42", 42), ("-3", -3), ("−3", -3), ("+7", 7), ("3.50", Fraction(7, 2)), (".5", Fraction(1, 2)), ("1,234", 1234),
    ("1,234,567.25", Fraction(123456725, 100)), ("$1,500", 1500), ("\\$20", 20), ("75%", 75), ("18 eggs", 18),
    ("x = 12", 12), ("\\boxed{42}", 42), ("so \\boxed{\\frac{3}{4}}", Fraction(3, 4)), ("3/4", Fraction(3, 4)),
    ("-1/2", Fraction(-1, 2)), ("-\\frac{1}{2}", Fraction(-1, 2)), ("1e3", 1000), ("5 of 5", 5), ("5 or 6", None),
    ("none", None), ("", None), ("1/0", None), ("12,34", None), ("1e999999999", None), ("7" * 1001, None),
    ("- 5", -5), ("-$5", -5), ("- 1/2", Fraction(-1, 2)), ("The answer is **18**.", 18),
    ("Janet makes $18 every day at the farmers' market.", 18), ("Answer: 18 \\text{ eggs}", 18), ("\\( 5 \\)", 5),
    ("90^\\circ", 90), ("$5/hour", 5), ("5 km/h", 5), ("It's 5.", 5), ("5/x", None), ("5!", None), ("2x", None),
    ("2 x", None), ("2 pi", None), ("2 a", None), ("2 a day", 2), ("2 million", 2_000_000),
    ("1.45 million", 1_450_000), ("$276K", 276_000), ("-3 thousand dollars", -3000), ("2 hundred thousand", None),
    ("1 million 450 thousand", None), ("5km", 5), ("45miles", 45), ("540m", 540), ("2cos", None),
    ("5 + 13 = 18", 18), ("$9 * 2 = $18", 18), ("5 + 13", None), ("2 + x = 5", None), ("1 + 1 = 2 = 3", None),
    ("`18`", 18), ("USD 18", 18), ("2**3", None), ("(5, 5)", None), ("x = 5, y = 5", None), ("x + y = 5", None),
    ("|5|", None), ("Room 3", None), ("x/2", None), ("3x/4", None), ("1\\frac{2}{2}", None),
]  # fmt: skip


def test_parse_number():
    assert [(text, parse_number(text)) for text, _ in NUMBERS] == NUMBERS


def test_unbox_balances_braces():
    assert unbox("a \\boxed{x_{1} + {2}} b") == "x_{1} + {2}"
    assert unbox("\\boxed{1} then \\boxed{2}") == "2"


SAME = [
    ("19", "1234", False),  # the released evaluation compares the first character
    ("1234", "1,234", True),  # in the release an answer without the gold answer's comma is wrong
    (" 42 ", "42", True), ("420", "42", False), ("four", "4", False), ("Paris", "paris", True), ("2", "x^2", False),
    ("y^2", "x^2", False), ("x^2", "x^2", True), ("2", "2\\sqrt{x}", False), ("B3", "A3", False), ("a3", "A3", True),
    ("- 5", "5", False), ("- 5", "-5", True), ("2", "\\frac{x}{2}", False),
]  # fmt: skip


def test_same_answer():
    assert [(given, gold, same_answer(given, gold)) for given, gold, _ in SAME] == SAME


# Completions of a model that learned the tags and nothing else, and gold answers: short, in perfect form, wrong.
COLLAPSED = [
    ("<think>16-3-4=9</think><answer>9</answer>", "18"),
    ("<think>\n5 * 12 = 60\n</think>\n<answer>60</answer>", "55"),
    ("<think>She has 3 left.</think>\n<answer>\n3\n</answer>", "13"),
    ("<think></think><answer>0</answer>", "540"),
    ("So \\boxed{7}.", "70"),
    ("The answer is 1 or 2 or 3.", "2"),
    ("\\boxed{1}, \\boxed{2}, \\boxed{3}", "2"),  # candidates are not answers
    ("<answer>1</answer> <answer>2</answer> <answer>3</answer>", "2"),
]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "codeforces"])
def test_nothing_is_paid_for_form(name):
    """No default reward of a dataset can be raised without being right."""
    pytest.importorskip("math_verify")
    texts, golds = zip(*COLLAPSED, strict=True)
    for reward in PRESETS[name].rewards:
        assert load_reward(reward)(completions=texts, answer=golds) == [0.0] * len(texts), reward
        right = [f"<think>…</think><answer>{gold}</answer>" for gold in golds]
        assert load_reward(reward)(completions=right, answer=golds) == [1.0] * len(texts), reward


# How numbers are written, beside the gold answer, and whether it is the same one.
NOTATION = [
    ("9{,}500", "9500", True), ("$7{,}250$", "7,250", True), ("1\\frac{1}{2}", "1.5", True),
    ("1\\frac12", "3/2", True), ("2 3/4", "2.75", True), ("-1\\frac{1}{2}", "-1.5", True), ("–5", "-5", True),
    ("−5", "-5", True), ("**73**", "73", True), ("10 000", "10000", True), ("10\\,000", "10000", True),
    ("1 234 567", "1234567", True), ("3,5", "3.5", True), ("3,500", "3500", True), ("\\frac12", "0.5", True),
    ("\\text{18 dollars}", "18", True), ("\\$18", "18", True),
    ("3,500", "3.5", False), ("1 2", "12", False), ("3\\frac{1}{2}", "1.5", False), ("3–5", "-5", False),
    ("3-5", "5", False), ("5 000", "5", False), ("3, 5", "3.5", False),
    ("0.33", "1/3", False), ("1, 2", "2", False), ("–5", "5", False), ("7 \\frac{1}{2}", "7", False),
    ("1234,5", "1,234.5", False), ("1 2/2", "2", False),  # no mixed number
]  # fmt: skip


@pytest.mark.parametrize("name", ["answer", "math_verify", "dapo"])
def test_one_notation_for_all(name):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    for given, gold, equal in NOTATION:
        for form in ("<answer>{}</answer>", "so \\boxed{{{}}}."):
            value = load_reward(name)(completions=[form.format(given)], answer=[gold])
            assert value == [float(equal)], (given, gold, form)


def test_formats():
    good = "<think>one\ntwo\n\nthree</think>\n<answer>3</answer>"  # several lines never matched in the release
    cases = [good, f"Well. {good}", "<answer>3</answer><think>x</think>", "<think>x</think> then <answer>3</answer>"]
    cases.append(good + good)
    assert functions.strict_format(completions=cases) == [1, 0, 0, 0, 0]
    assert functions.soft_format(completions=cases) == [1, 1, 0, 0, 1]


def test_soft_format_is_the_pattern():
    """All texts of up to five of these pieces, against the pattern whose searches it replaces."""
    pattern = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    texts = [""]
    for _ in range(5):
        texts += [text + piece for text in texts for piece in ("<think>", "</think>", "<answer>", "</answer>", " x")]
        texts = sorted(set(texts))[:4000]
    expected = [float(pattern.search(text) is not None) for text in texts]
    assert 10 < sum(expected) < len(texts)
    assert functions.soft_format(completions=texts) == expected


@pytest.mark.parametrize(
    "text",
    ["<think>" * 4000, "<think></think><answer>" * 1200, "<answer>" * 4000, "<answer>" + "1" * 30_000 + "</answer>",
     "Answer: " * 4000, "```python\n" * 3000],
    ids=["think", "unit", "answer", "digits", "line", "fence"],
)  # fmt: skip
def test_a_degenerate_completion_costs_no_time(text):
    """Some 30,000 characters of repetition; the patterns these searches replaced took 0.3 to 35 s."""
    rows = {"completions": [text], "answer": ["7"]}
    for name in ("answer", "soft_format", "strict_format", "dapo"):
        started = time.process_time()
        assert load_reward(name)(**rows)[0] <= 0.25
        assert time.process_time() - started < 0.2, name


def test_overlong_is_equation_13_of_dapo():
    """Limit 100, buffer 20: nothing to 80 tokens, then a twentieth a token."""
    lengths = [0, 80, 81, 90, 100, 101]
    values = functions.overlong(
        completion_lengths=lengths, max_completion_length=[100] * 6, overlong_buffer=[20] * 6, completions=[""] * 6
    )
    assert values == pytest.approx([0, 0, -0.05, -0.5, -1, -1])


def test_score_counts_what_failed_and_leaves_it_out():
    """None counts for nothing; a row whose grading failed has no total, even if other rewards know it; a program that
    met its limit keeps its share.
    """
    values = [1.0, None, Unparsed(0.0), TimedOut(math.nan), Crashed(math.nan), TimedOut(0.5)]
    rewards = {"b": lambda **_: [1.0] * 6, "a": lambda **_: values}  # weights are in this order
    totals, parts = score(rewards, (0.1, 2.0), ["p"] * 6, ["c"] * 6, ["x"] * 6)
    assert totals == pytest.approx([2.1, 0.1, 0.1, math.nan, math.nan, 1.1], nan_ok=True)
    assert parts["a"] == pytest.approx([1, math.nan, 0, math.nan, math.nan, 0.5], nan_ok=True)
    assert parts["a/parse_failure"] == [0, 0, 1, 0, 0, 0]
    assert parts["a/timeout"] == [0, 0, 0, 1, 0, 1]
    assert parts["a/crash"] == [0, 0, 0, 0, 1, 0]
    assert set(parts["b/timeout"]) == {0.0}


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match=r"overlong.*completion_lengths"):
        score({"overlong": functions.overlong}, (1.0,), ["p"], ["c"], ["x"])


def test_a_reward_of_weight_0_is_shown_alone():
    """What it lacks, or timed out on, changes no total."""
    rewards = {"pays": lambda **_: [1.0, None, 0.5], "shown": lambda **_: [TimedOut(math.nan), 1.0, 2.0]}
    totals, parts = score(rewards, (1.0, 0.0), ["p"] * 3, ["c"] * 3, ["x"] * 3)
    assert (totals[0], math.isnan(totals[1]), totals[2], parts["shown"][1:]) == (1.0, True, 0.5, [1.0, 2.0])


def test_without_a_gold_answer_nothing_is_right_or_wrong():
    """Problems with tests in place of an answer, mixed with others."""
    for name in ("answer", "dapo"):
        assert load_reward(name)(completions=["<answer></answer>", "Answer: ,"], answer=["", ""]) == [None, None]


def test_answer_and_dapo_say_where_there_is_nothing_to_read():
    for name, readable in (("answer", "<answer>4</answer>"), ("dapo", "Answer: 4")):
        values = load_reward(name)(completions=[readable, "nothing"], answer=["5", "5"])
        assert values == [0.0, 0.0] and [isinstance(value, Unparsed) for value in values] == [False, True]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda **_: 1 / 0, "ZeroDivisionError"),
        (lambda **_: [1.0], "1 values for 2 completions"),
        (lambda **_: [1.0, math.nan], "nan for completion 1"),
        (lambda **_: ["x", 1.0], "'x' for completion 0"),
        (lambda **_: {1.0, 0.5}, "a set, not one value for each completion in order"),
        (lambda **_: b"10", "a bytes, not one value"),
        (lambda **_: [1.0, np.float32("nan")], "for completion 1; expected a finite number"),
        (lambda **_: [np.ones(2), 1.0], "for completion 0; expected a finite number"),
        (lambda **_: [10**400, 1.0], "for completion 0; expected a finite number"),
        (lambda **_: [1.0, Unparsed(math.nan)], "nan for completion 1"),
        (lambda **_: [1.0, Unparsed(math.inf)], "inf for completion 1"),
        (lambda **_: [1.0, 3e38], r"of completion 1, \(3e\+38,\), add up to 3e\+38"),
        (lambda **_: [-3e38, 1.0], r"of completion 0, .*, add up to -3e\+38"),
    ],
)
def test_score_refuses(reward, words):
    with pytest.raises(RewardError, match=words):
        score({"mine": reward}, (1.0,), ["p"] * 2, ["c"] * 2, ["x"] * 2)


def test_numpy_scalars_and_truths_are_numbers():
    """As plain floats, which a worker can send; the outcomes that carry a reason stay what they are."""
    values = [np.float32(0.5), np.int64(2), np.bool_(True), np.float64(1), False, Fraction(1, 4), 3, None, Unparsed(0)]
    rows = {"prompts": ["p"] * 9, "completions": ["c"] * 9, "answer": ["x"] * 9}
    found = functions.call("mine", lambda **_: values, rows)
    assert found == [0.5, 2, 1, 1, 0, 0.25, 3, None, 0]
    assert [type(value) for value in found] == [float] * 7 + [type(None), Unparsed]
    assert functions.call("mine", lambda **_: np.arange(9, dtype=np.float32), rows) == list(range(9))


def test_columns_reach_every_reward_by_name():
    def reward(*, answer, level, **_):
        return [float(a == "x") * n for a, n in zip(answer, level, strict=True)]

    totals, _ = score(
        {"mine": reward}, (1.0,), ["p"] * 2, ["c"] * 2, ["x", "y"], level=[3, 4], rewards=["any name", ""]
    )
    assert totals == [3.0, 0.0]


def test_without_an_answer_column_no_reward_gets_an_answer():
    """One that counts on it fails in the trial before the run, in place of comparing with ""."""
    with pytest.raises(RewardError, match="KeyError"):
        score({"r": lambda **columns: [columns["answer"]]}, [1.0], ["p"], ["c"], [])
    assert score({"r": lambda answer, **_: [float(answer[0] == "")]}, [1.0], ["p"], ["c"], [""])[0] == [1.0]


def test_reward_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def shout(prompts, completions, answer, **kwargs):\n    return [float(c.isupper()) for c in completions]\n"
    )
    assert load_reward(f"{path}:shout")(prompts=["", ""], completions=["A", "a"], answer=["", ""]) == [1.0, 0.0]
    for name, words in [
        (f"{path}:whisper", "no function 'whisper'"),
        (f"{tmp_path}/none.py:f", "does not exist"),
        ("answr", r"neither one of .*did you mean 'answer'\?"),
    ]:
        with pytest.raises(RewardError, match=words):
            load_reward(name)
    path.write_text("import nothing_of_this_name")
    with pytest.raises(RewardError, match="failed to load"):
        load_reward(f"{path}:shout")
    for text, line in (("def inner():\n    1 / 0\n\ninner()\n", 2), ("import json\njson.loads('')", 2), ("\n\n(", 3)):
        path.write_text(text)  # the innermost line of the file itself
        with pytest.raises(RewardError, match=f", line {line}, failed to load"):
            load_reward(f"{path}:shout")
    path.write_text("def inner():\n    1 / 0\n\ndef shout(**rows):\n    inner()\n")
    with pytest.raises(RewardError, match=r"ZeroDivisionError\(.*\) in .*\.py, line 2$"):
        functions.call("mine", load_reward(f"{path}:shout"), {"completions": [""]})


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("completion_ids", "completion_ids of TRL is not passed here"),
        ("solution", "name solution in reward_columns"),
        ("answer", "name answer in reward_columns, or the column of the dataset's gold answers in answer_column"),
    ],
)
def test_a_reward_that_asks_for_what_training_does_not_pass(parameters, said):
    for reward in (
        eval(f"lambda completions, {parameters}, **_: [0.0]"),
        eval(f"lambda completions, **columns: columns['{parameters}']"),
    ):
        with pytest.raises(RewardError, match=said):
            functions.call("mine", reward, {"completions": [""]})
