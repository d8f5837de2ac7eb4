"""Accuracy of a noise-free policy on problems with known answers.

Axes: P problems, k completions of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qerl_jax import keys
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem, completion_texts, encode_problems, to_prompts
from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Reward
from qerl_jax.rollout.engine import generate
from qerl_jax.types import Engine, FinishReason, Policy, Sampling

_Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      accuracy: share of correct completions: pass@1, which over k > 1 completions a problem is avg@k.
      low, high: 95 % interval of it (`interval`).
      pass_at_k: share of problems with at least one correct completion among `generations`.
      format: share of completions with think and answer blocks.
      truncated: share of completions cut off at the token limit.
      mean_length: tokens of a completion.
      problems, generations: how many problems, and completions of each.
      failed: completions whose largest logit was not finite; they count as wrong.
    """

    accuracy: float
    low: float
    high: float
    pass_at_k: float
    format: float
    truncated: float
    mean_length: float
    problems: int
    generations: int
    failed: int = 0

    def describe(self) -> str:
        """One line for people."""
        name = "pass@1" if self.generations == 1 else f"avg@{self.generations}"
        interval = f"{100 * self.low:.1f}–{100 * self.high:.1f}"
        failed = f", {self.failed} completions whose largest logit was not finite" if self.failed else ""
        return f"{name} {100 * self.accuracy:.1f} % (95 % interval {interval}, {self.problems} problems{failed})"

    def metrics(self) -> dict[str, float]:
        """`eval/…`, for the curves of a run."""
        names = ("accuracy", "pass_at_k", "format", "truncated", "mean_length")
        return {f"eval/{name}": getattr(self, name) for name in names}


def interval(correct: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of `correct[problems, k]`.

    k = 1: Wilson's score interval. k > 1: normal approximation over the problems' means, because completions of one
    problem are not independent.
    """
    count, k = correct.shape
    mean = float(correct.mean())
    if k == 1:
        centre = (mean + _Z95**2 / (2 * count)) / (1 + _Z95**2 / count)
        half = _Z95 / (1 + _Z95**2 / count) * math.sqrt(mean * (1 - mean) / count + _Z95**2 / (4 * count**2))
    else:
        centre, half = mean, _Z95 * float(correct.mean(axis=1).std(ddof=1)) / math.sqrt(count) if count > 1 else 1.0
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    policy: Policy,
    problems: Sequence[Problem] | Sequence[EncodedProblem],
    sampling: Sampling,
    seed: int = 0,
    system_prompt: str = "",
    max_prompt_length: int = 512,
    engine: Engine | None = None,
    reward: Reward = functions.answer,
) -> Evaluation:
    """Sample completions of every problem with the policy's own (noise-free) norms and count the correct ones.

    Args:
      policy: with a tokenizer.
      problems: plain, or encoded already (`system_prompt` is then unused).
      sampling: `num_generations` completions of each problem.
      seed: seed of the samples.
      system_prompt, max_prompt_length: settings of the encoding; longer prompts are left out.
      engine: how to roll out; None: 64 completions at a time.
      reward: what is correct: a completion to which it gives more than 0.
    """
    if not isinstance(problems[0], EncodedProblem):
        problems, _ = encode_problems(list(problems), policy.tokenizer, system_prompt, max_prompt_length)
    longest = max(len(item.tokens) for item in problems)
    prompts = to_prompts(list(problems), longest, policy.config.pad_token_id)
    key = keys.for_step(seed, keys.Purpose.EVALUATE, 0)
    rollout = generate(policy, prompts, sampling, key, engine or Engine(slots=64))
    texts = completion_texts(rollout, policy.tokenizer)
    rows = [item.problem for item in problems for _ in range(sampling.num_generations)]
    values = reward(
        prompts=[row.prompt for row in rows],
        completions=texts,
        answer=[row.answer for row in rows],
        prompt_index=np.asarray(rollout.prompt_index).tolist(),
    )
    correct = np.array([value is not None and value > 0 for value in values], float)
    correct = correct.reshape(len(problems), sampling.num_generations)
    low, high = interval(correct)
    return Evaluation(
        accuracy=float(correct.mean()),
        low=low,
        high=high,
        pass_at_k=float((correct.max(axis=1) > 0).mean()),
        format=float(np.mean(functions.soft_format(completions=texts))),
        truncated=float(np.mean(np.asarray(rollout.finish) == FinishReason.LENGTH)),
        mean_length=float(np.mean(np.asarray(rollout.lengths - rollout.prompt_lengths))),
        problems=len(problems),
        generations=sampling.num_generations,
        failed=int(np.sum(np.asarray(rollout.finish) == FinishReason.FAILED)),
    )
