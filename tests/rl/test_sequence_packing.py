"""Packing of sequences into micro-batches, and attention of what is packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.models.attention import masked_attention
from qerl_jax.rl.attention import _views, segment_attention, segment_attention_backward
from qerl_jax.rl.packing import PackShape, assign, assign_any, pack, packed_tokens, predictors


def members(rows: np.ndarray) -> list[int]:
    return sorted(rows[rows >= 0].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_every_sequence_lies_in_one_micro_batch_that_holds_it(seed):
    rng = np.random.default_rng(seed)
    shape = PackShape(tokens=64, segments=5, longest=40)
    lengths = rng.integers(0, 41, 30)
    rows = assign(lengths, shape)
    assert members(rows) == np.flatnonzero(lengths).tolist()
    for some in rows:
        used = some[some >= 0]
        assert lengths[used].sum() <= shape.tokens and len(used) <= shape.segments
        assert (some[len(used) :] == -1).all()
    assert rows.shape == (len(rows), 5)


def test_first_fit_decreasing_by_hand():
    assert assign(np.array([3, 9, 1, 6, 4]), PackShape(10, 3, 9)).tolist() == [[1, 2, -1], [3, 4, -1], [0, -1, -1]]
    assert assign(np.array([2, 2, 2, 2]), PackShape(10, 3, 9)).tolist() == [[0, 1, 2], [3, -1, -1]]  # segments are full
    assert assign(np.zeros(2, int), PackShape(10, 2, 9)).tolist() == [[-1, -1]]  # one micro-batch, without a sequence
    with pytest.raises(ValueError, match="11 tokens, at most 10"):
        assign(np.array([11]), PackShape(20, 2, 10))
    with pytest.raises(ValueError, match=r"8 tokens cannot hold .* 9"):
        PackShape(8, 2, 9)


def test_without_lengths_every_sequence_may_be_the_longest():
    assert assign_any(5, PackShape(20, 4, 9)).tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [4, -1, -1, -1]]


def test_places_of_tokens_by_hand():
    tokens = jnp.arange(12).reshape(3, 4) + 100
    packed = pack(jnp.array([2, 0, -1]), jnp.array([2, 4, 3]), jnp.array([1, 1, 2]), PackShape(8, 3, 4))
    assert packed.starts.tolist()[:2] == [0, 3] and packed.lengths.tolist() == [3, 2, 0]
    assert packed.rows.tolist() == [2, 0, 3] and packed.real.tolist() == [True] * 5 + [False] * 3
    assert packed_tokens(tokens, packed).tolist() == [108, 109, 110, 100, 101, 0, 0, 0]
    assert packed.layout.positions.tolist()[:5] == [0, 1, 2, 0, 1]
    assert predictors(packed, 1)[:2, 0].tolist() == [1, 3]  # for the third token of row 2, the second of row 0


@pytest.mark.parametrize("lengths", [[5, 1, 0, 8], [0, 0, 0, 0], [8, 8, 8, 8], [1, 1, 1, 1]])
def test_attention_and_its_gradient_are_those_of_each_sequence(lengths):
    """Against each sequence alone; on the filler and of it: zero."""
    shape, heads, kv_heads, width = PackShape(34, 4, 8), 4, 2, 3
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(34, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    packed = pack(jnp.arange(4), jnp.asarray(lengths), jnp.ones(4, int), shape)
    out, statistics = segment_attention(q, k, v, packed, shape)
    gradients = segment_attention_backward(q, k, v, out, statistics, d_out, packed, shape)
    expected = [np.zeros(x.shape, np.float32) for x in (q, q, k, v)]
    start = 0
    for length in filter(None, lengths):
        own = slice(start, start + length)
        order = jnp.arange(length)

        def alone(q, k, v, mask=(order[:, None] >= order)[None]):
            return masked_attention(q[None], k[None], v[None], mask)[0]

        value, pullback = jax.vjp(alone, q[own], k[own], v[own])
        for into, found in zip(expected, (value, *pullback(d_out[own])), strict=True):
            into[own] = found
        start += length
    for found, wanted in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("longest", [1, 7, 128, 512, 1280, 4608])
@pytest.mark.parametrize("sequences", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("segments", [1, 2, 15, 16, 31])
def test_cudnn_sees_rows_that_hold_every_segment(longest, sequences, segments):
    """cuDNN reads offsets only where a row has two segments or more."""
    shape = PackShape(-(-sequences * longest // 128) * 128, segments, longest)
    rows, row_segments = _views(shape)
    assert row_segments >= 2 and rows * row_segments >= segments
    assert shape.tokens % rows == 0 and shape.tokens // rows >= longest
