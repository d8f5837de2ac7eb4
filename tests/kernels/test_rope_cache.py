"""The plain path of rotary embedding and cache write against NumPy, and what its entry point refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.rope_cache import api
from qerl_kernels.rope_cache.api import rope_and_cache

ROWS, HEADS, KV_HEADS, SLOTS, WIDTH = 5, 6, 2, 4, 8
WRITTEN = [0, 3, 4, -1, 2]  # rows 2 and 3 are idle


def arguments(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 3, jnp.float32)  # noqa: E731
    caches = [draw(ROWS, KV_HEADS, SLOTS, WIDTH).astype(dtype) for _ in range(2)]
    angles = jnp.asarray(rng.uniform(0, 1000, (ROWS, WIDTH // 2)), jnp.float32)
    qkv = draw(ROWS, (HEADS + 2 * KV_HEADS) * WIDTH).astype(dtype)
    return qkv, angles, jnp.asarray(WRITTEN, jnp.int32), *caches


def rotated(x, angles):
    """x [B, N, H] as complex numbers, multiplied by e^(i · angle) in fp64."""
    x = np.asarray(x, np.float64)
    z = (x[..., : WIDTH // 2] + 1j * x[..., WIDTH // 2 :]) * np.exp(1j * np.asarray(angles, np.float64))[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_equation(dtype):
    """q and k turned, v as it was; written where a slot says so, and nowhere else."""
    qkv, angles, slots, keys, values = arguments(dtype)
    heads = np.asarray(qkv).reshape(ROWS, -1, WIDTH)
    q, new_keys, new_values = jax.jit(rope_and_cache)(qkv, angles, slots, keys, values)
    assert {x.dtype for x in (q, new_keys, new_values)} == {jnp.dtype(dtype)}
    ulp = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-22
    turned = rotated(heads[:, : HEADS + KV_HEADS], angles)
    # A rounding of each of the two products and of their sum, in fp32, and of the result.
    size = np.concatenate([np.hypot(*np.split(turned, 2, axis=-1))] * 2, axis=-1)
    close = lambda got, exact, size: np.all(np.abs(np.asarray(got, np.float64) - exact) <= ulp * size)  # noqa: E731
    assert close(q, turned[:, :HEADS], size[:, :HEADS])
    for before, after, written, bound in (
        (keys, new_keys, turned[:, HEADS:], size[:, HEADS:]),
        (values, new_values, np.asarray(heads[:, HEADS + KV_HEADS :], np.float64), np.zeros((ROWS, KV_HEADS, WIDTH))),
    ):
        before, after = np.array(before), np.array(after)
        for row, slot in enumerate(WRITTEN):
            if 0 <= slot < SLOTS:
                assert close(after[row, :, slot], written[row], bound[row])
                after[row, :, slot] = before[row, :, slot]
        np.testing.assert_array_equal(after, before)


def test_refusals():
    qkv, angles, slots, keys, values = arguments()
    with pytest.raises(ValueError, match=r"angles is \(5, 3\), not \(5, 4\)"):
        rope_and_cache(qkv, angles[:, :3], slots, keys, values)
    with pytest.raises(ValueError, match=r"slots is \(4,\), not \(5,\)"):
        rope_and_cache(qkv, angles, slots[:4], keys, values)
    with pytest.raises(ValueError, match="values is"):
        rope_and_cache(qkv, angles, slots, keys, values[:, :1])
    for wrong in (qkv[:, :-1], qkv[:, : 2 * KV_HEADS * WIDTH], qkv[:4]):
        with pytest.raises(ValueError, match="is not 5 rows of more than 4 heads of 8"):
            rope_and_cache(wrong, angles, slots, keys, values)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        rope_and_cache(qkv, angles, slots, keys, values, implementation="cuda")
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="'mosaic_gpu' needs"):
            rope_and_cache(qkv, angles, slots, keys, values, implementation="mosaic_gpu")


def test_what_the_kernel_does_not_hold_is_named():
    qkv, _, _, keys, values = arguments()
    assert api._missing(qkv, keys, values) == "a head dim of 64 or 128 (this is 8)"
    other = values.astype(jnp.float32)
    assert api._missing(qkv, keys, other) == "caches of bfloat16 (these are bfloat16 and float32)"
    wide = jax.ShapeDtypeStruct((*keys.shape[:3], 64), keys.dtype)
    assert api._missing(qkv, wide, wide) is None
