"""The Mosaic GPU product on a Hopper GPU over every projection of the models, over shapes drawn at random, over
pipelines of every depth, and its gradients; references are sums in fp64 where nothing else is said."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_oracle import (
    activations,
    adapters,
    assert_gradients_agree,
    check,
    exact,
    kernel,
    needs_gpu,
    poison,
    weight_of,
    with_parameters,
)  # fmt: skip
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

pytestmark = needs_gpu
TOKENS = (1, 8, 15, 32, 63, 96, 130, 257, 1030)


@pytest.mark.parametrize("case", cases.SHAPES)
def test_every_projection(case):
    """The first and the last 64 features, and 256 more."""
    n, k = cases.SHAPES[case]
    packed = cases.random_packed(jax.random.key(0), n, k)
    tiles = np.unique([0, n // 64 - 1, *np.random.default_rng(0).integers(0, n // 64, 4)])
    columns = (64 * tiles[:, None] + np.arange(64)).ravel()
    some = dataclasses.replace(
        packed, words=packed.words[tiles], scales=packed.scales[tiles], multiplier=packed.multiplier[columns],
        global_scale=packed.global_scale[columns], shape=(len(columns), k),
    )  # fmt: skip
    matrix, row = packing.packed_parts(some)
    w = np.asarray(matrix.astype(jnp.float32), np.float64) * np.asarray(row, np.float64)[:, None]
    for m in TOKENS:
        x = activations(m, k, m)
        x64 = np.asarray(x, np.float64)
        poison([(m, n)] * 3)
        y = np.asarray(jax.jit(kernel)(x, packed).astype(jnp.float32))
        assert np.isfinite(y).all()
        check(jnp.asarray(y[:, columns]), x64 @ w.T, x64, w, k)


def drawn(seed):
    """m, n, k and whether there is a bias."""
    rng = np.random.default_rng(seed)
    m = int(2 ** rng.uniform(0, 10))
    return m, int(rng.integers(1, 3000)), 16 * int(rng.integers(1, 200)), bool(rng.integers(2))


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed):
    """Forward with codes and scales of every kind (subnormal, zero, -0, the largest), and dx."""
    m, n, k, biased = drawn(seed)
    weight = weight_of(n, k, seed)
    packed, x, dy = packing.pack(weight), activations(m, k, seed), activations(m, n, seed + 1)
    x64, w = exact(x, weight)
    expected = x64 @ w.T
    bias = jnp.asarray(np.random.default_rng(seed).normal(size=n) * expected.std(), jnp.float32) if biased else None
    expected += np.asarray(bias, np.float64) if biased else 0
    poison([(m, n)] * 3)
    y, pull = jax.vjp(lambda x: kernel(x, packed, bias), x)
    check(y, expected, x64, w, k)
    dy64 = np.asarray(dy, np.float64)
    poison([(m, k)] * 3)
    check(pull(dy)[0], dy64 @ w, dy64, w.T, n)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_skinny_of_every_number_of_stages_ends(stages, warps):
    config = SkinnyConfig(8, 2, warps, 2, stages)
    for k in (128, 192, 256, 1088, 2048, 8256):
        assert config.fits(320, k)
        weight = weight_of(320, k, seed=k)
        x = activations(7, k)
        x64, w = exact(x, weight)
        check(skinny_matmul(x, packing.pack(weight), config), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("case, m", [("qkv_7b", 2048), ("gate_up_3b", 4096), ("down_7b", 512)])
def test_large_gradients_agree_with_xla(case, m):
    n, k = cases.SHAPES[case]
    packed, loras = cases.random_packed(jax.random.key(0), n, k), adapters(k, cases.parts(case), 32)
    loras = with_parameters(loras, [(lora.a, lora.b / 50) for lora in loras], 2.0)
    assert_gradients_agree(packed, m, jnp.ones(n, jnp.bfloat16), loras)
