"""Idle slots, counted step by step in the sampled tokens, and their bounds."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from helpers import fp32_policy, noted_programs

from qerl_jax.rollout.engine import Progress, generate
from qerl_jax.types import Engine, Policy, Rollout, Sampling

CHUNK = 4
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def policy(micro_dir) -> Policy:
    """Without an EOS."""
    return with_eos(fp32_policy(micro_dir, rank=2))


def with_eos(policy: Policy, *ids: int) -> Policy:
    return policy.replace(config=dataclasses.replace(policy.config, eos_token_ids=ids))


@pytest.fixture
def steps() -> Iterator[list[np.ndarray]]:
    """For each decoded chunk: which slot sampled a token in which step."""
    seen = []

    def note(name, _, results):
        if name == "decode_chunk":
            seen.append(np.asarray(results[2]) >= 0)

    with noted_programs(note):
        yield seen


def run(policy: Policy, prompts: int, sampling: Sampling, slots: int, limits=None) -> tuple[Progress, Rollout]:
    lists, engine, seen = [[p + 1, 9, 2] for p in range(prompts)], Engine(slots, chunk=CHUNK), []
    rollout = generate(policy, lists, sampling, KEY, engine, limits, seen.append)
    return seen[-1], rollout


def waits(steps: list[np.ndarray]) -> list[int]:
    """Idle steps of a slot between consecutive sequences."""
    between = []
    for slot in np.concatenate(steps).T:
        between += [gap - 1 for gap in np.diff(np.flatnonzero(slot)).tolist() if gap > 1]
    return between


@pytest.mark.parametrize(("group", "limits"), [(1, [12, 4, 4, 4, 8, 8]), (2, [4, 16, 8, 4])])
def test_no_slot_is_idle_where_limits_allow_it(policy, steps, group, limits):
    """Limits in whole chunks, whose order fills two slots evenly: every slot samples a token in every step."""
    progress, _ = run(policy, len(limits) // group, Sampling(16, num_generations=group), 2, limits)
    assert all(chunk.shape == (CHUNK, 2) and chunk.all() for chunk in steps)
    assert CHUNK * 2 * len(steps) == sum(limits) == progress.tokens


def test_the_next_chunk_runs_while_progress_is_looked_at(policy, steps):
    """Completions of a prompt, of 3 and of 8 chunks: the first is handed out long before the last chunk is sent to the
    device, which has two to do while the results of one are looked at.
    """
    seen = []
    look = lambda progress: seen.append((len(steps), [*progress.completions]))  # noqa: E731
    generate(policy, [[1, 9]], Sampling(32, num_generations=2), KEY, Engine(chunk=CHUNK), [12, 32], look)
    assert [sent for sent, _ in seen] == [min(read + 2, 8) for read in range(1, 9)]
    assert [(read, *rows) for read, (_, rows) in enumerate(seen, 1) if rows] == [(3, 0), (8, 1)]


def test_a_slot_waits_less_than_a_chunk_after_a_limit(policy, steps):
    limits = np.random.default_rng(0).integers(1, 17, 24).tolist()
    run(policy, 12, Sampling(16, num_generations=2), 3, limits)
    assert sum(chunk.sum() for chunk in steps) == sum(limits)
    between = waits(steps)
    assert len(between) > 10 and max(between) == CHUNK - 1


def test_a_slot_waits_less_than_two_chunks_after_an_eos(policy, steps):
    """The host sees an EOS one chunk later, while the next one runs."""
    _, rollout = run(with_eos(policy, *range(12)), 12, Sampling(16, num_generations=2), 3)
    lengths = np.asarray(rollout.lengths - rollout.prompt_lengths)
    assert len(set(lengths.tolist())) > 6 and sum(chunk.sum() for chunk in steps) == lengths.sum()
    between = waits(steps)
    assert len(between) > 10 and CHUNK <= max(between) <= 2 * CHUNK - 1


def test_progress_counts_all_tokens_where_survivors_move(policy, steps):
    """32 slots become 8 while a chunk is in flight in which the other sequences sample their last tokens."""
    limits = [16] * 5 + [6] * 27
    progress, rollout = run(policy, 4, Sampling(16, num_generations=8), 32, limits)
    assert [chunk.shape[1] for chunk in steps] == [32, 32, 8, 8]
    assert progress.tokens == sum(limits) and progress.ended == progress.rows == 32
    assert np.asarray(rollout.lengths - rollout.prompt_lengths).tolist() == limits
