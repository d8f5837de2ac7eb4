"""Rollouts and evaluations that replicas share, against those of one process."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fp32_policy, randomized
from replicas import on_replicas

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import encode_problems
from qerl_jax.evaluation import sampled_items
from qerl_jax.evaluation.harness import ANSWER
from qerl_jax.messages import Given
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.rl.experience import Experience, gather_experience
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.shares import generate_share
from qerl_jax.types import Engine, FinishReason, Prompts, Rollout, Sampling, completion_ids

IDS = [3, 1, 3, 3, 2]  # problem 3 comes three times
PROMPTS = Prompts.from_lists([[5, 9, 2], [7], [5, 9, 2], [5, 9, 2], [40, 41]], IDS)
GROUP, PAD = 2, 63


@pytest.fixture(scope="module")
def policy(micro_dir):
    policy = randomized(fp32_policy(micro_dir, rank=2), 1, 0.3)
    return policy.replace(config=dataclasses.replace(policy.config, eos_token_ids=(1, 8), pad_token_id=PAD))


def rollout_of(policy, prompts):
    sampling = Sampling(6, temperature=0.9, num_generations=GROUP)
    return generate(policy, prompts, sampling, jax.random.key(4), Engine(slots=2, chunk=3))


@pytest.fixture(scope="module")
def whole(policy):
    rollout = rollout_of(policy, PROMPTS)
    completions = list(map(tuple, completion_ids(rollout)))
    assert len({completions[row] for row in (0, 1, 4, 5, 6, 7)}) > 4  # of problem 3
    return rollout


@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_samples_are_those_of_one_process(policy, whole, count):
    """Also of problems that come again on other replicas; the last replica of six has no prompt."""

    def share(replicas: Replicas) -> Rollout | None:
        return generate_share(replicas, PROMPTS, lambda prompts: rollout_of(policy, prompts))

    seen = []
    for index in range(count):
        own = share(Replicas(index, count))
        if own is None:
            assert index >= len(IDS)
            continue
        prompts = np.asarray(own.prompt_index)
        assert prompts.tolist() == [p for p in range(index, len(IDS), count) for _ in range(GROUP)]
        rows = np.flatnonzero(np.isin(whole.prompt_index, prompts))
        for name in ("tokens", "lengths", "prompt_lengths", "finish"):
            np.testing.assert_array_equal(getattr(own, name), np.asarray(getattr(whole, name))[rows], err_msg=name)
        np.testing.assert_allclose(own.logprobs, whole.logprobs[rows], atol=1e-5)
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(IDS) * GROUP))


def experience_of(whole: Rollout, places: list[int]) -> Experience:
    """The groups of some prompts, with texts and rewards of their own for each row, by a function of the user's."""
    rows = np.flatnonzero(np.isin(whole.prompt_index, places))
    rollout = jax.tree.map(lambda array: array[rows], whole)
    parts = {
        Given("a", lambda: 0): rows.astype(np.float32),
        "a/timed_out": np.where(rows % 3, 0, np.nan).astype(np.float32),
    }
    rewards = 2 * parts["a"] + parts["a/timed_out"]
    sampled = int((rollout.lengths - rollout.prompt_lengths).sum())
    return Experience(list(places), rollout, [f"row {row}" for row in rows], rewards, parts, len(places), sampled)


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("entropies", [True, False])
def test_all_replicas_gather_the_experience_of_one(whole, count, entropies):
    """In its width, also where no row fills that."""
    tokens = np.pad(whole.tokens, ((0, 0), (0, 3)), constant_values=PAD)
    whole = jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, 3))) if array.ndim == 2 else array, whole)
    whole = whole.replace(tokens=jnp.asarray(tokens), **({} if entropies else {"entropies": None}))
    wanted = experience_of(whole, list(range(len(IDS))))

    def gathered(replicas: Replicas) -> Experience:
        own = list(replicas.share(len(IDS)))
        return gather_experience(replicas, experience_of(whole, own) if own else None, range(len(IDS)), PAD)

    for found in on_replicas(count, gathered):
        assert (found.problems, found.completions, found.drawn) == (wanted.problems, wanted.completions, 5)
        assert found.sampled == wanted.sampled
        arrays = (found.rollout, found.rewards, found.reward_parts), (whole, wanted.rewards, wanted.reward_parts)
        assert jax.tree.structure(arrays[0]) == jax.tree.structure(arrays[1])
        for a, b in zip(*map(jax.tree.leaves, arrays), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@pytest.mark.parametrize("count", [2, 4])
def test_an_evaluation_has_the_items_of_one_process(count):
    """Seven problems, five at a time; completion g of a problem is right where problem and g are both even, and has the
    length of how often the problem came before in its part."""
    tokenizer = load_tokenizer(model_path("tiny"))
    problems = [Problem(i, f"What is {i}?", str(10 + i)) for i in (0, 1, 2, 2, 2, 5, 6)]
    encoded, _ = encode_problems(problems, tokenizer, "", 64)

    def complete(prompts: Prompts, key: jax.Array) -> Rollout:
        rows = []
        for p, (name, before) in enumerate(zip(np.asarray(prompts.ids), prompts.earlier(), strict=True)):
            for g in range(3):
                text = "<think>a</think>" * (1 + before) + f"<answer>{10 + name + (name % 2 or g % 2)}</answer>"
                start = np.asarray(prompts.tokens)[p, : int(prompts.lengths[p])]
                rows.append((p, [*start, *tokenizer.encode(text, add_special_tokens=False)]))
        tokens = np.array([[*row, *[0] * (200 - len(row))] for _, row in rows], np.int32)
        index = jnp.asarray([p for p, _ in rows], jnp.int32)
        lengths = jnp.asarray([len(row) for _, row in rows], jnp.int32)
        finish = jnp.full(len(rows), FinishReason.LENGTH, jnp.int8)
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        return Rollout(jnp.asarray(tokens), zeros, jnp.asarray(prompts.lengths)[index], lengths, finish, index)

    def items(replicas: Replicas = ALONE) -> list:
        return list(sampled_items(complete, tokenizer, encoded, ANSWER, at_once=5, replicas=replicas))

    wanted = items()
    assert [[item.id for item in part] for part in wanted] == [[0, 1, 2, 2, 2], [5, 6]]
    assert wanted[0][0].verdicts[:2] == ["correct", "wrong"] and wanted[0][4].lengths[0] > wanted[0][3].lengths[0]
    for found in on_replicas(count, items):
        assert found == wanted
