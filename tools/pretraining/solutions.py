"""Worked solutions of generated word problems, as simulated authors write them.

Equivalent solutions differ in the order of independent steps, the wording, the order of summands and factors and in
whether a product is split into digits: a model of them is uncertain about its next words, though not about the answer.
Some authors make a mistake (`MISTAKES`), so that a model of all of them often errs on problems that it can solve.
"""

from __future__ import annotations

import random

from qerl_jax.data.arithmetic import Step
from qerl_jax.data.word_problems import Quantity, WordProblem

STOP_EARLY, WRONG_PERSON, WRONG_OPERATION, SLIP = "stops early", "wrong person", "wrong operation", "slip"
MISTAKES = {STOP_EARLY: 0.3, WRONG_PERSON: 0.3, WRONG_OPERATION: 0.25, SLIP: 0.15}
"""Shares of those who make a mistake."""
FORGETS_TAGS = 0.03
SAYS_GIVEN = 0.2
"""Share of given numbers that a solution repeats."""

OPPOSITE = {"more": "fewer", "fewer": "more", "times": "more", "part": "fewer", "sum": "difference", "larger": "sum"}
# A sentence is one of each, equally often: {X} the person, {o} the object, {e} the computation.
OPENINGS = ("", "so ", "then ", "now ", "next, ", "thus ")
SENTENCES = (
    "{X} has {e}.",
    "{X} has {e} {o}.",
    "{X}: {e}.",
    "{X} gets {e}.",
    "{X} must have {e}.",
    "{X} owns {e} {o}.",
    "for {X} we get {e}.",
    "we find {e} for {X}.",
    "we count {e} for {X}.",
    "the {o} of {X} are {e}.",
    "{e} belong to {X}.",
    "{e} {o} for {X}.",
)
ANSWERS = ("the answer is {e}.", "we get {e}.", "that is {e}.", "{e}.", "this makes {e}.", "in the end {e}.")


def write_solution(problem: WordProblem, rng: random.Random, care: float) -> str:
    """A completion as one of the authors writes it; a share `care` of them makes no mistake."""
    mistake = "" if rng.random() < care else rng.choices(list(MISTAKES), list(MISTAKES.values()))[0]
    quantities, last = _order(problem, rng), problem.asked
    if mistake == STOP_EARLY and len(quantities) == 1:
        mistake = SLIP
    if mistake == STOP_EARLY:
        *quantities, last = quantities[: -1 if last.kind == "has" else None]
    elif mistake in (WRONG_PERSON, WRONG_OPERATION):
        quantities, last = _misread(problem, quantities, mistake, rng)
    computed = [quantity for quantity in [*quantities, last] if quantity.kind not in ("given", "has")]
    slips = rng.choice(computed) if mistake == SLIP and computed else None
    values: dict[str, int] = {q.name: q.value({}) for q in problem.distractors if q.kind == "given"}
    splits, lines = rng.random() < 0.5, []
    for quantity in [*quantities, last]:
        steps = quantity.steps(values)
        value = quantity.value(values)
        if quantity is slips:
            value = _slip(value, rng)
        values[quantity.name] = value
        if steps or rng.random() < SAYS_GIVEN:
            lines.append(_line(quantity, steps, value, problem.thing, splits, rng))
    text = f"<think>{rng.choice((' ', chr(10))).join(lines)}</think>"
    return text + (str(value) if rng.random() < FORGETS_TAGS else f"<answer>{value}</answer>")


def _order(problem: WordProblem, rng: random.Random) -> list[Quantity]:
    """The quantities in a random order in which each comes after its sources."""
    waiting, done, ordered = list(problem.quantities), set(), []
    while waiting:
        ready = [quantity for quantity in waiting if done.issuperset(quantity.sources)]
        ordered.append(rng.choice(ready))
        waiting.remove(ordered[-1])
        done.add(ordered[-1].name)
    return ordered


def _misread(
    problem: WordProblem, quantities: list[Quantity], mistake: str, rng: random.Random
) -> tuple[list[Quantity], Quantity]:
    """The quantities, one with another source or another operation, and the one that is asked for."""
    told = [*quantities, problem.asked]
    places = [i for i, quantity in enumerate(told) if quantity.sources]
    if mistake == WRONG_OPERATION:
        places = [i for i in places if told[i].name and told[i].kind in OPPOSITE] or places
    place = rng.choice(places)
    wrong = told[place]
    if mistake == WRONG_OPERATION and wrong.name and wrong.kind in OPPOSITE:
        told[place] = Quantity(wrong.name, OPPOSITE[wrong.kind], wrong.sources, wrong.numbers)
    else:
        known = [quantity.name for quantity in told[:place]]
        known += [quantity.name for quantity in problem.distractors if quantity.kind == "given"]
        others = [name for name in known if name not in wrong.sources] or known
        sources = (rng.choice(others), *wrong.sources[1:])
        told[place] = Quantity(wrong.name, wrong.kind, sources, wrong.numbers)
    return told[:-1], told[-1]


def _slip(value: int, rng: random.Random) -> int:
    return max(0, value + rng.choice((-100, -10, -2, -1, 1, 2, 10, 100)))


def _line(quantity: Quantity, steps: tuple[Step, ...], value: int, thing: str, splits: bool, rng: random.Random) -> str:
    """A sentence with the computation of a quantity; its last result is `value`, right or wrong."""
    written = [_computation(step, splits, rng) for step in steps[:-1]]
    if steps:
        written.append(_computation(steps[-1], splits, rng, value))
    computation = ", ".join(written) if steps else str(value)
    sentence = rng.choice(OPENINGS) + rng.choice(SENTENCES if quantity.name else ANSWERS)
    sentence = sentence[0].upper() + sentence[1:]
    return sentence.format(X=quantity.name, o=thing, e=computation)


def _computation(step: Step, splits: bool, rng: random.Random, result: int | None = None) -> str:
    """`left op right = result`, a product with its partial products where the author splits it."""
    left, right = step.left, step.right
    parts = partial_products(left, right) if step.op == "*" and splits and min(left, right) > 0 else []
    if step.op in "+*" and rng.random() < 0.5:
        left, right = right, left
    between = f"={'+'.join(map(str, parts))}" if len(parts) > 1 else ""
    return f"{left}{step.op}{right}{between}={step.result if result is None else result}"


def partial_products(left: int, right: int) -> list[int]:
    """The products of the larger factor with the digits of the smaller one, or of its own digits with a smaller factor
    of one digit; their sum is the product.
    """
    large, small = max(left, right), min(left, right)
    split, whole = (large, small) if small < 10 else (small, large)
    digits = str(split)
    return [whole * int(digit) * 10 ** (len(digits) - 1 - place) for place, digit in enumerate(digits) if digit != "0"]
