"""The gradient of `silu_mul` against autodiff of the plain expression, and its program for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.ops import silu_mul, silu_mul_gradient_in_one_pass


def plain(gate_up):
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (gate * jax.nn.sigmoid(gate) * up).astype(gate_up.dtype)


@pytest.mark.parametrize("by", ["this machine's", "a GPU's"])
@pytest.mark.parametrize("shape", [(37, 258), (2, 3, 16), (10,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_that_of_autodiff(dtype, shape, by):
    """To 2 ulp of the larger addend in fp32; in bf16, rounded once, to one rounding that falls the other way."""
    rng = np.random.default_rng(0)
    gate_up = jnp.asarray(rng.normal(size=shape, scale=4), dtype)
    d_h = jnp.asarray(rng.normal(size=(*shape[:-1], shape[-1] // 2)), dtype)
    value, pullback = jax.vjp(silu_mul, gate_up)
    wanted_value, wanted = jax.vjp(plain, gate_up)
    np.testing.assert_array_equal(value, wanted_value)
    [found], [wanted] = pullback(d_h), wanted(d_h)
    if by == "a GPU's":
        found = silu_mul_gradient_in_one_pass(gate_up, d_h)
    assert found.dtype == gate_up.dtype and found.shape == gate_up.shape
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    sigmoid, d_h = 1 / (1 + np.exp(-gate)), np.abs(np.asarray(d_h, np.float64))
    addends = d_h * np.abs(up) * sigmoid * np.maximum(1, np.abs(gate) * (1 - sigmoid)), d_h * np.abs(gate) * sigmoid
    ulp = {"float32": 2.0**-23, "bfloat16": 2.0**-8}[dtype]
    error = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))
    assert np.abs(np.asarray(wanted, np.float64)).max() > 1
    np.testing.assert_array_less(error, 2 * ulp * np.concatenate(addends, -1) + 1e-30)
