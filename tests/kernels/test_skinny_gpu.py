"""The skinny GEMM on a Hopper GPU, against sums in fp64 of the dequantized weights."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_oracle import activations, adapters, assert_repeats, bits, check, exact, kernel, needs_gpu, weight_of
from qerl_kernels import dispatch
from qerl_kernels.nvfp4_matmul import packing, tuning
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import route
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul
from test_tuning import timed

pytestmark = needs_gpu
# tile_m, m16_tiles, warps, cluster, stages
SKINNY = [
    (8, 1, 4, 1, 2), (8, 4, 8, 2, 3), (16, 8, 4, 3, 2), (16, 2, 12, 1, 1), (32, 4, 4, 7, 2), (24, 4, 4, 8, 3),
    (64, 1, 8, 2, 2), (48, 2, 4, 3, 3),
]  # fmt: skip


@pytest.mark.parametrize("config", SKINNY)
@pytest.mark.parametrize("n, k", [(512, 64 * 8), (640, 64 * 37), (600, 1040), (4608, 3584)])
def test_skinny(config, n, k):
    """The skinny kernel, with fewer k-tiles than warps, with many rounds of a warp's stages, and in blocks of rows."""
    config = SkinnyConfig(*config).specialize(n)
    weight = weight_of(n, k, seed=n, uniform=False)
    packed = packing.pack(weight)
    for m in (1, config.tile_m - 3, config.tile_m, 2 * config.tile_m + 3):
        x = activations(m, k, m)
        x64, w = exact(x, weight)
        check(skinny_matmul(x, packed, config), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("config", SKINNY)
@pytest.mark.parametrize(
    "widths, ranks", [((640,), (32,)), ((640,), (8,)), ((512, 64, 64), (64, 16, 40)), ((400, 240), (24, 32))]
)
def test_skinny_with_adapters(config, widths, ranks):
    config, k = SkinnyConfig(*config), 1024
    weight = weight_of(640, k)
    packed = packing.pack(weight)
    rng = np.random.default_rng(len(ranks))
    for m, dtype in (
        (config.tile_m, jnp.bfloat16),
        (config.tile_m - 5, jnp.float32),
        (2 * config.tile_m + 3, jnp.float32),
    ):
        x, bias = activations(m, k), jnp.asarray(rng.normal(size=640) * 100, dtype)
        t = [jnp.asarray(rng.normal(size=(m, rank)), jnp.bfloat16) for rank in ranks]
        b = [jnp.asarray(rng.normal(size=shape) * 50, jnp.bfloat16) for shape in zip(ranks, widths, strict=True)]
        lora_x = t[0] if len(t) == 1 else jnp.concatenate([jnp.pad(p, ((0, 0), (0, 64 - p.shape[1]))) for p in t], 1)
        x64, w = exact(x, weight)
        delta = [np.asarray(p, np.float64) @ np.asarray(q, np.float64) for p, q in zip(t, b, strict=True)]
        expected = x64 @ w.T + np.asarray(bias, np.float64) + 0.75 * np.concatenate(delta, axis=1)
        call = functools.partial(skinny_matmul, x, packed, config, bias=bias, lora_b=tuple(b), scale=0.75)
        y = call(lora_x=lora_x)
        half = jnp.concatenate(t, axis=1).astype(jnp.float32) / 2
        parts = jnp.stack([half, jnp.zeros_like(half), half])
        np.testing.assert_array_equal(np.asarray(call(lora_x=parts)), np.asarray(y))
        y = np.asarray(y, np.float64)
        assert np.linalg.norm(y - expected) <= 2.6e-3 * np.linalg.norm(expected)
        assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + 1e-4 * np.abs(x64 @ w.T).max())


# the same of configs that compute `x A`
SKINNY_OWN = [
    (8, 8, 8, 4, 2), (8, 2, 4, 1, 3), (16, 4, 8, 3, 2), (16, 1, 12, 8, 1), (32, 2, 4, 4, 2), (24, 4, 4, 2, 1),
    (64, 1, 4, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("config", SKINNY_OWN)
@pytest.mark.parametrize("k", [64 * 37, 1040])
@pytest.mark.parametrize(
    "widths, ranks", [((640,), (32,)), ((640,), (8,)), ((384, 128, 128), (32, 16, 24)), ((256, 384), (48, 64))]
)
def test_skinny_that_computes_x_a(config, k, widths, ranks):
    """Against fp64, each warp's part of `x A` within bf16's rounding; a thousand runs give the same bits."""
    config = SkinnyConfig(*config, computes_lora_x=True)
    if not config.fits(640, k, max(ranks)):  # a rank of 64 takes more of a stage, and more registers
        config = dataclasses.replace(config, stages=1, tile_m=min(config.tile_m, 32))
    weight = weight_of(640, k)
    packed = packing.pack(weight)
    rng = np.random.default_rng(k + len(ranks))
    b = [jnp.asarray(rng.normal(size=shape) * 2000, jnp.bfloat16) for shape in zip(ranks, widths, strict=True)]
    a = jnp.asarray(rng.normal(size=(k, sum(ranks))) / k**0.5, jnp.bfloat16)
    for m, dtype in ((2 * config.tile_m - 5, jnp.float32), (config.tile_m, jnp.bfloat16)):
        x, bias = activations(m, k), jnp.asarray(rng.normal(size=640) * 100, dtype)
        x64, w = exact(x, weight)
        t = np.split(x64 @ np.asarray(a, np.float64), np.cumsum(ranks)[:-1], axis=1)
        delta = [p @ np.asarray(q, np.float64) for p, q in zip(t, b, strict=True)]
        expected = x64 @ w.T + np.asarray(bias, np.float64) + 0.75 * np.concatenate(delta, axis=1)
        call = functools.partial(skinny_matmul, weight=packed, bias=bias, lora_b=tuple(b), scale=0.75)
        y = np.asarray(call(x, config=config, lora_a=a), np.float64)
        assert np.linalg.norm(y - expected) <= 2.8e-3 * np.linalg.norm(expected)
        assert np.abs(y - expected).max() <= 2.0**-6 * np.abs(expected).max()
        # a warp's part of t has a variance of 1 / parts, so that its rounding is 2^-9 of some three times that root
        parts = config.warps * config.cluster
        of_t = 3 * 2.0**-9 * parts**0.5 * np.concatenate([np.abs(np.asarray(q, np.float64)).sum(0) for q in b])
        assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + 0.75 * of_t)

    assert_repeats(lambda x: call(x, config=config, lora_a=a), x)


def test_a_gemm_that_computes_x_a_is_called_so(tmp_path):
    """From the entry point with a table that says so; NaN in one row stays there."""
    n, k = 1024, 3584
    config = SkinnyConfig(8, 8, 8, 4, 2, computes_lora_x=True)
    plain = dataclasses.replace(config, computes_lora_x=False)
    packed, x = packing.pack(weight_of(n, k)), activations(8, k)
    loras = adapters(k, (768, 256), 32)
    found = {}
    for how in (config, plain):
        row, form = tuning.Row("forward", n, k, 8, how, 5.0), LoraForm.A if how.computes_lora_x else LoraForm.PARTIALS
        with dispatch.lowering_for(timed(tmp_path / str(how.computes_lora_x), row, gpu=dispatch.this_gpu())):
            assert route(8, packed, loras, x.dtype).lora_form is form
            found[how] = np.asarray(kernel(x, packed, None, loras), np.float64)
            spoilt = np.asarray(kernel(x.at[3].set(jnp.nan), packed, None, loras), np.float64)
        assert np.isnan(spoilt[3]).all()
        np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(found[how], 3, 0))
    assert np.linalg.norm(found[config] - found[plain]) <= 2e-3 * np.linalg.norm(found[plain])


@pytest.mark.parametrize("config", SKINNY)
def test_skinny_rows_do_not_touch_each_other(config):
    """A row's bits are the same whatever the others hold, NaN too, and however many there are, a thousand times."""
    config = SkinnyConfig(*config)
    packed = packing.pack(weight_of(1024, 3584))
    x = activations(2 * config.tile_m - 1, 3584)
    whole = bits(skinny_matmul(x, packed, config))
    np.testing.assert_array_equal(bits(skinny_matmul(x[:5], packed, config)), whole[:5])
    spoilt = skinny_matmul(x.at[3].set(jnp.nan), packed, config)
    assert np.isnan(np.asarray(spoilt[3], np.float32)).all()
    np.testing.assert_array_equal(np.delete(bits(spoilt), 3, 0), np.delete(whole, 3, 0))

    assert_repeats(lambda x: skinny_matmul(x, packed, config), x)
