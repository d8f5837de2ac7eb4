"""What a key-value cache keeps of what is written to it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qerl_kernels.rope_cache.reference import write_token

from qerl_jax.models import cache as kv


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_e4m3_rounds_to_nearest_and_saturates(dtype):
    """Against ml_dtypes within its range, ties (17, 19) included; ±448 beyond, where a cast makes NaN from 464.5 on."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=4000) * np.exp2(rng.integers(-12, 8, 4000)), [17, 19, 0.0009, 448, 447, -448]])
    x = x[np.abs(x) <= 448].astype(dtype)
    got = np.asarray(kv.to_cache(jnp.asarray(x), jnp.float8_e4m3fn))
    np.testing.assert_array_equal(got.view(np.uint8), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    large = jnp.asarray([449, 500, 1e4, jnp.inf, -449, -1e30, -jnp.inf, jnp.nan], dtype)
    assert kv.to_cache(large, jnp.float8_e4m3fn).tolist()[:7] == [448] * 4 + [-448] * 3
    assert jnp.isnan(kv.to_cache(large, jnp.float8_e4m3fn)[7])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_other_caches_keep_what_the_model_computes(dtype):
    x = jnp.asarray([1e30, -3.0, 1 / 3], dtype)
    assert (kv.to_cache(x, dtype) == x).all() and kv.to_cache(x, dtype).dtype == dtype


def test_tokens_and_prompts_are_written_as_the_cache_holds_them():
    """Both writers saturate, and touch only the slots that they should."""
    empty = kv.init_cache(2, 4, 1, 1, 2, jnp.float8_e4m3fn)
    new = jnp.asarray([[[1000.0, 1.0]], [[-1000.0, 17.0]]])  # [B, K, H]
    token = write_token(empty.keys[0], jnp.asarray([2, 4]), new)
    expected = np.zeros((2, 1, 4, 2))
    expected[0, 0, 2] = 448, 1
    np.testing.assert_array_equal(np.asarray(token, np.float64), expected)
    prompt = kv.write_prompts(empty, jnp.asarray([1, 1]), jnp.asarray([0, 1]), [(new, new)])  # a prompt of two tokens
    expected = np.zeros((2, 1, 4, 2))
    expected[1, 0, :2] = [[448, 1], [-448, 16]]
    np.testing.assert_array_equal(np.asarray(prompt.values[0], np.float64), expected)
