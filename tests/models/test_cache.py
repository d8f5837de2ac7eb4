"""Where a key-value cache keeps what is written to it."""

import jax.numpy as jnp
import numpy as np
from qerl_kernels.rope_cache.reference import write_token

from qerl_jax.models import cache as kv


def test_tokens_and_prompts_are_written_to_their_slots():
    """And to no other: row 1's token has slot 4 of 4, which is dropped."""
    empty = kv.init_cache(2, 4, 1, 1, 2, jnp.float32)
    new = jnp.asarray([[[1000.0, 1.0]], [[-1000.0, 17.0]]])  # [B, K, H]
    token = write_token(empty.keys[0], jnp.asarray([2, 4]), new)
    expected = np.zeros((2, 1, 4, 2))
    expected[0, 0, 2] = 1000, 1
    np.testing.assert_array_equal(token, expected)
    prompt = kv.write_prompts(empty, jnp.asarray([1, 1]), jnp.asarray([0, 1]), [(new, -new)])  # a prompt of two tokens
    expected = np.zeros((2, 1, 4, 2))
    expected[1, 0, :2] = [[1000, 1], [-1000, 17]]
    np.testing.assert_array_equal(prompt.keys[0], expected)
    np.testing.assert_array_equal(prompt.values[0], -expected)
