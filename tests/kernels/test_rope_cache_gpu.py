"""Rotary embedding and cache write by the kernel on a Hopper GPU, bit by bit against XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_oracle import needs_gpu
from qerl_kernels.decode_attention.cases import MODELS
from qerl_kernels.rope_cache.api import rope_and_cache

pytestmark = needs_gpu
SLOTS = 40
CASES = [*((model, rows) for model in MODELS for rows in (3, 200)), *(("7b", rows) for rows in (1, 17, 128))]


@functools.partial(jax.jit, static_argnames=("model", "rows"))
def arguments(key, model, rows):
    """Random arguments; of the slots about one in five is outside the caches."""
    heads, kv_heads, width = MODELS[model]
    keys = jax.random.split(key, 5)
    qkv = 8 * jax.random.normal(keys[0], (rows, (heads + 2 * kv_heads) * width), jnp.bfloat16)
    positions = jax.random.randint(keys[1], (rows, 1), 0, 32768)
    angles = positions * 1e6 ** -(jnp.arange(width // 2, dtype=jnp.float32) / (width // 2))
    slots = jax.random.randint(keys[2], (rows,), -2, SLOTS + 8)
    caches = [jax.random.normal(k, (rows, kv_heads, SLOTS, width), jnp.bfloat16) for k in keys[3:]]
    return qkv, angles, slots, *caches


run = jax.jit(rope_and_cache, static_argnames="implementation")


def bits(x):
    return np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16))


def same_bits(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize(("model", "rows"), CASES)
def test_the_bits_of_xla(model, rows):
    """The whole caches: what should be written is, idle rows write nothing, and neighbours stay as they were. So do the
    arguments, which are not donated.
    """
    given = arguments(jax.random.key(rows), model, rows)
    kept = [bits(cache) for cache in given[3:]]
    same_bits(run(*given, implementation="mosaic_gpu"), run(*given, implementation="xla"))
    for cache, before in zip(given[3:], kept, strict=True):
        np.testing.assert_array_equal(bits(cache), before)


def test_extreme_values():
    """Infinities, zeros of both signs, subnormals and ties to even."""
    qkv, angles, slots, *caches = arguments(jax.random.key(0), "7b", 8)
    extreme = jnp.asarray([jnp.inf, -jnp.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, 17, 19, 0.0009, 1], qkv.dtype)
    qkv = extreme[jax.random.randint(jax.random.key(1), qkv.shape, 0, len(extreme))]
    angles = angles.at[::2].set(0)
    expected = run(qkv, angles, slots, *caches, implementation="xla")
    for ours, theirs in zip(run(qkv, angles, slots, *caches, implementation="mosaic_gpu"), expected, strict=True):
        number = ~np.isnan(np.asarray(theirs, np.float32))
        np.testing.assert_array_equal(number, ~np.isnan(np.asarray(ours, np.float32)))
        np.testing.assert_array_equal(bits(ours)[number], bits(theirs)[number])


def test_donated_caches_are_written_in_place():
    given = arguments(jax.random.key(0), "7b", 8)
    expected = run(*given, implementation="xla")
    donating = jax.jit(lambda *args: rope_and_cache(*args, implementation="mosaic_gpu"), donate_argnums=(3, 4))
    where = [cache.unsafe_buffer_pointer() for cache in given[3:]]
    got = donating(*given)
    same_bits(got, expected)
    assert [cache.unsafe_buffer_pointer() for cache in got[1:]] == where


def test_a_thousand_steps_in_a_loop():
    """Each reads what the one before wrote; in the end all is as XLA has it."""

    @functools.partial(jax.jit, static_argnames="implementation")
    def steps(qkv, angles, slots, keys, values, implementation):
        def one(carry, i):
            qkv, keys, values = carry
            slot = (slots + 7 * i) % (SLOTS + 5)
            q, keys, values = rope_and_cache(qkv, angles * i, slot, keys, values, implementation=implementation)
            old = jnp.roll(keys, i % SLOTS, axis=2)[:, :, 0].astype(q.dtype)
            return (jnp.roll(qkv, 1, axis=0).at[:, : old[0].size].set(old.reshape(len(old), -1)), keys, values), q

        carry, last = jax.lax.scan(one, (qkv, keys, values), jnp.arange(1000))
        return *carry, last[::100]

    given = arguments(jax.random.key(0), "1.5b", 24)
    same_bits(steps(*given, implementation="mosaic_gpu"), steps(*given, implementation="xla"))
