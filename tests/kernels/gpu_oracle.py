"""What the tests on a Hopper GPU share: weights, activations and adapters, and how far a product may be off."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qerl_kernels import dispatch
from qerl_kernels.formats import Nvfp4
from qerl_kernels.nvfp4_matmul import packing
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul

MISSING = dispatch.missing_for_mosaic_gpu(jnp.bfloat16)
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"needs {MISSING}")]

kernel = functools.partial(nvfp4_matmul, implementation="mosaic_gpu")


class Lora:
    def __init__(self, a, b, scale, offset):
        self.a, self.b, self.scale, self.offset = a, b, scale, offset


def weight_of(n, k, seed=0, uniform=True):
    """Random codes (±0 and ±6 among them), scales from subnormal to 448, some zero blocks."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.integers(1, 127, (n, k // 16), dtype=np.uint8)
    scales[rng.random(scales.shape) < 0.05] = 0
    world = np.full(n, 0.7, np.float32) if uniform else rng.uniform(0.25, 2, n).astype(np.float32)
    return Nvfp4(jnp.asarray(codes), jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(world), True)


def exact(x, weight):
    """x · Wᵀ in fp64, W as the packed form holds it."""
    matrix, row = packing.packed_parts(packing.pack(weight))
    w = np.asarray(matrix.astype(jnp.float32), np.float64) * np.asarray(row, np.float64)[:, None]
    return np.asarray(x.astype(jnp.float32), np.float64), w


def check(y, expected, x, w, k):
    """2.5e-3 in norm, and for each element bf16's rounding plus that of a sum of k products in fp32."""
    y = np.asarray(y.astype(jnp.float32), np.float64)
    # One rounding to bf16 is at most 2^-8 and 1.7e-3 in the mean over many elements.
    assert np.linalg.norm(y - expected) <= (2.5e-3 if y.size >= 2000 else 2.0**-8) * np.linalg.norm(expected)
    slack = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None]
    bound = 2.0**-8 * np.abs(expected) + 8 * np.sqrt(k) * 2.0**-24 * slack
    assert np.all(np.abs(y - expected) <= bound)


def activations(m, k, seed=1):
    return jax.random.normal(jax.random.key(seed), (m, k), jnp.bfloat16)


def adapters(k, widths, rank, seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    out, offset = [], 0
    for width in widths:
        a = jnp.asarray(rng.normal(size=(k, rank)) / k**0.5, jnp.bfloat16)
        b = jnp.asarray(rng.normal(size=(rank, width)) * 50, jnp.bfloat16)
        out.append(Lora(a, b, scale, offset))
        offset += width
    return out


def assert_near(got, expected):
    """Within what two or three roundings to bf16 on the way may do, in norm."""
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) <= 4e-3 * np.linalg.norm(expected)


def with_parameters(loras, pairs, scale):
    """The adapters with other A and B, and a scale."""
    return [Lora(a, b, scale, lora.offset) for lora, (a, b) in zip(loras, pairs, strict=True)]


def assert_gradients_agree(packed, m, bias, loras):
    """In x, bias, A and B, with XLA's."""
    n, k = packed.shape
    target = activations(m, n, 7)

    def loss(x, bias, pairs, implementation):
        loras_ = with_parameters(loras, pairs, 2.0)
        y = nvfp4_matmul(x, packed, bias, loras_, implementation=implementation)
        return jnp.vdot(y.astype(jnp.float32), target.astype(jnp.float32))

    arguments = activations(m, k), bias, [(lora.a, lora.b) for lora in loras]
    grads = [jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(*arguments, name) for name in ("mosaic_gpu", "xla")]
    for ours, theirs in zip(*map(jax.tree.leaves, grads), strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 4e-3 * np.linalg.norm(theirs)


def bits(y):
    return np.asarray(y).view(np.uint16)


def poison(shapes):
    """Fill freed memory with NaN, so that an output nobody wrote shows."""
    jax.block_until_ready([jnp.full(shape, jnp.nan, jnp.bfloat16) for shape in shapes])


def assert_repeats(call, x):
    """A thousand runs of `call(x)` in one program give the bits of the first."""

    @jax.jit
    def differing(x):
        word = lambda y: jax.lax.bitcast_convert_type(y, jnp.uint16)  # noqa: E731
        first = word(call(x))

        def once(i, count):
            # the slice moves, so that no run is taken out of the loop; the rows are the same
            again = call(jax.lax.dynamic_slice_in_dim(jnp.concatenate([x, x]), i % 2 * len(x), len(x)))
            return count + jnp.sum(word(again) != first)

        return jax.lax.fori_loop(0, 1000, once, 0)

    assert int(differing(x)) == 0
