"""Few-shot prompts: worked examples before the question, as plain text without a chat template."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from qerl_jax.data.files import DataError
from qerl_jax.data.problems import Problem, load_solutions
from qerl_jax.data.published_examples import MINERVA, WEI
from qerl_jax.rewards.statements import (
    Extract,
    chain_of_thought_statement,
    minerva_statement,
    solution_statement,
)


@dataclasses.dataclass(frozen=True)
class FewShot:
    """Examples and their form.

    Attributes:
      examples: (question, worked answer).
      question: what stands around a question.
      answer: what stands before a worked answer; without its last white space it ends the prompt.
      stop: ends a completion: how the next example would begin.
      extract: the answer that a completion in the examples' form states.
    """

    examples: tuple[tuple[str, str], ...]
    question: str
    answer: str
    stop: str
    extract: Extract

    def prompt(self, question: str) -> str:
        """The examples, a blank line after each, and the question."""
        shots = [f"{self.question.replace('{}', q)}{self.answer}{a}\n\n" for q, a in self.examples]
        return "".join(shots) + self.question.replace("{}", question) + self.answer.rstrip()

    def extract_before_stop(self, completion: str) -> str | None:
        """The answer stated before the next example that a completion makes up, if any."""
        return self.extract(completion.partition(self.stop)[0])


PUBLISHED = {
    "wei": FewShot(WEI, "Q: {}\n", "A: ", "Q:", chain_of_thought_statement),
    "minerva": FewShot(MINERVA, "Problem:\n{}\n\n", "Solution:\n", "Problem:", minerva_statement),
}


def few_shot(name: str, dataset: str, split: str, seed: int) -> FewShot:
    """The few-shot prompt of a name.

    Args:
      name: one of `PUBLISHED`, or a number of examples to draw.
      dataset, split: what is evaluated. Examples are drawn without repetition from its train split, by its worked
        solutions, the same for every question.
      seed: seed of the draw.

    Raises DataError for an unknown name, and where the dataset has no worked solutions or too few, or is itself the
    train split.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    if not (name.isascii() and name.isdigit() and int(name) > 0):
        raise DataError(f"few_shot {name!r} is neither one of {sorted(PUBLISHED)} nor a number of examples")
    if split == "train":
        raise DataError(f"few_shot {name} draws examples from the train split, which is what is evaluated")
    problems = load_solutions(dataset, "train").problems
    if len(problems) < int(name):
        raise DataError(f"few_shot {name}: the train split of {dataset!r} has {len(problems)} worked solutions")
    drawn = random.Random(seed).sample(problems, int(name))
    examples = tuple((problem.prompt, problem.answer) for problem in drawn)
    return FewShot(examples, "Question: {}\n", "Answer: ", "Question:", solution_statement)


def with_examples(problems: Sequence[Problem], shots: FewShot) -> list[Problem]:
    """The problems with their few-shot prompt as their only message, to be encoded without a chat template."""
    return [dataclasses.replace(p, messages=(("user", shots.prompt(p.prompt)),)) for p in problems]
