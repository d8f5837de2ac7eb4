"""Generated word problems of many steps, for policies that are pretrained on their worked solutions.

A problem is a pure function of (split, seed, index, range of operations). Its sentences each say how many things a
person has, as a number or in terms of other persons: more, fewer, times, a part, percent, sum, difference, twice the
larger. The answer takes a given number of operations; sentences come in any order, and some say nothing about it.

The quantities exist for the pretraining corpus (`tools/pretrain.py`); training and evaluation see question and answer.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from qerl_jax.data.arithmetic import Step
from qerl_jax.data.word_problem_kinds import PARTS, QUESTIONS, RELATIONS, STATEMENTS

SPLITS = ("train", "test")
LOW, HIGH = 2, 10
"""Operations of a problem, both included."""
LARGEST = 5000
"""No person has more."""
MOST_DISTRACTORS = 3

NAMES = (
    *("Ada", "Amy", "Ana", "Ben", "Bob", "Cal", "Dan", "Eli", "Eva", "Fay", "Gus", "Hal", "Ian", "Ivy", "Jan", "Jim"),
    *("Kai", "Kim", "Lea", "Leo", "Liv", "Max", "Mia", "Ned", "Ora", "Pam", "Ray", "Rob", "Sam", "Sue", "Tom", "Zoe"),
)
OBJECTS = ("apples", "beads", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "stones", "tiles", "toys")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A person's number of things, or the answer.

    Attributes:
      name: the person; "" for the answer.
      kind: key of STATEMENTS, or QUESTIONS for the answer.
      sources: persons that it depends on.
      numbers: the numbers that its text states.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    numbers: tuple[int, ...]

    def steps(self, values: Mapping[str, int]) -> tuple[Step, ...]:
        """The operations from the persons' values to this one."""
        kind = STATEMENTS[self.kind] if self.name else QUESTIONS[self.kind]
        return kind.steps(self.numbers, [values[source] for source in self.sources])

    def value(self, values: Mapping[str, int]) -> int:
        """The quantity, given the values of its sources."""
        steps = self.steps(values)
        return steps[-1].result if steps else values[self.sources[0]] if self.sources else self.numbers[0]


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """A question, its answer and the quantities that lead to it.

    Attributes:
      question: plain English.
      answer: an integer above 0, in decimal.
      thing: the object counted.
      quantities: those that the answer depends on, each after its sources.
      asked: the quantity asked for.
      distractors: those that the answer does not depend on.
      operations: number of steps of `quantities` and `asked`.
    """

    question: str
    answer: str
    thing: str
    quantities: tuple[Quantity, ...]
    asked: Quantity
    distractors: tuple[Quantity, ...]
    operations: int


def word_problem(split: str, seed: int, index: int, low: int = LOW, high: int = HIGH) -> WordProblem:
    """Problem `index` of a split, "train" or "test", with low to high operations, each number as often.

    Raises ValueError for an unknown split or an impossible range.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {list(SPLITS)}")
    if not 1 <= low <= high <= HIGH:
        raise ValueError(f"operations {low} to {high}: needs 1 <= low <= high <= {HIGH}")
    rng = random.Random(f"{split}/{seed}/{index}/{low}/{high}")
    return draw(rng, low + index % (high - low + 1))


def draw(rng: random.Random, operations: int) -> WordProblem:
    """A random problem of so many operations."""
    fitting = [kind for kind in QUESTIONS if QUESTIONS[kind].operations <= operations]
    asked = None
    while asked is None:
        kind, names = rng.choice(fitting), rng.sample(NAMES, len(NAMES))
        chain, values = _chain(rng, names, operations - QUESTIONS[kind].operations)
        asked = _quantity(rng, "", kind, chain[-1].name, values)
    distractors = []
    for _ in range(rng.randint(0, MOST_DISTRACTORS)):
        distractors.append(_distractor(rng, names.pop(), values))
        values[distractors[-1].name] = distractors[-1].value(values)
    told, thing = [*chain, *distractors], rng.choice(OBJECTS)
    if rng.random() < 0.5:
        rng.shuffle(told)
    question = " ".join(_text(rng, quantity, thing) for quantity in [*told, asked])
    answer = str(asked.value(values))
    return WordProblem(question, answer, thing, tuple(chain), asked, tuple(distractors), operations)


def _chain(rng: random.Random, names: list[str], operations: int) -> tuple[list[Quantity], dict[str, int]]:
    """Quantities of so many operations together, and their values. Each relation has the one before it as a source;
    takes its persons from `names`.
    """
    start = _quantity(rng, names.pop(), "boxes" if operations and rng.random() < 0.3 else "given", "", {})
    chain, values = [start], {start.name: start.value({})}
    left = operations - STATEMENTS[start.kind].operations
    while left:
        kind = rng.choice([kind for kind in RELATIONS if STATEMENTS[kind].operations <= left])
        added: list[Quantity] = []
        if STATEMENTS[kind].sources == 2 and (len(values) == 1 or rng.random() < 0.3):
            added = [_quantity(rng, names[-2], "given", "", {})]
        known = values | {quantity.name: quantity.value({}) for quantity in added}
        found = _quantity(rng, names[-1], kind, chain[-1].name, known, added[0].name if added else None)
        if found is not None:
            chain += [*added, found]
            values = known | {found.name: found.value(known)}
            del names[-1 - len(added) :]
            left -= STATEMENTS[kind].operations
    return chain, values


def _quantity(
    rng: random.Random, name: str, kind: str, first: str, values: Mapping[str, int], second: str | None = None
) -> Quantity | None:
    """A quantity of a kind with a source, and another one where the kind has two (None: a random one); None where it
    has no valid numbers or value.
    """
    about = STATEMENTS[kind] if name else QUESTIONS[kind]
    others = [source for source in values if source != first]
    if about.sources == 2 and not others:
        return None
    sources = (first, second or rng.choice(others))[: about.sources] if others else (first,)[: about.sources]
    numbers = about.numbers(rng, [values[source] for source in sources])
    if numbers is None:
        return None
    found = Quantity(name, kind, sources, numbers)
    return found if 0 < found.value(values) <= LARGEST else None


def _distractor(rng: random.Random, name: str, values: Mapping[str, int]) -> Quantity:
    while True:
        found = _quantity(rng, name, rng.choice(list(STATEMENTS)), rng.choice(list(values)), values)
        if found is not None:
            return found


def _text(rng: random.Random, quantity: Quantity, thing: str) -> str:
    """The sentence or question that states a quantity, in one of its wordings."""
    about = STATEMENTS[quantity.kind] if quantity.name else QUESTIONS[quantity.kind]
    slots = {"X": quantity.name, "o": thing} | dict(zip("YZ", quantity.sources, strict=False))
    slots |= dict(zip("ab", map(str, quantity.numbers), strict=False))
    if quantity.kind == "part":
        slots["part"] = PARTS[quantity.numbers[0]]
    return rng.choice(about.texts).format(**slots)


def problems(split: str, count: int, seed: int = 0, low: int = LOW, high: int = HIGH) -> list[tuple[str, str]]:
    """The first `count` (question, answer) pairs of a split, "train" or "test"."""
    found = (word_problem(split, seed, index, low, high) for index in range(count))
    return [(problem.question, problem.answer) for problem in found]
