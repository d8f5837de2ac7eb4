"""The kinds of statements and questions that generated word problems are made of."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from qerl_jax.data.arithmetic import Step

PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth", 10: "a tenth"}
PERCENT = (5, 10, 15, 20, 25, 30, 40, 60, 70, 75, 80, 90, 110, 120, 125, 150)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to state a quantity.

    Attributes:
      texts: sentences or questions of equal meaning. Slots: {X} the person, {Y} and {Z} the sources, {o} the object,
        {a} and {b} the numbers, {part} the word for 1/a.
      sources: number of other persons it depends on.
      operations: number of its steps.
      numbers: valid numbers for the sources' values, or None where there are none.
      steps: its steps, given the numbers and the sources' values.
    """

    texts: tuple[str, ...]
    sources: int
    operations: int
    numbers: Callable[[random.Random, Sequence[int]], tuple[int, ...] | None]
    steps: Callable[[Sequence[int], Sequence[int]], tuple[Step, ...]]


def _any(*ranges: tuple[int, int]) -> Callable[[random.Random, Sequence[int]], tuple[int, ...]]:
    return lambda rng, values: tuple(rng.randint(low, high) for low, high in ranges)


def _one_of(
    options: Callable[[int], Sequence[int]],
) -> Callable[[random.Random, Sequence[int]], tuple[int, ...] | None]:
    """A number from those that fit the first source's value."""

    def draw(rng: random.Random, values: Sequence[int]) -> tuple[int, ...] | None:
        fitting = options(values[0])
        return (rng.choice(fitting),) if fitting else None

    return draw


def _unequal(rng: random.Random, values: Sequence[int]) -> tuple[int, ...] | None:
    return () if values[0] != values[1] else None


def _parts(y: int) -> list[int]:
    return [k for k in PARTS if y % k == 0 and y > k]


def _percents(y: int) -> list[int]:
    return [p for p in PERCENT if y * p % 100 == 0]


def _percent(numbers: Sequence[int], values: Sequence[int]) -> tuple[Step, ...]:
    product = Step(values[0], "*", numbers[0])
    return product, Step(product.result, "/", 100)


def _bags(numbers: Sequence[int], values: Sequence[int]) -> tuple[Step, ...]:
    product = Step(numbers[0], "*", numbers[1])
    return product, Step(values[0], "-", product.result)


def _bag_numbers(rng: random.Random, values: Sequence[int]) -> tuple[int, ...] | None:
    numbers = (rng.randint(2, 9), rng.randint(2, 30))
    return numbers if numbers[0] * numbers[1] < values[0] else None


STATEMENTS: Mapping[str, Kind] = {
    "given": Kind(("{X} has {a} {o}.", "{a} {o} belong to {X}."), 0, 0, _any((3, 120)), lambda n, v: ()),
    "boxes": Kind(
        ("{X} has {a} boxes of {b} {o} each.", "{X} has {b} {o} in each of {a} boxes."),
        0,
        1,
        _any((2, 12), (3, 40)),
        lambda n, v: (Step(n[0], "*", n[1]),),
    ),
    "more": Kind(
        ("{X} has {a} more {o} than {Y}.", "{X} has as many {o} as {Y} and {a} more."),
        1,
        1,
        _any((2, 150)),
        lambda n, v: (Step(v[0], "+", n[0]),),
    ),
    "fewer": Kind(
        ("{X} has {a} fewer {o} than {Y}.", "{X} lacks {a} {o} to have as many as {Y}."),
        1,
        1,
        _one_of(lambda y: range(2, min(y, 150))),
        lambda n, v: (Step(v[0], "-", n[0]),),
    ),
    "times": Kind(
        ("{X} has {a} times as many {o} as {Y}.", "For each of {Y}'s {o}, {X} has {a}."),
        1,
        1,
        _any((2, 9)),
        lambda n, v: (Step(v[0], "*", n[0]),),
    ),
    "part": Kind(
        ("{X} has {part} as many {o} as {Y}.", "{X} has only {part} of the number of {o} that {Y} has."),
        1,
        1,
        _one_of(_parts),
        lambda n, v: (Step(v[0], "/", n[0]),),
    ),
    "percent": Kind(
        ("{X} has {a} percent as many {o} as {Y}.", "The {o} of {X} are {a} percent of the number that {Y} has."),
        1,
        2,
        _one_of(_percents),
        _percent,
    ),
    "sum": Kind(
        ("{X} has as many {o} as {Y} and {Z} together.", "{Y} and {Z} together have as many {o} as {X}."),
        2,
        1,
        lambda rng, v: (),
        lambda n, v: (Step(v[0], "+", v[1]),),
    ),
    "difference": Kind(
        (
            "{X} has as many {o} as the numbers of {Y} and {Z} differ by.",
            "Between {Y} and {Z} the difference is as many {o} as {X} has.",
        ),
        2,
        1,
        _unequal,
        lambda n, v: (Step(max(v), "-", min(v)),),
    ),
    "larger": Kind(
        (
            "{X} has twice as many {o} as {Y} or {Z}, whoever has more.",
            "Whoever of {Y} and {Z} has more {o} has half as many as {X}.",
        ),
        2,
        1,
        _unequal,
        lambda n, v: (Step(max(v), "*", 2),),
    ),
}
"""Kinds of statements about a person X."""
RELATIONS = tuple(kind for kind, about in STATEMENTS.items() if about.sources)

QUESTIONS: Mapping[str, Kind] = {
    "has": Kind(
        ("How many {o} does {Y} have?", "What is the number of {o} that {Y} has?"),
        1,
        0,
        lambda rng, v: (),
        lambda n, v: (),
    ),
    "together": Kind(
        ("How many {o} do {Y} and {Z} have together?", "What is the total of {Y}'s and {Z}'s {o}?"),
        2,
        1,
        lambda rng, v: (),
        STATEMENTS["sum"].steps,
    ),
    "apart": Kind(
        (
            "By how many {o} do {Y} and {Z} differ?",
            "How many {o} are there between {Y} and {Z}, the larger minus the smaller?",
        ),
        2,
        1,
        _unequal,
        STATEMENTS["difference"].steps,
    ),
    "sells": Kind(
        (
            "{Y} sells all {o} for {a} dollars each. How many dollars does {Y} get?",
            "If {Y} sells all {o} at {a} dollars, what does {Y} get?",
        ),
        1,
        1,
        _any((2, 9)),
        STATEMENTS["times"].steps,
    ),
    "shares": Kind(
        (
            "{Y} shares all {o} among {a} children. How many does each get?",
            "How many {o} are in a bag if {Y} fills {a} equal bags?",
        ),
        1,
        1,
        _one_of(_parts),
        STATEMENTS["part"].steps,
    ),
    "gives": Kind(
        (
            "{Y} gives away {a} bags of {b} {o}. How many are left?",
            "How many {o} has {Y} left after giving {b} to each of {a} friends?",
        ),
        1,
        2,
        _bag_numbers,
        _bags,
    ),
}
"""Kinds of questions; Y is the last person of the chain of quantities."""
