"""Generated word problems: their answers against a reader of the English text that knows nothing of the generator."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from qerl_jax.data import word_problems
from qerl_jax.data.files import DataError
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.word_problems import WordProblem, problems, word_problem

FRACTIONS = {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5, "a sixth": 6, "an eighth": 8, "a tenth": 10}
NAME, NUMBER, THINGS, PART = r"([A-Z][a-z]+)", r"(\d+)", r"[a-z]+", "(" + "|".join(FRACTIONS) + ")"

# Pattern of a sentence, and what it says: a function from its groups and the amounts known to (person, amount).
READERS: list[tuple[str, Callable]] = [
    (f"{NAME} has {NUMBER} {THINGS}", lambda k, x, a: (x, int(a))),
    (f"{NUMBER} {THINGS} belong to {NAME}", lambda k, a, x: (x, int(a))),
    (f"{NAME} has {NUMBER} boxes of {NUMBER} {THINGS} each", lambda k, x, a, b: (x, int(a) * int(b))),
    (f"{NAME} has {NUMBER} {THINGS} in each of {NUMBER} boxes", lambda k, x, a, b: (x, int(a) * int(b))),
    (f"{NAME} has {NUMBER} more {THINGS} than {NAME}", lambda k, x, a, y: (x, k[y] + int(a))),
    (f"{NAME} has as many {THINGS} as {NAME} and {NUMBER} more", lambda k, x, y, a: (x, k[y] + int(a))),
    (f"{NAME} has {NUMBER} fewer {THINGS} than {NAME}", lambda k, x, a, y: (x, k[y] - int(a))),
    (f"{NAME} lacks {NUMBER} {THINGS} to have as many as {NAME}", lambda k, x, a, y: (x, k[y] - int(a))),
    (f"{NAME} has {NUMBER} times as many {THINGS} as {NAME}", lambda k, x, a, y: (x, k[y] * int(a))),
    (f"For each of {NAME}'s {THINGS}, {NAME} has {NUMBER}", lambda k, y, x, a: (x, k[y] * int(a))),
    (f"{NAME} has {PART} as many {THINGS} as {NAME}", lambda k, x, p, y: (x, k[y] / FRACTIONS[p])),
    (
        f"{NAME} has only {PART} of the number of {THINGS} that {NAME} has",
        lambda k, x, p, y: (x, k[y] / FRACTIONS[p]),
    ),
    (f"{NAME} has {NUMBER} percent as many {THINGS} as {NAME}", lambda k, x, a, y: (x, k[y] * int(a) / 100)),
    (
        f"The {THINGS} of {NAME} are {NUMBER} percent of the number that {NAME} has",
        lambda k, x, a, y: (x, k[y] * int(a) / 100),
    ),
    (f"{NAME} has as many {THINGS} as {NAME} and {NAME} together", lambda k, x, y, z: (x, k[y] + k[z])),
    (f"{NAME} and {NAME} together have as many {THINGS} as {NAME}", lambda k, y, z, x: (x, k[y] + k[z])),
    (
        f"{NAME} has as many {THINGS} as the numbers of {NAME} and {NAME} differ by",
        lambda k, x, y, z: (x, abs(k[y] - k[z])),
    ),
    (
        f"Between {NAME} and {NAME} the difference is as many {THINGS} as {NAME} has",
        lambda k, y, z, x: (x, abs(k[y] - k[z])),
    ),
    (
        f"{NAME} has twice as many {THINGS} as {NAME} or {NAME}, whoever has more",
        lambda k, x, y, z: (x, 2 * max(k[y], k[z])),
    ),
    (
        f"Whoever of {NAME} and {NAME} has more {THINGS} has half as many as {NAME}",
        lambda k, y, z, x: (x, 2 * max(k[y], k[z])),
    ),
]
QUESTIONS: list[tuple[str, Callable]] = [
    (rf"How many {THINGS} does {NAME} have\?", lambda k, y: k[y]),
    (rf"What is the number of {THINGS} that {NAME} has\?", lambda k, y: k[y]),
    (rf"How many {THINGS} do {NAME} and {NAME} have together\?", lambda k, y, z: k[y] + k[z]),
    (rf"What is the total of {NAME}'s and {NAME}'s {THINGS}\?", lambda k, y, z: k[y] + k[z]),
    (rf"By how many {THINGS} do {NAME} and {NAME} differ\?", lambda k, y, z: abs(k[y] - k[z])),
    (
        rf"How many {THINGS} are there between {NAME} and {NAME}, the larger minus the smaller\?",
        lambda k, y, z: abs(k[y] - k[z]),
    ),
    (
        rf"{NAME} sells all {THINGS} for {NUMBER} dollars each\. How many dollars does {NAME} get\?",
        lambda k, y, a, _: k[y] * int(a),
    ),
    (rf"If {NAME} sells all {THINGS} at {NUMBER} dollars, what does {NAME} get\?", lambda k, y, a, _: k[y] * int(a)),
    (
        rf"{NAME} shares all {THINGS} among {NUMBER} children\. How many does each get\?",
        lambda k, y, a: k[y] / int(a),
    ),
    (rf"How many {THINGS} are in a bag if {NAME} fills {NUMBER} equal bags\?", lambda k, y, a: k[y] / int(a)),
    (
        rf"{NAME} gives away {NUMBER} bags of {NUMBER} {THINGS}\. How many are left\?",
        lambda k, y, a, b: k[y] - int(a) * int(b),
    ),
    (
        rf"How many {THINGS} has {NAME} left after giving {NUMBER} to each of {NUMBER} friends\?",
        lambda k, y, a, b: k[y] - int(a) * int(b),
    ),
]


@pytest.fixture(scope="module")
def drawn() -> list[WordProblem]:
    return [word_problem(split, 0, index) for split in word_problems.SPLITS for index in range(900)]


def answer_of(text: str) -> float:
    """The answer of a question, read sentence by sentence until no sentence says anything new."""
    pattern, ask = next((one, f) for one, f in QUESTIONS if re.search(f"{one}$", text))
    asked = re.search(f"{pattern}$", text)
    sentences = re.findall(r"[^.]+(?=\.)", text[: asked.start()])
    known: dict[str, float] = {}
    while sentences:
        waiting = []
        for sentence in sentences:
            found = [(m, say) for one, say in READERS if (m := re.fullmatch(one, sentence.strip()))]
            assert len(found) == 1, sentence
            try:
                person, amount = found[0][1](known, *found[0][0].groups())
            except KeyError:  # it is about someone who comes later
                waiting.append(sentence)
            else:
                assert person not in known
                known[person] = amount
        assert len(waiting) < len(sentences), f"{waiting} cannot be solved"
        sentences = waiting
    return ask(known, *asked.groups())


def operands(problem: WordProblem) -> int:
    """Operations of the worked solution."""
    values, count = {}, 0
    for quantity in problem.quantities:
        values[quantity.name] = quantity.value(values)
        count += len(quantity.steps(values))
    return count + len(problem.asked.steps(values))


def test_answers_are_those_of_the_text(drawn):
    for problem in drawn:
        assert answer_of(problem.question) == int(problem.answer) > 0, problem.question


def test_every_wording_occurs(drawn):
    texts = " ".join(problem.question for problem in drawn)
    assert all(re.search(pattern, texts) for pattern, _ in READERS + QUESTIONS)


def test_operations_are_counted_and_even(drawn):
    assert all(operands(problem) == problem.operations for problem in drawn)
    assert [problem.operations for problem in drawn[:18]] == 2 * list(range(2, 11))


def test_every_step_is_exact_and_distractors_do_not_matter(drawn):
    for problem in drawn:
        values = {}
        for quantity in problem.quantities:
            for step in quantity.steps(values):
                assert step.op != "/" or step.left % step.right == 0
            values[quantity.name] = quantity.value(values)
            assert 0 < values[quantity.name] <= word_problems.LARGEST
        told = {quantity.name for quantity in problem.quantities}
        assert not told & {quantity.name for quantity in problem.distractors}


def test_pure_function_of_its_arguments():
    first = problems("train", 40, seed=3)
    assert first == problems("train", 60, seed=3)[:40]
    assert first != problems("train", 40, seed=4) and first != problems("test", 40, seed=3)
    assert {word_problem("test", 0, index, 4, 5).operations for index in range(20)} == {4, 5}


def test_the_stream_stays_what_it_was():
    """Recorded accuracies are of these problems: a change of the generator has to be deliberate."""
    question, answer = problems("test", 1)[0]
    assert (question, answer) == (
        "Bob has 55 cards. 75 cards belong to Gus. Ben has as many cards as Bob and Gus together. Tom has 5 times as "
        "many cards as Ben. Max has twice as many cards as Ben or Tom, whoever has more. "
        "What is the number of cards that Tom has?",
        "650",
    )


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3), (2, 11)])
def test_impossible_ranges(low, high):
    with pytest.raises(ValueError, match=f"operations {low} to {high}"):
        word_problem("test", 0, 0, low, high)
    with pytest.raises(DataError, match=f"word_problems:{low}-{high}.*LOW <= HIGH <= 10"):
        load_dataset(f"word_problems:{low}-{high}", "test")


def test_datasets_by_name():
    train, test = (load_dataset("word_problems", split, limit=1000).problems for split in ("train", "test"))
    assert [(p.prompt, p.answer) for p in train] == problems("train", 1000)
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    easy = load_dataset("word_problems:2-3", "test", limit=30, first_id=7)
    assert [(p.prompt, p.answer) for p in easy.problems] == problems("test", 30, 0, 2, 3)
    assert easy.name == "word_problems:2-3" and easy.problems[0].id == 7 and easy.system_prompt == ""
    with pytest.raises(DataError, match="'word_problems' has no split 'dev'"):
        load_dataset("word_problems", "dev")
    with pytest.raises(DataError, match="did you mean 'word_problems'"):
        load_dataset("word_problem", "test")
    with pytest.raises(ValueError, match="'dev'"):
        problems("dev", 1)
