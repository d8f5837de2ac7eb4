"""Block scales by search, and the choice of channel scales: by hand and against float64."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import numpy_formats as oracle

from qerl_jax.models import awq
from qerl_jax.models.formats import nvfp4, nvfp4_search

E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def block_errors(block: np.ndarray, importance: np.ndarray, scales: np.ndarray, divisor: float) -> np.ndarray:
    """`Σ h (Q − W)²` of one block under each of several scales, in float64, by the nearest E2M1 value."""
    steps = scales[:, None, None] / divisor
    distances = np.abs(block[None, :, None] - oracle.E2M1 * steps)
    return (importance * distances.min(-1) ** 2).sum(-1)


@pytest.mark.parametrize("seed", range(4))
def test_every_block_has_the_best_scale_of_the_window(seed):
    """From two E4M3 numbers below round-to-nearest's to five above; in 9 of 10 blocks no E4M3 number is better."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_t(4, (12, 64)) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32)
    importance = rng.lognormal(sigma=1.5, size=64).astype(np.float32)
    divisor = nvfp4.global_scale(float(np.abs(weight).max()), np.float32)
    chosen = nvfp4_search.block_scales(weight, importance, divisor).astype(np.float64)
    nearest = nvfp4.block_scales(weight, divisor).astype(np.float64)
    globally_best = 0
    for row in range(12):
        for block in range(4):
            features = slice(block * 16, block * 16 + 16)
            place = np.searchsorted(E4M3, nearest[row, block])
            window = E4M3[max(0, place - 2) : place + 6]
            values = weight[row, features].astype(np.float64), importance[features].astype(np.float64)
            least = block_errors(*values, window, float(divisor)).min()
            found = block_errors(*values, chosen[row, block : block + 1], float(divisor))[0]
            assert chosen[row, block] in window
            assert found <= least * (1 + 1e-4) + 1e-30
            globally_best += found <= block_errors(*values, E4M3, float(divisor)).min() * (1 + 1e-4)
    assert globally_best > 43


def test_a_maximum_maps_to_four_where_that_is_better():
    """A six and fifteen fives, squared errors: 15 at scale 1, where fives become 4 (a tie); 1 at 1.25, where the six
    becomes 5; 3.75 at 1.5, where the six is exact (4 · 1.5) and fives are 4.5; 15/64 + 1/4 at 1.625.
    """
    weight = np.full((1, 16), 5, np.float32)
    weight[0, 3] = -6
    importance = np.ones(16, np.float32)
    divisor = np.float32(1)
    assert nvfp4.block_scales(weight, divisor).astype(np.float32).item() == 1
    assert nvfp4_search.block_scales(weight, importance, divisor).astype(np.float32).item() == 1.625
    importance[3] = 100
    found = nvfp4_search.block_scales(weight, importance, divisor)
    assert found.astype(np.float32).item() == 1.5
    values = oracle.nvfp4(*(getattr(nvfp4.quantize(weight, divisor, found), x) for x in ("codes", "scales")), 1, True)
    assert values[0, 2:5].tolist() == [4.5, -6, 4.5]


def test_blocks_of_zeros_and_the_largest_scale():
    """A block of zeros stays one; a scale above 448 is not stored."""
    weight = np.zeros((1, 32), np.float32)
    weight[0, :16] = 6 * 448
    found = nvfp4_search.block_scales(weight, np.ones(32, np.float32), np.float32(1))
    assert found.astype(np.float32)[0, 0] == 448 and found.astype(np.float32)[0, 1] > 0
    assert oracle.nvfp4(nvfp4.quantize(weight, np.float32(1), found).codes, found, 1, True)[0, 16:].max() == 0


def test_the_output_error_is_that_of_the_stored_weight():
    """`‖X (W' − W)ᵀ‖²` over some rows, in float64 from the bytes that would be written."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(24, 48)).astype(np.float32)
    rows, columns = (rng.uniform(0.5, 2, n).astype(np.float32) for n in weight.shape)
    inputs, importance = rng.normal(size=(7, 48)).astype(np.float32), rng.uniform(0.1, 3, 48).astype(np.float32)
    stored = weight * columns / rows[:, None]
    largest = nvfp4_search.largest_magnitude(jnp.asarray(weight), rows, columns)
    assert largest == pytest.approx(np.abs(stored).max(), rel=1e-6)
    divisor = nvfp4.global_scale(largest, np.float32)
    written = nvfp4.quantize(stored, divisor, nvfp4_search.block_scales(stored, importance, divisor))
    values = oracle.nvfp4(written.codes, written.scales, divisor, True) * rows[:, None] / columns
    expected = ((inputs.astype(np.float64) @ (values - weight)[5:20].T) ** 2).sum()
    energy = ((inputs.astype(np.float64) @ weight[5:20].T) ** 2).sum()
    weight, inputs = jnp.asarray(weight), jnp.asarray(inputs)
    found = nvfp4_search.output_error(weight, rows, columns, importance, divisor, inputs, (5, 20))
    assert found == pytest.approx(expected, rel=1e-5)
    assert nvfp4_search.output_energy(weight, inputs, (5, 20)) == pytest.approx(energy, rel=1e-5)


def test_channel_scales_protect_large_inputs():
    """One of 64 input features is a hundred times as large: its columns grow, and the error of the output falls."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(64, 64)).astype(np.float32)
    inputs = rng.normal(size=(256, 64)).astype(np.float32)
    inputs[:, 7] *= 100
    squares = (inputs**2).mean(0)
    activations = awq.Activations(squares, jnp.asarray(inputs))
    choice = awq.choose(jnp.asarray(weight), [40, 24], np.ones(64, np.float32), activations)
    assert choice.alpha > 0 and choice.columns.argmax() == 7
    assert np.log(choice.columns).mean() == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(choice.importance * choice.columns**2, squares, rtol=1e-5)

    def error(columns, largest_fraction, scales_of):
        stored = weight * columns
        divisor = np.float32(largest_fraction) * nvfp4.global_scale(float(np.abs(stored).max()), np.float32)
        found = nvfp4.quantize(stored, divisor, scales_of(stored, divisor))
        delta = oracle.nvfp4(found.codes, found.scales, divisor, True) / columns - weight
        parts = (slice(0, 40), slice(40, 64))
        return sum(((inputs @ delta[p].T) ** 2).sum() / ((inputs @ weight[p].T) ** 2).sum() for p in parts)

    def by_search(importance):
        return lambda stored, divisor: nvfp4_search.block_scales(stored, importance, divisor)

    found = error(choice.columns, choice.largest_fraction, by_search(choice.importance))
    unscaled = error(np.ones(64, np.float32), 1, by_search(squares))
    rounded = error(np.ones(64, np.float32), 1, nvfp4.block_scales)
    assert found < 0.8 * unscaled < 0.8 * rounded


def test_a_feature_that_calibration_never_saw_counts_a_little():
    """Its importance is a ten-thousandth of the mean, so that its weights are still rounded to some purpose."""
    inputs = np.random.default_rng(2).normal(size=(32, 32)).astype(np.float32)
    inputs[:, 5] = 0
    weight = np.random.default_rng(3).normal(size=(16, 32)).astype(np.float32)
    weight, ones = jnp.asarray(weight), np.ones(16, np.float32)
    choice = awq.choose(weight, [16], ones, awq.Activations((inputs**2).mean(0), jnp.asarray(inputs)))
    assert (choice.importance * choice.columns**2)[5] == pytest.approx(1e-4 * (inputs**2).mean(), rel=1e-4)
    nothing = awq.Activations(np.zeros(32, np.float32), jnp.zeros((4, 32), jnp.float32))
    assert (awq.choose(weight, [16], ones, nothing).columns == 1).all()
