"""`silu_mul` and its gradient against fp64; the program of the gradient for a GPU: `test_compile.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.ops import silu_mul


@pytest.mark.parametrize("shape", [(37, 258), (2, 3, 16), (10,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_silu_mul_and_its_gradient(dtype, shape):
    """With s = sigmoid(gate), `gate s up`; `d_h up (s + gate s (1 − s))` and `d_h gate s`. A few roundings of each
    factor in fp32, where 1 − s has an absolute one, then one to the dtype.
    """
    rng = np.random.default_rng(0)
    gate_up = jnp.asarray(rng.normal(size=shape, scale=4), dtype)
    d_h = jnp.asarray(rng.normal(size=(*shape[:-1], shape[-1] // 2)), dtype)
    value, pullback = jax.vjp(silu_mul, gate_up)
    [gradient] = pullback(d_h)
    assert value.dtype == gradient.dtype == gate_up.dtype and gradient.shape == gate_up.shape
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    s, d_h = 1 / (1 + np.exp(-gate)), np.asarray(d_h, np.float64)
    d_gate, d_up = d_h * up * (s + gate * s * (1 - s)), d_h * gate * s
    size = np.abs(d_h * up * s) * np.maximum(1, np.abs(gate))
    rounding = 0 if dtype == "float32" else 2.0**-8
    for found, exact, most in (
        (value, gate * s * up, np.abs(gate * s * up)),
        (gradient, np.concatenate([d_gate, d_up], -1), np.concatenate([size, np.abs(d_up)], -1)),
    ):
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert np.abs(exact).max() > 1
        np.testing.assert_array_less(error, 8 * 2.0**-24 * most + rounding * np.abs(exact) + 1e-30)
