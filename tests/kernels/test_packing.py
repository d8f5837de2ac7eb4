"""The packed form holds every weight exactly: all 16 codes × all 127 scales, shapes that need padding, MXFP4."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qerl_kernels.formats import Mxfp4, Nvfp4
from qerl_kernels.nvfp4_matmul import cases, packing, reference

dequantize = jax.jit(reference.dequantize)


def every_code_and_scale() -> Nvfp4:
    """[127, 512]: row s has scale byte s; every block of 16 holds all 16 codes, shifted by the block's number."""
    code = (np.arange(16)[None, :] + np.arange(32)[:, None]) % 16
    code = np.broadcast_to(code.reshape(1, 512), (127, 512))
    scales = np.repeat(np.arange(127, dtype=np.uint8)[:, None], 32, axis=1).view(ml_dtypes.float8_e4m3fn)
    return Nvfp4(packed_bytes(code), jnp.asarray(scales), jnp.linspace(0.3, 3.7, 127, dtype=jnp.float32), True)


def packed_bytes(code: np.ndarray) -> jax.Array:
    return jnp.asarray((code[:, 0::2] | (code[:, 1::2] << 4)).astype(np.uint8))


def random_weight(n: int, k: int, seed: int, divides: bool = False) -> Nvfp4:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.integers(1, 127, (n, k // 16), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return Nvfp4(jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(rng.uniform(0.5, 2, n), jnp.float32), divides)


def as_bytes(array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def test_every_code_and_scale_round_trips():
    weight = every_code_and_scale()
    back = packing.unpack(packing.pack(weight))
    np.testing.assert_array_equal(as_bytes(back.scales), as_bytes(weight.scales))
    np.testing.assert_array_equal(back.codes[1:], weight.codes[1:])
    np.testing.assert_array_equal(back.codes[0], 0)  # a zero scale is worth zero, and stored so
    np.testing.assert_array_equal(as_bytes(back.global_scale), as_bytes(weight.global_scale))
    assert back.divides


def test_every_code_and_scale_is_worth_the_same():
    weight = every_code_and_scale()
    matrix, multiplier = packing.packed_parts(packing.pack(weight))
    expected, row = reference.bf16_parts(weight)
    np.testing.assert_array_equal(matrix.astype(jnp.float32) * 2.0**packing.PRODUCT_LOG2, expected.astype(jnp.float32))
    np.testing.assert_array_equal(multiplier, row * 2.0**packing.PRODUCT_LOG2)


@pytest.mark.parametrize("n, k, divides", [(1, 16, True), (64, 64, False), (65, 80, True), (130, 208, False)])
def test_any_shape_round_trips(n, k, divides):
    weight = random_weight(n, k, n + k, divides)
    packed = packing.pack(weight)
    back = packing.unpack(packed)
    assert (packed.shape == weight.shape and not packed.uniform) or n == 1
    np.testing.assert_array_equal(back.codes, weight.codes)
    np.testing.assert_array_equal(as_bytes(back.scales), as_bytes(weight.scales))
    np.testing.assert_array_equal(dequantize(back), dequantize(weight))


def with_scale(byte: int) -> Nvfp4:
    """A random weight whose first block has this scale."""
    weight = random_weight(64, 64, 1)
    bits = as_bytes(weight.scales).copy()
    bits[0, 0] = byte
    return Nvfp4(weight.codes, jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn)), weight.global_scale, weight.divides)


def test_a_block_with_the_scale_minus_zero_is_worth_zero():
    weight = with_scale(0x80)
    matrix, multiplier = packing.packed_parts(packing.pack(weight))
    expected = dequantize(weight)
    assert not expected[0, :16].any() and expected[0, 16:].any()
    found = np.asarray(matrix, np.float32) * np.asarray(multiplier)[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81, 0xB8])
def test_scales_that_are_negative_or_no_number_are_refused(byte):
    with pytest.raises(ValueError, match="a block scale is negative or no number"):
        packing.pack(with_scale(byte))


def test_padding_is_zero():
    packed = packing.pack(random_weight(65, 80, 0))
    whole = packing.PackedNvfp4(**{**vars(packed), "shape": (128, 128)})
    matrix, _ = packing.packed_parts(whole)
    matrix = np.asarray(matrix, np.float32)
    assert not matrix[65:].any() and not matrix[:, 80:].any()


def test_packing_under_jit_is_the_same_but_for_uniform():
    weight = random_weight(64, 64, 3)
    weight = Nvfp4(weight.codes, weight.scales, jnp.full(64, 0.7), False)
    eager, traced = packing.pack(weight), jax.jit(packing.pack)(weight)
    assert eager.uniform and not traced.uniform
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(traced), strict=True):
        np.testing.assert_array_equal(a, b)


def mxfp4(span: int, seed: int = 0) -> Mxfp4:
    rng = np.random.default_rng(seed)
    exponents = rng.integers(100, 101 + span, (70, 4), dtype=np.uint8)
    exponents[:, 0], exponents[:, 1] = 100, 100 + span
    codes = rng.integers(0, 256, (70, 64), dtype=np.uint8) | 0x11
    return Mxfp4(jnp.asarray(codes), jnp.asarray(exponents))


@pytest.mark.parametrize("span", [0, 1, 30])
def test_mxfp4_round_trips_and_is_worth_the_same(span):
    weight = mxfp4(span)
    packed = packing.pack(weight)
    back = packing.unpack(packed)
    np.testing.assert_array_equal(back.codes, weight.codes)
    np.testing.assert_array_equal(back.exponents, weight.exponents)
    matrix, multiplier = packing.packed_parts(packed)
    np.testing.assert_array_equal(np.asarray(matrix, np.float32) * np.asarray(multiplier)[:, None], dequantize(weight))
    exact, row = reference.bf16_parts(weight)
    np.testing.assert_array_equal(exact.astype(jnp.float32), dequantize(weight))
    assert row is None


def test_mxfp4_blocks_of_zeros_do_not_count():
    weight = mxfp4(30)
    codes, exponents = np.array(weight.codes), np.array(weight.exponents)
    codes[5, 16:32], exponents[5, 1] = 0x88, 3  # -0 in both nibbles
    weight = Mxfp4(jnp.asarray(codes), jnp.asarray(exponents))
    back = packing.unpack(packing.pack(weight))
    np.testing.assert_array_equal(back.codes, codes)
    np.testing.assert_array_equal(dequantize(back), dequantize(weight))


def test_mxfp4_blocks_of_zeros_have_a_scale_of_zero():
    """Whatever exponent is stored for them: that of kernels wraps, and may be infinite, whose product with 0 is NaN."""
    codes, exponents = np.full((2, 64), 0x22, np.uint8), np.full((2, 4), 120, np.uint8)
    codes[0, :16], exponents[0, 0] = 0x80, 121  # 121 - 120 + 30: the largest of five bits
    packed = packing.pack(Mxfp4(jnp.asarray(codes), jnp.asarray(exponents)))
    matrix, multiplier = packing.packed_parts(packed)
    expected = np.full((2, 128), 2.0**-7)
    expected[0, :32] = 0
    np.testing.assert_array_equal(np.asarray(matrix, np.float32) * np.asarray(multiplier)[:, None], expected)


def test_mxfp4_of_a_wider_span_is_refused():
    with pytest.raises(ValueError, match="they span 31"):
        packing.pack(mxfp4(31))


def test_input_features_must_be_whole_blocks():
    weight = random_weight(64, 64, 0)
    with pytest.raises(ValueError, match="56 input features"):
        packing.pack(Nvfp4(weight.codes[:, :28], weight.scales, weight.global_scale, False))


def test_a_weight_drawn_as_packed_is_one_that_packs_so():
    drawn = cases.random_packed(jax.random.key(0), 128, 192)
    packed = packing.pack(packing.unpack(drawn))
    np.testing.assert_array_equal(drawn.words, packed.words)
    np.testing.assert_array_equal(drawn.scales, packed.scales)
    np.testing.assert_array_equal(drawn.multiplier, packed.multiplier)
    assert jax.tree.structure(drawn) == jax.tree.structure(packed)
