"""Accuracy of a noise-free policy on problems with known answers.

Axes: P problems, k completions of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qerl_jax import keys
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem, completion_texts, encode_problems, to_prompts
from qerl_jax.reporting.evaluation import Evaluation, interval
from qerl_jax.rewards import functions
from qerl_jax.rewards.outcomes import Reward
from qerl_jax.rollout.engine import generate
from qerl_jax.types import Engine, FinishReason, Policy, Sampling


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
    """Sample completions of every problem from the policy as it is (noise-free norms) and count the correct ones.

    Args:
      policy: with a tokenizer.
      problems: plain, or encoded already (`system_prompt` is then unused).
      sampling: `num_generations` completions of each problem.
      seed: of the samples.
      system_prompt, max_prompt_length: of the encoding; prompts over the limit are left out.
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
    values = reward(prompts=[row.prompt for row in rows], completions=texts, answer=[row.answer for row in rows])
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
