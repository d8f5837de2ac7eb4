"""Which prompts are prefilled together, and that packing them changes nothing."""

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
from qerl_jax.rollout.packing import Pack, pack
from qerl_jax.rollout.plan import Plan

BOUND = 8192


def streams(count: int, seed: int = 0):
    """Queues of prompts of all sizes: lengths log-uniform between two that are drawn first."""
    rng = random.Random(seed)
    for _ in range(count):
        low, high = sorted(2 ** rng.uniform(0, 14) for _ in range(2))
        yield [round(low * (high / low) ** rng.random()) for _ in range(rng.randint(1, 150))]


def test_prompts_of_one_length_fill_their_calls():
    """128 prompts of 256 tokens, as the benchmark has them: nothing is padded."""
    assert pack([256] * 128) == [Pack(32, 8192, 32, 256)] * 4


def test_by_hand():
    assert pack([]) == []
    assert pack([5]) == [Pack(1, 256, 16, 64)]
    assert pack([200]) == [Pack(1, 256, 4, 256)]
    assert pack([200, 100]) == [Pack(2, 512, 8, 256)]
    # 2150 tokens: 13 of 150 in a call of 2048 and one of 256 (or the other way round) cost least
    assert sorted(call.tokens for call in pack([150] * 13 + [200])) == [256, 2048]
    assert pack([100, 8192, 9000, 100]) == [
        Pack(1, 256, 4, 256),
        Pack(1, 8192, 1, 8192),
        Pack(1, 10240, 1, 10240),
        Pack(1, 256, 4, 256),
    ]


def test_every_prompt_once_in_a_call_that_has_room_for_it():
    for lengths in streams(100):
        begin = 0
        for call in pack(lengths):
            own = lengths[begin : begin + call.prompts]
            begin += call.prompts
            assert 1 <= len(own) <= call.rows and max(own) <= call.width and sum(own) <= call.tokens
            assert call.tokens <= BOUND or (len(own) == 1 and call.tokens < 1.25 * own[0])
            assert call.rows * call.width <= 4 * call.tokens, "attention's rows stay in proportion"
        assert begin == len(lengths)


def test_share_of_padding():
    """Prompts as GSM8K has them: a twelfth of padding at most where a step has 32, a twentieth where it has 64; in any
    stream of more than a full call less than half.
    """
    rng = random.Random(1)
    for prompts, share in ((32, 1 / 12), (64, 1 / 20)):
        queues = [[rng.randint(60, 250) for _ in range(prompts)] for _ in range(200)]
        real = sum(map(sum, queues))
        assert 1 - real / sum(call.tokens for queue in queues for call in pack(queue)) < share
    checked = 0
    for lengths in streams(100, seed=2):
        if sum(lengths) > BOUND and min(lengths) >= 16:
            assert sum(call.tokens for call in pack(lengths)) < 2 * sum(lengths)
            checked += 1
    assert checked > 15


def test_a_prompt_that_comes_by_itself_costs_less_than_twice_its_tokens():
    for length in range(257, 9000, 13):
        (call,) = pack([length])
        assert length <= call.tokens <= 2 * length and call.rows * call.width <= 4 * call.tokens


def test_long_rows_are_as_many_as_their_tokens():
    """Scores of a row go with the square of its width: 50-token prompts do not ride along in rows of 8192."""
    assert pack([4100, 50, 50, 50])[0] == Pack(1, 8192, 1, 8192)
    for lengths in streams(100, seed=5):
        for call in pack(lengths):
            assert call.width <= 1024 or call.rows * call.width <= call.tokens


def test_few_shapes():
    """Each is a compilation: at most 7 for steps of 64 prompts as GSM8K has them, 8 where prompts come in any number,
    40 for all there is below the bound.
    """

    def shapes(queues) -> set[tuple[int, int, int]]:
        return {(c.tokens, c.rows, c.width) for queue in queues for c in pack(queue) if c.tokens <= BOUND}

    rng = random.Random(3)
    assert len(shapes([rng.randint(60, 250) for _ in range(64)] for _ in range(100))) <= 7
    assert len(shapes([rng.randint(60, 250) for _ in range(rng.randint(1, 64))] for _ in range(300))) <= 8
    assert len(shapes(streams(100, seed=4))) <= 40


def test_alone_a_prompts_shape_depends_on_nothing_else():
    lengths = [3, 200, 8192, 9000, 200]
    assert pack(lengths, alone=True) == [Pack(1, size, 1, size) for size in (16, 224, 8192, 10240, 224)]
    for length in range(1, 3000):
        (call,) = pack([length], alone=True)
        assert length <= call.tokens < length + max(16, length / 4)


@pytest.fixture
def small_sizes(monkeypatch):
    """A bound of 64 tokens, so that prompts at and beyond it are cheap."""
    monkeypatch.setattr(packing, "_SIZES", (8, 16, 64))
    monkeypatch.setattr(packing, "_SMALL", 16)
    monkeypatch.setattr(packing, "_WIDTHS", (2, 8))
    monkeypatch.setattr(packing, "_EFFORT", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_packed_prefill_equals_one_prompt_at_a_time_in_transformers(tmp_path, small_sizes):
    """Hidden states, keys and values of prompts of 1 token to more than the bound, at their places in the caches. The
    filler's embedding is NaN, and the caches keep what they held wherever no prompt's token belongs.
    """
    model = torch_qwen2.make(tmp_path, seed=0, scale=0.3)
    policy = fp32_policy(tmp_path, rank=0)
    poisoned = policy.frozen["embed_tokens"].at[0].set(jnp.nan)
    policy = policy.replace(frozen={**policy.frozen, "embed_tokens": poisoned})
    rng = np.random.default_rng(0)
    lengths = [1, 64, 3, 1, 1, 17, 70, 9, 5, 2, 1, 60, 1]
    prompts = [rng.integers(1, 64, length) for length in lengths]
    places = rng.permutation(len(prompts) + 1)[: len(prompts)].astype(np.int32)  # one place stays empty
    plan = Plan(1, len(prompts) + 1, 72, 8, 0, (policy.dtype,) * policy.config.num_layers)
    held, _ = decode.allocate(policy, plan, 1, jax.random.key(0))
    begin = 0
    calls = pack(lengths)
    assert {call.tokens for call in calls} >= {8, 16, 64, 80} and any(call.prompts > 3 for call in calls)
    for call in calls:
        chosen = range(begin, begin + call.prompts)
        begin += call.prompts
        tokens = np.concatenate([prompts[p] for p in chosen])
        short = call.rows - call.prompts
        held = decode.prefill(
            policy,
            held,
            np.pad(tokens, (0, call.tokens - len(tokens))).astype(np.int32),
            np.asarray([lengths[p] for p in chosen] + [0] * short, np.int32),
            np.asarray([places[p] for p in chosen] + [plan.prompt_slots] * short, np.int32),
            call.width,
            False,
        )
    for prompt, place in zip(prompts, places, strict=True):
        with torch.no_grad():
            out = model.model(torch.tensor(prompt[None]), use_cache=True)
        length = len(prompt)
        np.testing.assert_allclose(held.hidden[place], out.last_hidden_state[0, -1], atol=2e-5)
        assert int(held.lengths[place]) == length
        for layer, theirs in enumerate(out.past_key_values.layers):
            for ours, expected in ((held.cache.keys, theirs.keys), (held.cache.values, theirs.values)):
                np.testing.assert_allclose(ours[layer][place, :, :length], expected[0], atol=2e-5)
                assert not np.any(ours[layer][place, :, length:])
    (empty,) = set(range(plan.prompt_slots)) - set(places.tolist())
    assert not any(np.any(leaf[empty]) for leaf in jax.tree.leaves(held))
