"""The plain path of the fused decode operations against NumPy in fp64, and what their entry points refuse."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.lora_shrink import plan
from qerl_kernels.lora_shrink.shrink import norm_shrink, shrink, silu_shrink
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK

EPS = 1e-6
ROUNDING = {jnp.float32: 2.0**-18, jnp.bfloat16: 2.0**-8}


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def slots(t, ranks):
    """t without its padding, which must be zero."""
    parts = np.split(wide(t), len(ranks), axis=1)
    for part, rank in zip(parts, ranks, strict=True):
        assert part.shape[1] == MAX_RANK
        assert not part[:, rank:].any()
    return np.concatenate([part[:, :rank] for part, rank in zip(parts, ranks, strict=True)], axis=1)


def close(got, expected, dtype, scale=1.0):
    np.testing.assert_allclose(got, expected, rtol=ROUNDING[dtype], atol=scale * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ranks", [(8,), (32, 8, 64)])
def test_norm_shrink(dtype, ranks):
    x, delta = draw(5, 48, seed=1) * 3, draw(5, 48, seed=2, dtype=dtype)
    weight, a = draw(48, seed=3), draw(48, sum(ranks), seed=4, dtype=dtype)
    s, y, t = norm_shrink(x, delta, weight, EPS, a, ranks, dtype=dtype)
    assert (s.dtype, y.dtype, t.dtype) == (jnp.float32, dtype, dtype)
    close(wide(s), wide(x) + wide(delta), jnp.float32)
    expected = wide(s) / np.sqrt(np.mean(wide(s) ** 2, axis=1, keepdims=True) + EPS) * wide(weight)
    close(wide(y), expected, dtype)
    close(slots(t, ranks), wide(y) @ wide(a), dtype)
    alone = norm_shrink(s, None, weight, EPS, a, ranks, dtype=dtype)
    for ours, theirs in zip(alone, (s, y, t), strict=True):
        np.testing.assert_array_equal(wide(ours), wide(theirs))
    assert norm_shrink(x, delta, weight, EPS, dtype=dtype)[2] is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_silu_shrink(dtype):
    gate_up, a = draw(5, 96, seed=1, dtype=dtype) * 4, draw(48, 24, seed=2, dtype=dtype)
    h, t = silu_shrink(gate_up, a, (16, 8))
    gate, up = np.split(wide(gate_up), 2, axis=1)
    close(wide(h), gate / (1 + np.exp(-gate)) * up, dtype)
    close(slots(t, (16, 8)), wide(h) @ wide(a), dtype)
    assert silu_shrink(gate_up)[1] is None
    same, parts = silu_shrink(gate_up, a, (16, 8), in_parts=True)
    np.testing.assert_array_equal(wide(same), wide(h))
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (5, 24)
    np.testing.assert_allclose(wide(parts).sum(0), wide(h) @ wide(a), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shrink(dtype):
    x, a = draw(5, 48, dtype=dtype), draw(48, 64, seed=1, dtype=dtype)
    close(slots(shrink(x, a, (64,)), (64,)), wide(x) @ wide(a), dtype)
    parts = shrink(x, a, (64,), in_parts=True)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (5, 64)
    np.testing.assert_allclose(wide(parts).sum(0), wide(x) @ wide(a), rtol=1e-5, atol=1e-5)


def test_refusals():
    x, a = draw(2, 64), draw(64, 16)
    with pytest.raises(ValueError, match=r"A has 16 columns, the ranks are \[8\]"):
        shrink(x, a, (8,))
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        shrink(x, a, (16,), implementation="cuda")
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="'mosaic_gpu' needs"):
            shrink(x, a, (16,), implementation="mosaic_gpu")


def test_a_chip_too_small_for_the_clusters_is_named(monkeypatch):
    assert plan.missing(64, [32]) is None
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(core_count=114)])
    assert "132 multiprocessors (this GPU has 114)" in plan.missing(64, [32])


@pytest.mark.parametrize("ranks", [(), (8,), (32,), (16, 16, 16), (32, 32, 32), (64, 64, 64)])
@pytest.mark.parametrize(("kind", "features"), [("norm", 3584), ("plain", 3584), ("silu", 18944), ("silu", 896)])
def test_no_plan_lets_the_tokens_change_the_order_of_a_sum(kind, features, ranks):
    """Blocks and warps order the sums; what depends on the number of tokens cuts them otherwise and stays in bounds.
    This holds for every plan, not only the one taken."""
    tasks = [plan.Task(kind, tokens, features, ranks) for tokens in range(1, 129)]
    plans = [plan.plan_for(task) for task in tasks]
    every = [(task, each) for task in tasks for each in plan.plans(task)]
    assert len({(each.blocks, each.warps) for _, each in every}) == 1
    for task, each in every:
        assert each.shares == 1 or task.columns % (plan.LEAST_COLUMNS * each.shares) == 0
        assert each.parts == 1 and each.groups <= -(-task.tokens // 8)
    if ranks == (32, 32, 32) and kind == "norm":  # fewer tokens, more clusters to read A; many, fewer to read it again
        assert [(plans[m - 1].shares, plans[m - 1].groups) for m in (8, 16, 32, 64)] == [(6, 1), (3, 1), (3, 2), (1, 2)]


@pytest.mark.parametrize(
    ("features", "ranks"), [(18944, (32,)), (3584, (32,)), (29568, (64,)), (896, (8,)), (32, (8,))]
)
def test_parts_take_every_chunk_once(features, ranks):
    """And few tokens take no more clusters than begin at one time."""
    for tokens in range(1, 33):
        task = plan.Task("silu", tokens, features, ranks, in_parts=True)
        found = plan.plan_for(task)
        assert found.shares == 1 and -(-tokens // (8 * found.groups)) * found.parts <= plan.AT_ONCE
        of_block = -(-features // plan.CHUNK // (found.blocks * found.parts))
        assert found.warps * -(-of_block // found.warps) * found.blocks * found.parts >= features // plan.CHUNK
        if features == 18944:
            assert found.parts == 7
