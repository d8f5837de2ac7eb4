"""Intervals of an accuracy against published values, and the description people read."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qerl_jax import evaluation, keys
from qerl_jax.data.problems import Problem
from qerl_jax.evaluation import Evaluation, evaluate, interval
from qerl_jax.io.assets import model_path
from qerl_jax.io.tokenizer import load_tokenizer
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.metrics import EvaluationResults
from qerl_jax.types import Engine, FinishReason, Policy, Rollout, Sampling


def test_wilson_interval():
    # Newcombe 1998 (Statistics in Medicine 17, table I), method 3: 81 of 263, and 0 of 20.
    low, high = interval(np.repeat([1.0, 0.0], [81, 182])[:, None])
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    low, high = interval(np.zeros((20, 1)))
    assert (low, high) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_interval_over_problems_treats_completions_as_dependent():
    correct = np.repeat([[1.0], [0.0], [1.0], [1.0]], 100, axis=1)
    mean, half = 0.75, 1.959964 * np.std([1, 0, 1, 1], ddof=1) / 2
    assert interval(correct) == pytest.approx((mean - half, min(1, mean + half)), abs=1e-6)


def test_results_survive_the_process(tmp_path):
    result = Evaluation(0.5, 0.4, 0.6, 0.9, 1.0, 0.0, 12.5, 200, 1)
    EvaluationResults(tmp_path).put("before", result)
    assert EvaluationResults(tmp_path).get("before") == result and EvaluationResults(tmp_path).get("after") is None
    assert result.describe() == "pass@1 50.0 % (95 % interval 40.0–60.0, 200 problems)"
    broken = dataclasses.replace(result, failed=3).describe()
    assert broken == result.describe()[:-1] + ", 3 completions whose largest logit was not finite)"


RIGHT = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]])  # four problems, three completions each


@pytest.fixture
def written(monkeypatch):
    """A policy whose rollout is written here: completion g of problem p gives p's answer where `RIGHT`, else that of
    the next problem. The second one of the last problem is cut off, its last one failed.
    """
    tokenizer = load_tokenizer(model_path("tiny"))
    model = types.SimpleNamespace(pad_token_id=0)
    policy = Policy(None, None, None, nnx.graphdef(nnx.Module()), model, LoraConfig(), tokenizer=tokenizer)
    calls = []

    def generate(policy, prompts, sampling, key, engine):
        rows = []
        for p, right in enumerate(RIGHT):
            for g, own in enumerate(right):
                answer = 10 + (p if own else (p + 1) % len(RIGHT))
                text = f"<think>{g}</think><answer>{answer}</answer>" if p else f"<answer>{answer}</answer>"
                start = np.asarray(prompts.tokens)[p, : int(prompts.lengths[p])]
                rows.append((p, [*start, *tokenizer.encode(text, add_special_tokens=False)]))
        width = max(len(row) for _, row in rows)
        tokens = np.array([[*row, *[0] * (width - len(row))] for _, row in rows], np.int32)
        index = jnp.asarray([p for p, _ in rows], jnp.int32)
        finish = [FinishReason.STOP] * 10 + [FinishReason.LENGTH, FinishReason.FAILED]
        lengths = jnp.asarray([len(row) for _, row in rows], jnp.int32)
        logprobs = jnp.zeros(tokens.shape, jnp.float32)
        calls.append((prompts, sampling, key, engine, lengths - prompts.lengths[index]))
        finish = jnp.asarray(finish, jnp.int8)
        return Rollout(jnp.asarray(tokens), logprobs, prompts.lengths[index], lengths, finish, index)

    monkeypatch.setattr(evaluation, "generate", generate)
    return policy, calls


def test_several_completions_a_problem(written):
    """Each with its own problem's answer; pass@3 is the share of problems solved at least once, not the mean."""
    policy, calls = written
    problems = [Problem(7 + i, f"What is {i}?", str(10 + i)) for i in range(4)]
    result = evaluate(policy, problems, Sampling(9, num_generations=3), seed=5, engine=Engine(slots=2))
    [(prompts, sampling, key, engine, lengths)] = calls
    assert (sampling, engine) == (Sampling(9, num_generations=3), Engine(slots=2))
    assert prompts.ids.tolist() == [7, 8, 9, 10]
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 3), 0)  # purpose 3: EVALUATE
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected)) and keys.Purpose.EVALUATE == 3
    assert (result.problems, result.generations, result.failed) == (4, 3, 1)
    assert result.accuracy == pytest.approx(5 / 12) and result.pass_at_k == 3 / 4
    half = 1.959964 * np.std([1 / 3, 0, 1, 1 / 3], ddof=1) / 2
    assert (result.low, result.high) == pytest.approx((max(0, 5 / 12 - half), 5 / 12 + half), abs=1e-6)
    assert result.format == 9 / 12 and result.truncated == pytest.approx(1 / 12)
    assert result.mean_length == pytest.approx(np.mean(lengths))
    assert result.describe().startswith("avg@3 41.7 %")


def test_what_counts_as_correct_is_a_reward_above_zero(written):
    """None and 0 are wrong, any share of 1 is right; the reward sees each problem's own prompt and answer."""
    policy, _ = written
    problems = [Problem(i, f"What is {i}?", str(10 + i)) for i in range(4)]
    seen = []

    def reward(*, prompts, answer, **_):
        seen.extend(zip(prompts, answer, strict=True))
        return [None, 0.0, 0.2] * 4

    result = evaluate(policy, problems, Sampling(9, num_generations=3), reward=reward)
    assert (result.accuracy, result.pass_at_k) == (pytest.approx(1 / 3), 1.0)
    assert seen == [(f"What is {p}?", str(10 + p)) for p in range(4) for _ in range(3)]
