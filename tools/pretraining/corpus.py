"""The pretraining corpus: problems with worked solutions, packed into rows of tokens.

A chunk of the corpus is a pure function of (recipe, number), so the corpus does not depend on how many processes make
it. Problems are drawn from a stream of their own, neither that of training nor that of evaluation.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import random
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tokenizers
from pretraining.solutions import write_solution
from pretraining.tokenizer import END_OF_TEXT, IM_END, prompt_text

from qerl_jax.data import word_problems
from qerl_jax.data.word_problems import WordProblem

WIDTH = 512
"""Tokens of a row, and the most of a document."""
CHUNK = 2000
"""Documents of a chunk."""
CHUNKS_AHEAD = 8
"""Chunks that are made before they are asked for, for each process."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the corpus consists of.

    Attributes:
      seed: seed of all documents.
      care: share of authors who make no mistake.
      decay: a problem with one more operation is so many times as frequent.
    """

    seed: int = 0
    care: float = 0.6
    decay: float = 0.7


class Rows(NamedTuple):
    """Packed documents, axes [rows, WIDTH].

    Attributes:
      tokens: token ids, padding at the end of a row.
      segments: number of the document in its row, from 1 on; 0 on padding.
      targets: True on the tokens of solutions, which are what is learned.
    """

    tokens: np.ndarray
    segments: np.ndarray
    targets: np.ndarray


def document(recipe: Recipe, index: int) -> tuple[WordProblem, str]:
    """Problem and solution `index`."""
    rng = random.Random(f"corpus/{recipe.seed}/{index}")
    lengths = range(1, word_problems.HIGH + 1)
    operations = rng.choices(lengths, [recipe.decay**n for n in lengths])[0]
    problem = word_problems.draw(rng, operations)
    return problem, write_solution(problem, rng, recipe.care)


def texts(recipe: Recipe, count: int) -> list[str]:
    """The first documents as text, for the tokenizer."""
    found = (document(recipe, index) for index in range(count))
    return [text for problem, solution in found for text in (problem.question, solution)]


def rows_of(job: tuple[str, Recipe, int]) -> Rows:
    """The rows of a chunk: (tokenizer file, recipe, number of the chunk)."""
    tokenizer_file, recipe, chunk = job
    encoder = tokenizers.Tokenizer.from_file(tokenizer_file)
    made = [document(recipe, index) for index in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
    prompts = [one.ids for one in encoder.encode_batch([prompt_text(problem.question) for problem, _ in made])]
    solutions = [one.ids for one in encoder.encode_batch([solution + IM_END for _, solution in made])]
    return pack(list(zip(prompts, solutions, strict=True)), encoder.token_to_id(END_OF_TEXT))


def pack(documents: list[tuple[list[int], list[int]]], padding: int) -> Rows:
    """Documents (prompt, solution) end to end, longest first, each in the first row that has room for it.

    Raises ValueError for a document longer than a row.
    """
    documents = sorted(documents, key=lambda one: -len(one[0]) - len(one[1]))
    if documents and (longest := sum(map(len, documents[0]))) > WIDTH:
        raise ValueError(f"a document has {longest} tokens, a row {WIDTH}")
    shape = (len(documents), WIDTH)
    tokens, segments, targets = np.full(shape, padding, np.int16), np.zeros(shape, np.uint8), np.zeros(shape, bool)
    used, count, first = [0] * len(documents), [0] * len(documents), 0
    for prompt, solution in documents:
        size = len(prompt) + len(solution)
        row = next(row for row in range(first, len(used)) if used[row] + size <= WIDTH)
        start, end = used[row], used[row] + size
        count[row] += 1
        tokens[row, start:end] = prompt + solution
        segments[row, start:end] = count[row]
        targets[row, start + len(prompt) : end] = True
        used[row] = end
        while first < len(used) and used[first] > WIDTH - 48:  # full: no document is shorter
            first += 1
    filled = sum(1 for row in used if row)
    return Rows(tokens[:filled], segments[:filled], targets[:filled])


def batches(tokenizer_file: str, recipe: Recipe, rows: int, processes: int) -> Iterator[Rows]:
    """Endless batches of so many rows; each document comes once. The rows of a chunk come in random order.

    Args:
      tokenizer_file: tokenizer.json.
      recipe: the corpus.
      rows: rows of a batch.
      processes: how many make chunks ahead; 0: the caller makes them.
    """
    rest: Rows | None = None
    for number, made in enumerate(_chunks(tokenizer_file, recipe, processes)):
        order = np.random.default_rng([recipe.seed, number]).permutation(len(made.tokens))
        shuffled = [array[order] for array in made]
        joined = Rows(*(map(np.concatenate, zip(rest, shuffled, strict=True)) if rest else shuffled))
        full = len(joined.tokens) // rows * rows
        for start in range(0, full, rows):
            yield Rows(*(array[start : start + rows] for array in joined))
        rest = Rows(*(array[full:] for array in joined))


def _chunks(tokenizer_file: str, recipe: Recipe, processes: int) -> Iterator[Rows]:
    """The chunks in order; the next ones are made meanwhile."""
    jobs = ((tokenizer_file, recipe, chunk) for chunk in itertools.count())
    if not processes:
        yield from map(rows_of, jobs)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # JAX has threads, which a fork would lose
        ahead = deque(pool.apply_async(rows_of, (job,)) for job in itertools.islice(jobs, CHUNKS_AHEAD * processes))
        for job in jobs:
            yield ahead.popleft().get()
            ahead.append(pool.apply_async(rows_of, (job,)))
