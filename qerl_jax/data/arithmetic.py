"""Generated grade-school word problems: the data set of the bundled default run.

A problem is a pure function of (split, seed, index): a short story whose clauses each change a running value, so that
the answer takes two to four operations. Two things are held out from training: some two-digit **numbers**
(`HELD_OUT_NUMBERS`, never given in a training question) and some **templates** (`HELD_OUT_TEMPLATES`, sequences of
clauses that no training question follows). Even indices of the held-out split test the numbers, odd ones the templates.

The bundled policy was pretrained on the worked steps; training and evaluation see question and answer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import random
import re
import zlib
from collections.abc import Sequence

NAME = "arithmetic"
SPLITS = ("train", "heldout")
LARGEST = 250
"""No value in a solution exceeds this."""

HELD_OUT_NUMBERS = frozenset(n for n in range(10, 100) if (n // 10 + 3 * (n % 10)) % 7 == 2)
"""Given only in held-out questions; as an intermediate result a training solution may reach one."""

NAMES = ("Tom", "Mia", "Ben", "Ana", "Sam", "Zoe", "Max", "Eva", "Leo", "Amy", "Dan", "Ivy")
OBJECTS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "stones")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation, `left op right = result`, op one of + - * /."""

    left: int
    op: str
    right: int

    @property
    def result(self) -> int:
        """Result of the operation; division is exact in every generated step."""
        return calculate(self.left, self.op, self.right)

    def __str__(self) -> str:
        return f"{self.left}{self.op}{self.right}={self.result}"


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """A question, its answer and the worked steps.

    Attributes:
      question: plain English, a few sentences.
      answer: an integer above 0, in decimal.
      steps: the operations in the order of the story; the last one's result is the answer.
      template: the clause sequence.
    """

    question: str
    answer: str
    steps: tuple[Step, ...]
    template: tuple[str, ...]


_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def calculate(left: int, op: str, right: int) -> int:
    """`left op right` over the integers."""
    return _OPERATORS[op](left, right)


# A clause is its sentence and what it does to the running value v. Slots: {a} a two-digit number, {k}, {m} small ones,
# {A} {B} names, {o} an object. Effects: "=a", "=k*m" open; "+a", "-a", "*k", "/k" one operation, "+k*m", "-k*m" two;
# "a+" compares (w = v + a, then v + w), "a-" likewise.
_CLAUSES: dict[str, tuple[str, str]] = {
    # a collection
    "has": ("{A} has {a} {o}.", "=a"),
    "bags": ("{A} has {k} bags of {m} {o}.", "=k*m"),
    "finds": ("{A} finds {a} more {o}.", "+a"),
    "loses": ("{A} loses {a} {o}.", "-a"),
    "gives": ("{A} gives {a} {o} to {B}.", "-a"),
    "buys_bags": ("{A} buys {k} bags of {m} {o}.", "+k*m"),
    "gives_each": ("{A} gives {k} friends {m} {o} each.", "-k*m"),
    "triples": ("{A} then gets {k} times as many.", "*k"),
    "now": ("How many {o} does {A} have now?", ""),
    # two people
    "compare_more": ("{B} has {a} more {o} than {A}. How many {o} do they have together?", "a+"),
    "compare_fewer": ("{B} has {a} fewer {o} than {A}. How many {o} do they have together?", "a-"),
    # sharing and selling
    "share": ("{A} puts all {o} equally in {k} boxes. How many {o} are in a box?", "/k"),
    "sell": ("{A} sells all {o} for {k} dollars each. How many dollars does {A} get?", "*k"),
    # money
    "saves": ("{A} saved {a} dollars.", "=a"),
    "earns": ("{A} earns {a} dollars.", "+a"),
    "works": ("{A} works {k} hours for {m} dollars an hour.", "+k*m"),
    "spends": ("{A} spends {a} dollars.", "-a"),
    "tickets": ("{A} buys {k} tickets for {m} dollars each.", "-k*m"),
    "money": ("How many dollars does {A} have now?", ""),
    # a bus
    "bus": ("A bus has {a} riders.", "=a"),
    "get_on": ("At a stop {a} riders get on.", "+a"),
    "get_off": ("At a stop {a} riders get off.", "-a"),
    "groups_on": ("Then {k} groups of {m} riders get on.", "+k*m"),
    "groups_off": ("Then {k} groups of {m} riders get off.", "-k*m"),
    "riders": ("How many riders are on the bus now?", ""),
    # a book
    "book": ("{A} has a book of {a} pages.", "=a"),
    "reads": ("{A} reads {a} pages on Monday.", "-a"),
    "reads_more": ("{A} reads {a} pages on Friday.", "-a"),
    "reads_daily": ("{A} reads {m} pages a day for {k} days.", "-k*m"),
    "left": ("How many pages are left?", ""),
    # a bakery and a garden
    "trays": ("A shop bakes {k} trays of {m} rolls.", "=k*m"),
    "bakes": ("It bakes {a} more rolls.", "+a"),
    "bakes_trays": ("It bakes {k} more trays of {m} rolls.", "+k*m"),
    "sold": ("It sells {a} rolls.", "-a"),
    "sold_boxes": ("It sells {k} boxes of {m} rolls.", "-k*m"),
    "rolls": ("How many rolls are left?", ""),
    "rows": ("{A} plants {k} rows of {m} trees.", "=k*m"),
    "plants": ("{A} plants {a} more trees.", "+a"),
    "more_rows": ("{A} plants {k} more rows of {m} trees.", "+k*m"),
    "die": ("Then {a} trees die.", "-a"),
    "fruit": ("Each tree has {k} pears. How many pears are there?", "*k"),
    "trees": ("How many trees are there now?", ""),
}

# A story opens, has one to three different events, and ends with its question.
_SCENARIOS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "collection": (
        ("has", "bags"),
        ("finds", "loses", "gives", "buys_bags", "gives_each", "triples"),
        ("now", "compare_more", "compare_fewer", "share", "sell"),
    ),
    "money": (("saves",), ("earns", "works", "spends", "tickets"), ("money",)),
    "bus": (("bus",), ("get_on", "get_off", "groups_on", "groups_off"), ("riders",)),
    "book": (("book",), ("reads", "reads_more", "reads_daily"), ("left",)),
    "bakery": (("trays",), ("bakes", "bakes_trays", "sold", "sold_boxes"), ("rolls",)),
    "garden": (("rows",), ("plants", "more_rows", "die"), ("trees", "fruit")),
}
_OPERATIONS = {"": 0, "=a": 0, "+k*m": 2, "-k*m": 2, "a+": 2, "a-": 2}  # every other effect is one


def _templates() -> dict[str, dict[int, list[tuple[str, ...]]]]:
    """Every clause sequence of two to four operations, by scenario and number of operations."""
    found: dict[str, dict[int, list[tuple[str, ...]]]] = {}
    for scenario, (openers, events, questions) in _SCENARIOS.items():
        found[scenario] = {2: [], 3: [], 4: []}
        for opener, length, question in itertools.product(openers, (1, 2, 3), questions):
            for middle in itertools.permutations(events, length):
                clauses = (opener, *middle, question)
                operations = sum(_OPERATIONS.get(_CLAUSES[clause][1], 1) for clause in clauses)
                if operations in found[scenario]:
                    found[scenario][operations].append(clauses)
    return found


def _is_held_out(clauses: tuple[str, ...]) -> bool:
    return zlib.crc32(" ".join(clauses).encode()) % 4 == 0


def _part(held_out: bool) -> dict[str, dict[int, list[tuple[str, ...]]]]:
    return {
        scenario: {n: part for n, all_n in by_n.items() if (part := [c for c in all_n if _is_held_out(c) == held_out])}
        for scenario, by_n in _templates().items()
    }


TRAIN_TEMPLATES = _part(held_out=False)
HELD_OUT_TEMPLATES = _part(held_out=True)
"""Given only in held-out questions: about a quarter of all. Scenario, number of operations, clause sequences."""


def arithmetic_problem(split: str, seed: int, index: int) -> WordProblem:
    """Problem `index` of a split.

    Raises:
      ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {list(SPLITS)}")
    rng = random.Random(f"{split}/{seed}/{index}")
    ordinary = [n for n in range(10, 100) if n not in HELD_OUT_NUMBERS]
    by_template = split == "heldout" and index % 2 == 1
    pool = sorted(HELD_OUT_NUMBERS) if split == "heldout" and index % 2 == 0 else ordinary
    while True:
        problem = _draw(rng, _choose_template(rng, by_template), pool)
        if split == "train" or by_template or given_numbers(problem.question) & HELD_OUT_NUMBERS:
            return problem


def _choose_template(rng: random.Random, held_out: bool) -> tuple[str, ...]:
    """Scenario, number of operations and clause sequence, each drawn evenly."""
    templates = HELD_OUT_TEMPLATES if held_out else TRAIN_TEMPLATES
    by_operations = templates[rng.choice(list(templates))]
    return rng.choice(by_operations[rng.choice(list(by_operations))])


@functools.lru_cache(maxsize=4)  # several runs of a process
def problems(split: str, count: int, seed: int = 0) -> tuple[tuple[str, str], ...]:
    """The first `count` (question, answer) pairs of a split, "train" or "heldout"."""
    worked = (arithmetic_problem(split, seed, index) for index in range(count))
    return tuple((problem.question, problem.answer) for problem in worked)


def _draw(rng: random.Random, clauses: tuple[str, ...], pool: Sequence[int]) -> WordProblem:
    """A problem that follows a template, two-digit numbers from `pool`; a draw with an impossible step is repeated."""
    people = rng.sample(NAMES, 2)
    words = {"A": people[0], "B": people[1], "o": rng.choice(OBJECTS)}
    while True:
        sentences: list[str] = []
        steps: list[Step] = []
        value = 0
        for clause in clauses:
            text, effect = _CLAUSES[clause]
            a, k, m = rng.choice(pool), rng.randint(2, 6), rng.randint(2, 9)
            sentences.append(text.format(**words, a=a, k=k, m=m))
            steps += _apply(effect, value, a, k, m)
            value = a if effect == "=a" else steps[-1].result if steps else value
        if all(_sensible(step) for step in steps):
            return WordProblem(" ".join(sentences), str(value), tuple(steps), clauses)


def _apply(effect: str, v: int, a: int, k: int, m: int) -> list[Step]:
    """The operations of a clause on the running value v."""
    match effect:
        case "" | "=a":
            return []
        case "+a" | "-a":
            return [Step(v, effect[0], a)]
        case "*k" | "/k":
            return [Step(v, effect[0], k)]
        case "=k*m":
            return [Step(k, "*", m)]
        case "+k*m" | "-k*m":
            return [Step(k, "*", m), Step(v, effect[0], k * m)]
        case "a+":
            return [Step(v, "+", a), Step(v, "+", v + a)]
        case "a-":
            return [Step(v, "-", a), Step(v, "+", v - a)]
    raise ValueError(f"effect {effect!r} is not one of a clause's")


def _sensible(step: Step) -> bool:
    exact = step.op != "/" or step.left % step.right == 0
    return exact and 0 < step.result <= LARGEST


def given_numbers(question: str) -> set[int]:
    """Every number that a question states."""
    return {int(number) for number in re.findall(r"\d+", question)}
