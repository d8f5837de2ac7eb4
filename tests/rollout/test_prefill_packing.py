"""Prefill packing: the choice of batches, and equality with separate prefills."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import fp32_policy
from oracles import torch_qwen2

from qerl_jax.rollout import decode, packing
from qerl_jax.rollout.packing import PrefillBatch, pack_prompts
from qerl_jax.rollout.shapes import RolloutShapes

BOUND = 8192


def streams(count: int, seed: int = 0):
    """Queues of prompts of all sizes: lengths log-uniform between two that are drawn first."""
    rng = random.Random(seed)
    for _ in range(count):
        low, high = sorted(2 ** rng.uniform(0, 14) for _ in range(2))
        yield [round(low * (high / low) ** rng.random()) for _ in range(rng.randint(1, 150))]


def test_prompts_of_one_length_fill_their_calls():
    """128 prompts of 256 tokens, as in the benchmark: no padding."""
    assert pack_prompts([256] * 128) == [PrefillBatch(32, 8192, 32, 256)] * 4


def test_by_hand():
    assert pack_prompts([]) == []
    assert pack_prompts([5]) == [PrefillBatch(1, 256, 16, 64)]
    assert pack_prompts([200]) == [PrefillBatch(1, 256, 4, 256)]
    assert pack_prompts([200, 100]) == [PrefillBatch(2, 512, 8, 256)]
    # 2150 tokens: 13 of 150 in a call of 2048 and one of 256 (or the other way round) cost least
    assert sorted(batch.tokens for batch in pack_prompts([150] * 13 + [200])) == [256, 2048]
    assert pack_prompts([100, 8192, 9000, 100]) == [
        PrefillBatch(1, 256, 4, 256),
        PrefillBatch(1, 8192, 1, 8192),
        PrefillBatch(1, 10240, 1, 10240),
        PrefillBatch(1, 256, 4, 256),
    ]


def test_every_prompt_once_in_a_call_that_has_room_for_it():
    for lengths in streams(100):
        begin = 0
        for batch in pack_prompts(lengths):
            own = lengths[begin : begin + batch.prompts]
            begin += batch.prompts
            assert 1 <= len(own) <= batch.capacity and max(own) <= batch.width and sum(own) <= batch.tokens
            assert batch.tokens <= BOUND or (len(own) == 1 and batch.tokens < 1.25 * own[0])
            assert batch.capacity * batch.width <= 4 * batch.tokens, "attention's rows stay in proportion"
        assert begin == len(lengths)


def test_share_of_padding():
    """Prompt lengths like GSM8K's: padding of at most 1/12 with 32 prompts a step and 1/20 with 64; less than half in
    any queue of more than one full batch.
    """
    rng = random.Random(1)
    for prompts, share in ((32, 1 / 12), (64, 1 / 20)):
        queues = [[rng.randint(60, 250) for _ in range(prompts)] for _ in range(200)]
        real = sum(map(sum, queues))
        assert 1 - real / sum(batch.tokens for queue in queues for batch in pack_prompts(queue)) < share
    checked = 0
    for lengths in streams(100, seed=2):
        if sum(lengths) > BOUND and min(lengths) >= 16:
            assert sum(batch.tokens for batch in pack_prompts(lengths)) < 2 * sum(lengths)
            checked += 1
    assert checked > 15


def test_a_prompt_that_comes_by_itself_costs_less_than_twice_its_tokens():
    for length in range(257, 9000, 13):
        (batch,) = pack_prompts([length])
        assert length <= batch.tokens <= 2 * length and batch.capacity * batch.width <= 4 * batch.tokens


def test_long_rows_are_as_many_as_their_tokens():
    """Attention scores grow with the square of the width: 50-token prompts are not packed with one of 4100."""
    assert pack_prompts([4100, 50, 50, 50])[0] == PrefillBatch(1, 8192, 1, 8192)
    for lengths in streams(100, seed=5):
        for batch in pack_prompts(lengths):
            assert batch.width <= 1024 or batch.capacity * batch.width <= batch.tokens


def test_few_shapes():
    """Each shape is a compilation: at most 7 for steps of 64 prompts with lengths like GSM8K's, 8 for any number of
    prompts, 40 for any lengths below the bound.
    """

    def shapes(queues) -> set[tuple[int, int, int]]:
        return {(c.tokens, c.capacity, c.width) for queue in queues for c in pack_prompts(queue) if c.tokens <= BOUND}

    rng = random.Random(3)
    assert len(shapes([rng.randint(60, 250) for _ in range(64)] for _ in range(100))) <= 7
    assert len(shapes([rng.randint(60, 250) for _ in range(rng.randint(1, 64))] for _ in range(300))) <= 8
    assert len(shapes(streams(100, seed=4))) <= 40


def test_separate_prompts_shape_depends_on_nothing_else():
    lengths = [3, 200, 8192, 9000, 200]
    assert pack_prompts(lengths, separate=True) == [
        PrefillBatch(1, size, 1, size) for size in (16, 224, 8192, 10240, 224)
    ]
    for length in range(1, 3000):
        (batch,) = pack_prompts([length], separate=True)
        assert length <= batch.tokens < length + max(16, length / 4)


@pytest.fixture
def small_sizes(monkeypatch):
    """Largest size 64 tokens, so that prompts at and beyond it are cheap to test."""
    monkeypatch.setattr(packing, "_SIZES", (8, 16, 64))
    monkeypatch.setattr(packing, "_SMALL", 16)
    monkeypatch.setattr(packing, "_WIDTHS", (2, 8))
    monkeypatch.setattr(packing, "_CALL_COST", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_packed_prefill_equals_one_prompt_at_a_time_in_transformers(tmp_path, small_sizes):
    """Hidden states, keys and values of prompts of 1 token to more than the bound, at their places in the caches. The
    filler's embedding is NaN, and the caches stay unchanged wherever no prompt's token belongs.
    """
    model = torch_qwen2.make(tmp_path, seed=0, scale=0.3)
    policy = fp32_policy(tmp_path, rank=0)
    poisoned = policy.frozen["embed_tokens"].at[0].set(jnp.nan)
    policy = policy.replace(frozen={**policy.frozen, "embed_tokens": poisoned})
    rng = np.random.default_rng(0)
    lengths = [1, 64, 3, 1, 1, 17, 70, 9, 5, 2, 1, 60, 1]
    prompts = [rng.integers(1, 64, length) for length in lengths]
    places = rng.permutation(len(prompts) + 1)[: len(prompts)].astype(np.int32)  # one place stays empty
    shapes = RolloutShapes(1, len(prompts) + 1, 72, 8, 0, (policy.dtype,) * policy.config.num_layers)
    prompt_cache, _ = decode.allocate(policy, shapes, 1, jax.random.key(0))
    begin = 0
    batches = pack_prompts(lengths)
    assert {batch.tokens for batch in batches} >= {8, 16, 64, 80} and any(batch.prompts > 3 for batch in batches)
    for batch in batches:
        chosen = range(begin, begin + batch.prompts)
        begin += batch.prompts
        tokens = np.concatenate([prompts[p] for p in chosen])
        short = batch.capacity - batch.prompts
        prompt_cache = decode.prefill(
            policy,
            prompt_cache,
            np.pad(tokens, (0, batch.tokens - len(tokens))).astype(np.int32),
            np.asarray([lengths[p] for p in chosen] + [0] * short, np.int32),
            np.asarray([places[p] for p in chosen] + [shapes.prompt_slots] * short, np.int32),
            batch.width,
            False,
        )
    for prompt, place in zip(prompts, places, strict=True):
        with torch.no_grad():
            out = model.model(torch.tensor(prompt[None]), use_cache=True)
        length = len(prompt)
        np.testing.assert_allclose(prompt_cache.hidden[place], out.last_hidden_state[0, -1], atol=2e-5)
        assert int(prompt_cache.lengths[place]) == length
        for layer, theirs in enumerate(out.past_key_values.layers):
            for ours, expected in ((prompt_cache.cache.keys, theirs.keys), (prompt_cache.cache.values, theirs.values)):
                np.testing.assert_allclose(ours[layer][place, :, :length], expected[0], atol=2e-5)
                assert not np.any(ours[layer][place, :, length:])
    (empty,) = set(range(shapes.prompt_slots)) - set(places.tolist())
    assert not any(np.any(leaf[empty]) for leaf in jax.tree.leaves(prompt_cache))
