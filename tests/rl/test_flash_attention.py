"""The two calls that make attention on a GPU, with cuDNN's part in them computed by its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import dense, visible
from test_micro_batches import CASES

from qerl_jax.rl import flash_attention
from qerl_jax.rl.micro_batches import PackShape, assign, pack


def weights(q, k, segments, parameters):
    """(mask [G, T, T] of the pairs of each segment, scores [N, T, T]) of packed tokens as cuDNN is asked for them."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    heads, kv_heads = q.shape[1], k.shape[1]
    q_lengths, k_lengths, q_offsets, k_offsets = segments
    rows, per_row = q_lengths.shape
    q_starts = q_offsets.reshape(-1)[: rows * per_row] // (heads * q.shape[2])
    k_starts = k_offsets.reshape(-1)[: rows * per_row] // (kv_heads * k.shape[2])
    order = jnp.arange(q.shape[0])

    def inside(starts, lengths):
        starts, lengths = starts[:, None], lengths.reshape(-1)[:, None]
        return (order >= starts) & (order < starts + lengths), order - starts

    (q_in, q_place), (k_in, k_place) = inside(q_starts, q_lengths), inside(k_starts, k_lengths)
    mask = q_in[:, :, None] & k_in[:, None, :]
    if parameters["mask_type"] == MaskType.PADDING_CAUSAL:
        mask &= q_place[:, :, None] >= k_place[:, None, :]
    scores = jnp.einsum("tnh,snh->nts", q, jnp.repeat(k, heads // kv_heads, axis=1)) * parameters["scale"]
    return mask, q_in, q_place, scores


def flat(*arrays):
    return [array.reshape(-1, *array.shape[2:]) for array in arrays]


def forward_by_definition(q, k, v, segments, parameters):
    """Poison where cuDNN writes nothing."""
    width = q.shape[1]
    q, k, v = flat(q, k, v)
    mask, q_in, q_place, scores = weights(q, k, segments, parameters)
    scores = jnp.where(mask.any(axis=0), scores, -jnp.inf)
    found = jax.nn.logsumexp(scores, axis=-1)  # [N, T]
    values = jnp.repeat(v, q.shape[1] // v.shape[1], axis=1)
    out = jnp.einsum("nts,snh->tnh", jnp.exp(scores - found[..., None]), values)
    out = jnp.where(mask.any(axis=(0, 2))[:, None, None], out, jnp.nan)
    statistics = jnp.full((mask.shape[0], q.shape[1], width), jnp.nan)
    segment, token = jnp.nonzero(q_in, size=q.shape[0], fill_value=mask.shape[0])
    place = q_place[jnp.minimum(segment, mask.shape[0] - 1), token]
    statistics = statistics.at[segment, :, place].set(found[:, token].T, mode="drop")
    return out, statistics


def backward_by_definition(q, k, v, statistics, out, d_out, segments, parameters):
    """From the statistics and the output given, as FlashAttention's: `ds = p (d_out vᵀ − d_out · out)`."""
    shapes = q.shape, k.shape, v.shape
    q, k, v, out, d_out = flat(q, k, v, out, d_out)
    mask, q_in, q_place, scores = weights(q, k, segments, parameters)
    group = q.shape[1] // k.shape[1]
    given = jnp.zeros((q.shape[1], q.shape[0]))
    for i in range(mask.shape[0]):
        of_token = statistics[i][:, jnp.clip(q_place[i], 0, statistics.shape[2] - 1)]
        given = jnp.where(q_in[i], of_token, given)
    p = jnp.where(mask.any(axis=0), jnp.exp(scores - given[..., None]), 0)
    d_p = jnp.einsum("tnh,snh->nts", d_out, jnp.repeat(v, group, axis=1))
    d_s = p * (d_p - (d_out * out).sum(axis=-1).T[..., None]) * parameters["scale"]
    d_q = jnp.einsum("nts,snh->tnh", d_s, jnp.repeat(k, group, axis=1))
    d_k, d_v = (
        jnp.einsum("nts,tnh->snh", weight, x).reshape(k.shape[0], k.shape[1], group, -1).sum(axis=2)
        for weight, x in ((d_s, q), (p, d_out))
    )
    queries, keys = mask.any(axis=(0, 2))[:, None, None], mask.any(axis=(0, 1))[:, None, None]
    gradients = zip((d_q, d_k, d_v), (queries, keys, keys), shapes, strict=True)
    return [jnp.where(some, x, jnp.nan).reshape(shape) for x, some, shape in gradients]


@functools.partial(jax.jit, static_argnames="shape")
def forward_and_backward(q, k, v, d_out, packed, shape):
    out, statistics = flash_attention.forward(q, k, v, packed, shape)
    out = jnp.where(packed.real[:, None, None], out, 0)
    return out, *flash_attention.backward(q, k, v, out, statistics, d_out, packed, shape)


@pytest.mark.parametrize(
    ("case", "tokens", "has_room"),
    [("groups", 41, False), ("groups", 40, True), *((case, 40, False) for case in CASES)],
)
def test_both_calls_together_are_the_attention_of_each_sequence(monkeypatch, case, tokens, has_room):
    """With 40 tokens in four rows, or in five where all segments are short; with 41 in one. With room in the layout for
    more prefixes and suffixes than there are.
    """
    monkeypatch.setattr(flash_attention, "_cudnn_forward", forward_by_definition)
    monkeypatch.setattr(flash_attention, "_cudnn_backward", backward_by_definition)
    lengths, prompt_lengths, prompts = map(np.array, CASES[case])
    shape = PackShape(tokens, 3, 6, 20, 10, 10, short=8, suffixes_beside_long=3)
    rng = np.random.default_rng(0)
    for some in assign(lengths, prompt_lengths, prompts, shape).micro_batches():
        prefixes, suffixes = (shape.prefixes + 2, shape.suffixes + 1) if has_room else (shape.prefixes, shape.suffixes)
        some = some.with_room(suffixes)
        packed = pack(some, jnp.asarray(lengths), jnp.asarray(prompt_lengths), tokens, prefixes)
        q, k, v, d_out = (jnp.asarray(rng.normal(size=(tokens, n, 3)), jnp.float32) for n in (4, 2, 2, 4))
        real = packed.real[:, None, None]
        q, k, v, d_out = (jnp.where(real, x, 0) for x in (q, k, v, d_out))
        kind = shape.holding(int(packed.lengths.max()))
        assert flash_attention.views(kind)[0] == (1 if tokens == 41 else 5 if packed.lengths.max() <= 8 else 4)
        found = jax.jit(forward_and_backward, static_argnums=5)(q, k, v, d_out, packed, kind)
        for own, wanted in zip(found, dense(q, k, v, d_out, visible(some, packed)), strict=True):
            np.testing.assert_allclose(jnp.where(real, own, 0), wanted, atol=1e-5)


def test_cudnns_operations_take_what_they_are_given():
    """Shapes alone; their parameters have changed from one jax to the next."""
    shape = PackShape(2560, 5, 9, 1280, 256, 1024)
    packed = jax.eval_shape(lambda n: pack(assign_nothing(9), n, n, 2560, 5), jax.ShapeDtypeStruct((12,), jnp.int32))
    q, k = (jax.ShapeDtypeStruct((2560, heads, 128), jnp.bfloat16) for heads in (28, 4))
    out, statistics = jax.eval_shape(lambda *a: flash_attention.forward(*a, shape), q, k, k, packed)
    assert (out.shape, statistics.shape, statistics.dtype) == (q.shape, (2560, 28), jnp.float32)
    gradients = jax.eval_shape(lambda *a: flash_attention.backward(*a, shape), q, k, k, out, statistics, out, packed)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def assign_nothing(suffixes: int):
    from qerl_jax.rl.micro_batches import Assignment

    return Assignment(np.full(suffixes, -1, np.int32), np.zeros(suffixes, np.int32))
