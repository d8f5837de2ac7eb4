"""Accuracy of a noise-free policy on problems with known answers.

Axes: P problems, n completions of each, B = P · n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from qerl_jax import keys
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem, completion_texts, encode_problems, to_prompts
from qerl_jax.evaluation.grading import NO_GOLD, WRONG, Grader, grader_of
from qerl_jax.evaluation.summary import Evaluation, Item, summarize
from qerl_jax.parallel import ALONE, Replicas, in_order
from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Reward
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.shares import generate_share
from qerl_jax.types import Engine, FinishReason, Policy, Prompts, Rollout, Sampling

Generate = Callable[[Policy, Prompts, Sampling, Array, Engine | None], Rollout]
"""A function of the contract of `rollout.engine.generate`."""

ANSWER = grader_of("answer", functions.answer)
"""A completion is correct if the text of its `<answer>` states the gold number."""


def evaluate(
    policy: Policy,
    problems: Sequence[Problem] | Sequence[EncodedProblem],
    sampling: Sampling,
    seed: int = 0,
    system_prompt: str = "",
    max_prompt_length: int = 512,
    engine: Engine | None = None,
    reward: Reward | Grader = ANSWER,
    sample: Generate | None = None,
    replicas: Replicas = ALONE,
) -> Evaluation:
    """Sample completions of every problem with the policy's own (noise-free) norms and count the correct ones.

    Args:
      policy: with a tokenizer.
      problems: plain, or encoded already (`system_prompt` is then unused).
      sampling: `num_generations` completions of each problem.
      seed: seed of the samples.
      system_prompt, max_prompt_length: settings of the encoding; longer prompts are left out.
      engine: how to roll out; None: 64 completions at a time.
      reward: what is correct: a completion to which it gives more than 0. A `Grader` also extracts answers, for maj@n.
      sample: what samples completions; None: `generate`.
      replicas: the processes that share the problems; each gets the whole result.

    Raises ValueError for no problems, or none of at most `max_prompt_length` tokens.
    """
    if not problems:
        raise ValueError("no problems to evaluate")
    if not isinstance(problems[0], EncodedProblem):
        problems, _ = encode_problems(list(problems), policy.tokenizer, system_prompt, max_prompt_length)
    grader = reward if isinstance(reward, Grader) else Grader(reward)
    engine = engine or Engine(slots=64)

    def complete(prompts: Prompts, key: Array) -> Rollout:
        return (sample or generate)(policy, prompts, sampling, key, engine)

    [items] = sampled_items(complete, policy.tokenizer, problems, grader, seed, replicas=replicas)
    return summarize(items, grader.votes)


def sampled_items(
    complete: Callable[[Prompts, Array], Rollout],
    tokenizer: Any,
    problems: Sequence[EncodedProblem],
    grader: Grader,
    seed: int = 0,
    at_once: int | None = None,
    start: int = 0,
    replicas: Replicas = ALONE,
) -> Iterator[list[Item]]:
    """Items of `at_once` problems after the other (None: of all), from number `start` on, a multiple of it.
    `complete(prompts, key)` samples their completions, those of its own problems on each of several replicas.

    A part is a function of the arguments and its place alone, so that an evaluation which begins again at a later part
    samples what it would have sampled there: all parts have the width of the longest prompt.
    """
    width = max(len(item.tokens) for item in problems)
    key = keys.for_step(seed, keys.Purpose.EVALUATE, 0)
    for first in range(start, len(problems), at_once or len(problems)):
        part = list(problems[first : first + (at_once or len(problems))])
        prompts = to_prompts(part, width)
        rollout, items = generate_share(replicas, prompts, lambda prompts: complete(prompts, key)), []
        if rollout:
            own = [part[place].problem for place in replicas.share(len(part))]
            items = graded_items(own, completion_texts(rollout, tokenizer), rollout, grader)
        yield in_order(replicas.gather(items))


def graded_items(problems: Sequence[Problem], texts: Sequence[str], rollout: Rollout, grader: Grader) -> list[Item]:
    """The problems with the completions of their rollout, judged. One whose largest logit was not finite is wrong and
    has no vote, whatever its text says.
    """
    n = len(texts) // len(problems)
    rows = [problem for problem in problems for _ in range(n)]
    verdicts = grader.verdicts(
        [row.prompt for row in rows],
        [row.answer for row in rows],
        texts,
        np.asarray(rollout.prompt_index).tolist(),
    )
    answers = [grader.extract(text) for text in texts]
    lengths = np.asarray(rollout.lengths - rollout.prompt_lengths).tolist()
    finish = [FinishReason(value).name.lower() for value in np.asarray(rollout.finish).tolist()]
    failed = [reason == FinishReason.FAILED.name.lower() for reason in finish]
    verdicts = [WRONG if bad and one != NO_GOLD else one for one, bad in zip(verdicts, failed, strict=True)]
    answers = [None if bad else one for one, bad in zip(answers, failed, strict=True)]
    items = []
    for place, problem in enumerate(problems):
        own = slice(place * n, (place + 1) * n)
        majority, tied = grader.majority(answers[own])
        columns = (list(texts[own]), answers[own], verdicts[own], lengths[own], finish[own])
        items.append(Item(problem.id, problem.prompt, problem.answer, *columns, majority, tied))
    return items
