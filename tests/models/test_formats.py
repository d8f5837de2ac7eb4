"""Weight formats: values against float64 and the published goldens, quantizers against slow ones and the files of the
original libraries.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_trees_equal, fp32_policy, logits_of
from oracles import mxfp4_goldens
from oracles import numpy_formats as oracle
from qerl_kernels.formats import Mxfp4, Nvfp4
from qerl_kernels.nvfp4_matmul import packing, reference
from safetensors import safe_open

from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.checkpoint.safetensors import open_checkpoint, open_files
from qerl_jax.models.formats import FORMATS, format_name, host, mxfp4, nf4, nvfp4

BF16 = ml_dtypes.bfloat16
dequantize = jax.jit(reference.dequantize)


def random_weight(seed: int, block: int, dtype) -> np.ndarray:
    """Random shape and magnitude; some rows tiny, so that scales get subnormal, and some blocks zero."""
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 9)), block * int(rng.integers(1, 6))
    weight = rng.normal(size=(n, k)) * 10.0 ** rng.uniform(-3, 1)
    weight[rng.integers(0, n)] *= 1e-4
    weight[rng.integers(0, n), :block] = 0
    return weight.astype(dtype)


@pytest.mark.parametrize("scheme", ["compressed-tensors", "modelopt"])
def test_dequantized_weights_equal_the_library_goldens_bit_for_bit(data, scheme):
    folder = data / f"nvfp4/fixture-{scheme}-tiny-qwen2"
    tensors = open_checkpoint(folder)
    codes, top = ("weight", "weight_scale_2") if scheme == "modelopt" else ("weight_packed", "weight_global_scale")
    scale = "weight_scale"
    (golden_file,) = folder.glob("golden_dequant*.safetensors")
    compared = 0
    with safe_open(golden_file, "pt") as golden:
        for name in golden.keys():  # noqa: SIM118 - safe_open is no mapping
            module = name.removesuffix(".weight")
            expected = golden.get_tensor(name)
            if f"{module}.{scale}" not in tensors:
                continue
            packed = tensors[f"{module}.{codes}"]
            row = np.full(len(packed), tensors[f"{module}.{top}"].reshape(()), np.float32)
            weight = Nvfp4(
                jnp.asarray(packed), jnp.asarray(tensors[f"{module}.{scale}"]), jnp.asarray(row), scheme != "modelopt"
            )
            ours = np.asarray(dequantize(weight))
            if scheme == "compressed-tensors":  # its decompress rounds to the checkpoint's dtype
                ours, expected = ours.astype(BF16).astype(np.float32), expected.float()
            else:  # its table knows no -0: code 8 is +0 there, -0 in E2M1 and here
                ours = ours + np.float32(0)
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours.view(np.int32), expected.numpy().view(np.int32), err_msg=name)
            compared += 1
    assert compared == 21


@pytest.mark.parametrize(
    ("scheme", "golden"),
    [("compressed-tensors", "golden_logits_exact_fp32.npz"), ("modelopt", "golden_hf_logits_fp32compute.npz")],
)
def test_logits_of_published_quantizations(data, scheme, golden):
    folder = data / f"nvfp4/fixture-{scheme}-tiny-qwen2"
    with np.load(folder / golden) as file:
        expected = dict(file)
    ours = logits_of(fp32_policy(folder), expected["input_ids"])
    np.testing.assert_allclose(ours, expected["logits"], atol=1e-3, rtol=0)


def test_quantizing_while_loading_equals_the_quantized_checkpoint(tiny_dir, tmp_path):
    """Codes, block scales and the shared global scales of q/k/v and gate/up, whose files equal llm-compressor's."""
    quantize_checkpoint(tiny_dir, tmp_path / "nvfp4")
    assert_trees_equal(fp32_policy(tiny_dir, weight_format="nvfp4").frozen, fp32_policy(tmp_path / "nvfp4").frozen)


def test_the_global_scale_is_rounded_to_the_dtype_of_the_weight():
    """llm-compressor's 12800 for the bundled model's first down_proj; fp16 would overflow."""
    assert nvfp4.global_scale(0.2109375, BF16) == 12800
    assert nvfp4.global_scale(0.2109375, np.float32) == np.float32(12743.111)
    assert nvfp4.global_scale(0.02, np.float16) == pytest.approx(134400, rel=1e-6)
    assert host.common_dtype([np.dtype(BF16), np.dtype(np.float16)]) == np.float32


TIES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate():
    for value, expected in [
        *TIES, (0.2501, 0.5), (0.7499, 0.5), (4.999, 4.0), (5.001, 6.0), (6.0, 6.0), (7.9, 6.0), (1e9, 6.0),
    ]:  # fmt: skip
        for sign in (1, -1):
            code = nvfp4.encode_e2m1(np.array([sign * value], np.float32))[0]
            assert oracle.E2M1[code] == sign * expected, (value, sign)
            assert (code >= 8) == (sign < 0)


def test_a_negative_that_rounds_to_zero_keeps_code_8():
    weight = np.full((1, 16), 6.0, np.float32)
    weight[0, 3], weight[0, 4] = -1e-3, 1e-3
    codes = oracle.nibbles(nvfp4.quantize(weight).codes)[0]
    assert (codes[3], codes[4], codes[5]) == (8, 0, 7)
    value = np.asarray(reference.unpack_codes(jnp.asarray([[0x80]], jnp.uint8)))[0]
    assert np.signbit(value).tolist() == [False, True] and (value == 0).all()


def test_an_all_zero_tensor_and_a_zero_block():
    weight = nvfp4.quantize(np.zeros((2, 32), np.float32))
    assert (weight.global_scale == 1).all() and (weight.codes == 0).all()
    assert (weight.scales.astype(np.float32) == 0.125).all()
    assert (np.asarray(dequantize(weight)) == 0).all()


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seed", range(6))
def test_nvfp4_quantizer_against_the_slow_one(seed, dtype):
    weight = random_weight(seed, 16, dtype)
    ours = nvfp4.quantize(weight)
    codes, scales, divisor = oracle.quantize_nvfp4(weight)
    assert (ours.global_scale == divisor).all()
    np.testing.assert_array_equal(ours.scales.view(np.uint8), scales.view(np.uint8))
    np.testing.assert_array_equal(oracle.nibbles(ours.codes), codes)
    exact = oracle.nvfp4(ours.codes, ours.scales, ours.global_scale, divides=True)
    np.testing.assert_allclose(np.asarray(dequantize(ours)), exact, rtol=3e-7, atol=0)
    step = np.repeat(scales.astype(np.float64), 16, axis=1) / ours.global_scale[0]
    assert (np.abs(weight.astype(np.float64) - exact) <= 1.001 * step).all()  # half the widest gap of E2M1, 4 to 6


def test_nvfp4_slices_of_rows_do_not_show():
    """Of four rows and of one, against each row by itself; the largest weight is in the first of them."""
    weight = np.random.default_rng(3).standard_normal((5, 1 << 20), np.float32).astype(BF16)
    weight[1, 7] = -9
    assert host.row_slices(*weight.shape) == [(0, 4), (4, 5)]
    whole, divisor = nvfp4.quantize(weight), nvfp4.global_scale(float(np.abs(weight).max()), BF16)
    rows = [nvfp4.quantize(row[None], divisor) for row in weight]
    assert_trees_equal(whole, jax.tree.map(lambda *parts: np.concatenate(parts), *rows))


def test_nf4_slices_of_rows_do_not_show():
    """Of two rows and of one, against each row by itself."""
    scales = np.logspace(-2, 2, 5, dtype=np.float32)[:, None]
    weight = np.random.default_rng(3).standard_normal((5, 1 << 21), np.float32) * scales
    assert host.row_slices(*weight.shape) == [(0, 2), (2, 4), (4, 5)]
    rows = [nf4.quantize(row[None]) for row in weight]
    assert_trees_equal(nf4.quantize(weight), jax.tree.map(lambda *parts: np.concatenate(parts), *rows))


@pytest.mark.parametrize("seed", range(6))
def test_mxfp4_against_the_slow_one(seed):
    weight = random_weight(seed, 32, BF16)
    ours = mxfp4.quantize(weight)
    codes, exponents = oracle.quantize_mxfp4(weight)
    np.testing.assert_array_equal(ours.exponents, exponents)
    np.testing.assert_array_equal(oracle.nibbles(ours.codes), codes)
    assert ours.exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).min() >= 2.0**-127
    exact = oracle.mxfp4(ours.codes, ours.exponents)
    np.testing.assert_array_equal(np.asarray(dequantize(ours)), exact.astype(np.float32))


def test_mxfp4_by_hand():
    """amax 7 = 1.75 · 2²: exponent 1, where 3.5 is a tie that goes to 4, and 2.5 one that goes to 2. amax 6.9: exponent
    0, saturated to 6. amax 0.5: exponent -3, so 0.5 is code 6 (4 · 2^-3), and 0.03125 a tie that goes to zero.
    """
    weight = np.zeros((1, 96), np.float32)
    weight[0, :4] = [7.0, -5.0, 0.25, 0.75]
    weight[0, 32:35] = [0.5, -0.1875, 0.03125]
    weight[0, 64] = -6.9
    ours = mxfp4.quantize(weight)
    assert ours.exponents.tolist() == [[128, 124, 127]]
    value = np.asarray(dequantize(ours))[0]
    assert value[:4].tolist() == [8.0, -4.0, 0.0, 1.0]
    assert value[32:35].tolist() == [0.5, -0.1875, 0.0]
    assert value[64] == -6.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_bytes_equal_compressed_tensors(dtype):
    golden, weight = open_files([mxfp4_goldens.GOLDEN]), mxfp4_goldens.weights()[dtype]
    ours = mxfp4.quantize(weight)
    np.testing.assert_array_equal(ours.exponents, golden[f"{dtype}.weight_scale"])
    np.testing.assert_array_equal(ours.codes, golden[f"{dtype}.weight_packed"])


def test_mxfp4_exponents_against_the_rule_of_ocp():
    """OCP §6.3, the largest power of two in the block over the largest in E2M1, 4, is one less exactly where amax is
    1.75 times that power of two or more. Ours has the smaller error of weights.
    """
    weight = np.random.default_rng(8).normal(size=(64, 2048)).astype(np.float32)
    ours = mxfp4.quantize(weight)
    blocks = weight.astype(np.float64).reshape(64, -1, 32)
    amax = np.abs(blocks).max(-1)
    power = 2.0 ** np.floor(np.log2(amax))
    ocp = np.log2(power / 4) + 127
    np.testing.assert_array_equal(ours.exponents - ocp, amax / power >= 1.75)
    assert 0.1 < (ours.exponents != ocp).mean() < 0.3
    step = (power / 4)[..., None]
    by_ocp = np.clip(blocks / step, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * step
    error = np.linalg.norm(oracle.mxfp4(ours.codes, ours.exponents) - weight)
    assert error < 0.99 * np.linalg.norm(by_ocp - blocks)


@pytest.mark.parametrize("seed", range(6))
def test_nf4_against_an_exhaustive_search(seed):
    weight = random_weight(seed, 64, BF16)
    ours = nf4.quantize(weight)
    codes, absmax = oracle.quantize_nf4(weight)
    np.testing.assert_array_equal(ours.absmax, absmax)
    np.testing.assert_array_equal(oracle.nf4_codes(ours.codes), codes)
    np.testing.assert_allclose(nf4.dequantize(ours), oracle.nf4(ours.codes, ours.absmax), rtol=2e-7, atol=0)


@pytest.mark.parametrize(("quantize", "block"), [(nvfp4.quantize, 16), (mxfp4.quantize, 32), (nf4.quantize, 64)])
def test_input_features_that_fill_no_block_are_refused(quantize, block):
    with pytest.raises(ValueError, match=rf"divisible by {block}, got a weight of 3 x {block + 8}"):
        quantize(np.zeros((3, block + 8), np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantize", [nvfp4.quantize, mxfp4.quantize, nf4.quantize])
def test_values_that_are_not_finite_are_refused(quantize, value):
    weight = np.ones((3, 64), np.float32)
    weight[1, 5] = value
    with pytest.raises(ValueError, match=r"^rows 0 to 2 hold a value that is not finite$"):
        quantize(weight)


def test_bf16_parts_are_exact():
    """Over all codes and scales, bf16 code × scale times the row's fp32 factor rounds only in the factor."""
    every_scale = np.arange(0, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    codes = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (len(every_scale), 1))
    weight = Nvfp4(jnp.asarray(codes), jnp.asarray(every_scale[:, None]), jnp.full(len(codes), 3.0), divides=False)
    matrix, row = reference.bf16_parts(weight)
    assert matrix.dtype == jnp.bfloat16
    exact = oracle.E2M1[oracle.nibbles(codes)] * every_scale.astype(np.float64)[:, None]
    np.testing.assert_array_equal(np.asarray(matrix).astype(np.float64), exact)
    np.testing.assert_array_equal(row, 3.0)
    exponents = np.arange(100, 150, dtype=np.uint8)[:, None]
    mx = Mxfp4(jnp.asarray(np.tile(codes[0], (50, 2))), jnp.asarray(exponents))
    matrix, row = reference.bf16_parts(mx)
    assert row is None
    np.testing.assert_array_equal(np.asarray(matrix).astype(np.float64), oracle.mxfp4(mx.codes, mx.exponents))


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_names_its_format_packed_too(name):
    weight = FORMATS[name].zeros(64, 64, jnp.bfloat16)
    assert format_name(weight) == name
    if FORMATS[name].packs:
        assert format_name(packing.pack(weight)) == name
