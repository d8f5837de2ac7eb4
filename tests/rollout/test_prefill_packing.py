"""Prefill packing: the choice of batches, and equality with separate prefills."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import fp32_policy
from oracles import torch_qwen2

from qerl_jax.rollout import decode
from qerl_jax.rollout.prefill import prefill
from qerl_jax.rollout.prefill_packing import PrefillBatch, PrefillShape, pack_prompts, prefill_shapes
from qerl_jax.rollout.shapes import RolloutShapes

BOUND = 8192


def streams(count: int, seed: int = 0):
    """Queues of prompts of all sizes: lengths log-uniform between two that are drawn first."""
    rng = random.Random(seed)
    for _ in range(count):
        low, high = sorted(2 ** rng.uniform(0, 14) for _ in range(2))
        yield [round(low * (high / low) ** rng.random()) for _ in range(rng.randint(1, 150))]


def packed(
    lengths: list[int], width: int | None = None, separate: bool = False, at_once: bool = False
) -> list[PrefillBatch]:
    """The batches of a rollout with these prompts in arrays of `width` tokens (None: the longest)."""
    if not lengths:
        return []
    width = max(lengths) if width is None else width
    return pack_prompts(lengths, prefill_shapes(len(lengths), width, separate, at_once))


def test_by_hand():
    assert packed([256] * 128) == [PrefillBatch(32, PrefillShape(8192, 128, 256))] * 4  # no padding
    assert packed([]) == []
    assert packed([5]) == [PrefillBatch(1, PrefillShape(512, 32, 64))]
    assert packed([70]) == [PrefillBatch(1, PrefillShape(512, 16, 128))]
    assert packed([200, 100]) == [PrefillBatch(2, PrefillShape(512, 8, 256))]
    assert packed([700]) == [PrefillBatch(1, PrefillShape(1024, 5, 768))]
    # At most 2,800 tokens: sizes 512 and 2048. 2,150 tokens take both.
    assert sorted(batch.shape.tokens for batch in packed([150] * 13 + [200])) == [512, 2048]
    assert packed([100, 8192, 9000, 100]) == [
        PrefillBatch(1, PrefillShape(512, 4, 512)),
        PrefillBatch(1, PrefillShape(8192, 1, 8192)),
        PrefillBatch(1, PrefillShape(10240, 1, 10240)),
        PrefillBatch(1, PrefillShape(512, 4, 512)),
    ]


def test_every_prompt_once_in_a_batch_that_has_room_for_it():
    for lengths in streams(100):
        begin = 0
        for batch in packed(lengths):
            own, shape = lengths[begin : begin + batch.prompts], batch.shape
            begin += batch.prompts
            assert 1 <= len(own) <= shape.capacity and max(own) <= shape.width and sum(own) <= shape.tokens
            assert shape.tokens <= BOUND or (len(own) == 1 and shape.tokens < 1.25 * own[0])
            assert shape.capacity * shape.width <= 4 * shape.tokens, "attention's rows stay in proportion"
        assert begin == len(lengths)


@pytest.mark.parametrize("width", [250, 512])
def test_share_of_padding(width):
    """Prompt lengths like GSM8K's: padding of at most 1/12 with 32 prompts a step and 1/20 with 64; less than half in
    any queue of more than one full batch.
    """
    rng = random.Random(1)
    for prompts, share in ((32, 1 / 12), (64, 1 / 20)):
        queues = [[rng.randint(60, 250) for _ in range(prompts)] for _ in range(200)]
        real = sum(map(sum, queues))
        assert 1 - real / sum(batch.shape.tokens for queue in queues for batch in packed(queue, width)) < share
    checked = 0
    for lengths in streams(100, seed=2):
        if sum(lengths) > BOUND and min(lengths) >= 16:
            assert sum(batch.shape.tokens for batch in packed(lengths)) < 2 * sum(lengths)
            checked += 1
    assert checked > 15


def test_a_prompt_that_comes_by_itself_costs_less_than_twice_its_tokens():
    for length in range(257, 9000, 13):
        (batch,) = packed([length])
        shape = batch.shape
        assert length <= shape.tokens <= 2 * length and shape.capacity * shape.width <= 4 * shape.tokens


def test_long_rows_are_as_many_as_their_tokens():
    """Attention scores grow with the square of the width: 50-token prompts are not packed with one of 4100."""
    assert packed([4100, 50, 50, 50])[0] == PrefillBatch(1, PrefillShape(8192, 1, 6144))
    for lengths in streams(100, seed=5):
        for batch in packed(lengths):
            assert batch.shape.width <= 1024 or batch.shape.capacity * batch.shape.width <= batch.shape.tokens


def test_few_shapes():
    """Each shape is a compilation. The list depends on the number of prompts and their limit, not on their lengths."""
    assert prefill_shapes(64, 256) == tuple(PrefillShape(size, size // 64, 256) for size in (512, 2048, 8192))
    for prompts in (1, 2, 16, 128):
        for width, most in ((256, 3), (512, 3), (1024, 5), (4096, 7), (BOUND, 9), (2 * BOUND, 13)):
            shapes, at_once = (prefill_shapes(prompts, width, at_once=first) for first in (False, True))
            assert len(at_once) <= len(shapes) <= most
            widths = {256, 1024, *(shape.width for shape in shapes)}
            assert set(at_once) <= set(shapes) | {
                PrefillShape(size, (4 if each <= 1024 else 1) * size // each, each)
                for size in (2048, 4096)
                for each in widths
            }
            assert max(shape.width for shape in at_once) >= width
    assert len(prefill_shapes(16, 512, separate=True)) == 16


def test_prompts_that_all_come_first_have_fewer_shapes():
    """8 prompts of up to 256 tokens: one shape. 16 of up to 512, 1,920 tokens of GSM8K: 2048 of 4096, which is half of
    what they may have. 32 of up to 256, 3,840: one of 4096. The largest holds a prompt at the limit.
    """
    assert prefill_shapes(8, 256, at_once=True) == (PrefillShape(2048, 32, 256),)
    assert prefill_shapes(16, 512, at_once=True) == (PrefillShape(2048, 16, 512), PrefillShape(4096, 32, 512))
    assert packed([120] * 16, 512, at_once=True) == [PrefillBatch(16, PrefillShape(2048, 16, 512))]
    assert packed([120] * 32, 256, at_once=True) == [PrefillBatch(32, PrefillShape(4096, 64, 256))]
    assert [shape.tokens for shape in prefill_shapes(64, 256, at_once=True)] == [2048, 8192]
    assert prefill_shapes(1, 3000, at_once=True)[-1] == PrefillShape(4096, 1, 3072)
    assert prefill_shapes(2, 5000, at_once=True)[-1].tokens == 8192
    for lengths in streams(50, seed=7):
        assert sum(batch.prompts for batch in packed(lengths, at_once=True)) == len(lengths)


def test_separate_prompts_shape_depends_on_nothing_else():
    lengths = [3, 200, 8192, 9000, 200]
    sizes = (16, 224, 8192, 10240, 224)
    assert packed(lengths, separate=True) == [PrefillBatch(1, PrefillShape(size, 1, size)) for size in sizes]
    shapes = prefill_shapes(1, 3000, separate=True)
    for length in range(1, 3000):
        (batch,) = pack_prompts([length], shapes)
        assert length <= batch.shape.tokens < length + max(16, length / 4)


def test_packed_prefill_equals_one_prompt_at_a_time_in_transformers(micro_dir):
    """Hidden states, keys and values of prompts of 1 token to a whole batch, at their places in the caches. The
    filler's embedding is NaN, and the caches stay unchanged wherever no prompt's token belongs.
    """
    model, policy = torch_qwen2.load(micro_dir), fp32_policy(micro_dir, rank=0)
    poisoned = policy.frozen["embed_tokens"].at[0].set(jnp.nan)
    policy = policy.replace(frozen={**policy.frozen, "embed_tokens": poisoned})
    rng = np.random.default_rng(0)
    lengths = [1, 64, 3, 1, 1, 17, 70, 9, 5, 2, 1, 60, 1]
    prompts = [rng.integers(1, 64, length) for length in lengths]
    places = rng.permutation(len(prompts) + 1)[: len(prompts)].astype(np.int32)  # one place stays empty
    shapes = RolloutShapes(1, len(prompts) + 1, 72, 8, 1, 1, 0)
    prompt_cache, _ = decode.allocate(jax.random.key(0), policy.config, policy.dtype, shapes)
    begin, row, whole = 0, PrefillShape(64, 4, 64), PrefillShape(80, 1, 80)
    small = PrefillBatch(1, PrefillShape(8, 4, 8)), PrefillBatch(3, PrefillShape(16, 4, 16))
    batches = (
        small[0], PrefillBatch(1, row), PrefillBatch(4, row), PrefillBatch(1, whole), small[1], PrefillBatch(3, row),
    )  # fmt: skip
    for batch in batches:
        chosen = range(begin, begin + batch.prompts)
        begin += batch.prompts
        tokens = np.concatenate([prompts[p] for p in chosen])
        short = batch.shape.capacity - batch.prompts
        prompt_cache = prefill(
            policy,
            prompt_cache,
            np.pad(tokens, (0, batch.shape.tokens - len(tokens))).astype(np.int32),
            np.asarray([lengths[p] for p in chosen] + [0] * short, np.int32),
            np.asarray([places[p] for p in chosen] + [shapes.prompt_slots] * short, np.int32),
            batch.shape.width,
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
