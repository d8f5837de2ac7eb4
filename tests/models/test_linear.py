"""The matmul seam: values against float64, gradients against autodiff of the plain formula."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import numpy_formats as oracle
from qerl_kernels.batch_invariant import ROWS
from qerl_kernels.nvfp4_matmul.packing import pack

from qerl_jax.models.formats import Dense, Weight, mxfp4, nf4, nvfp4
from qerl_jax.models.linear import linear
from qerl_jax.models.lora import Lora, concat_lora_a, fuse_lora_a

N, K, R = 24, 64, 3
FORMATS = ("bf16", "nvfp4", "nvfp4-multiplies", "mxfp4", "nf4", "nvfp4-packed", "mxfp4-packed")
PARTS = ((0, 10), (10, 6), (16, 8))  # offset, features of a fused projection


def make_weight(name: str) -> tuple[Weight, np.ndarray]:
    """A weight [N, K] of a format with a global scale of its own for each row, and its value in float64."""
    if name.endswith("-packed"):
        weight, exact = make_weight(name.removesuffix("-packed"))
        return pack(weight), exact
    values = np.random.default_rng(1).normal(size=(N, K)).astype(np.float32)
    if name == "bf16":
        dense = jnp.asarray(values, jnp.bfloat16)
        return Dense(dense), np.asarray(dense).astype(np.float64)
    if name == "mxfp4":
        weight = mxfp4.quantize(values)
        return jax.tree.map(jnp.asarray, weight), oracle.mxfp4(weight.codes, weight.exponents)
    if name == "nf4":
        weight = nf4.quantize(values)
        return jax.tree.map(jnp.asarray, weight), oracle.nf4(weight.codes, weight.absmax)
    weight = nvfp4.quantize(values)
    rows = np.random.default_rng(2).uniform(0.5, 2, N).astype(np.float32)
    divides = name == "nvfp4"
    weight = dataclasses.replace(
        weight, global_scale=weight.global_scale * rows if divides else rows / weight.global_scale, divides=divides
    )
    exact = oracle.nvfp4(weight.codes, weight.scales, weight.global_scale, divides)
    return jax.tree.map(jnp.asarray, weight), exact


def make_loras(subset: tuple[int, ...] = (0, 1, 2)) -> list[Lora]:
    rng = np.random.default_rng(3)
    loras = []
    for part, (offset, size) in enumerate(PARTS):
        a, b = rng.normal(size=(K, R), scale=0.3), rng.normal(size=(R, size), scale=0.3)
        if part in subset:
            loras.append(Lora(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), 0.5 + part, offset))
    return loras


def expected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, loras: list[Lora]) -> np.ndarray:
    x = x.astype(np.float64)
    y = x @ weight.T
    if bias is not None:
        y = y + bias.astype(np.float64)
    for lora in loras:
        a, b = np.asarray(lora.a, np.float64), np.asarray(lora.b, np.float64)
        y[..., lora.offset : lora.offset + b.shape[1]] += lora.scale * (x @ a @ b)
    return y


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(4).normal(size=(2, 5, K)).astype(np.float32)


@pytest.fixture(scope="module")
def bias():
    return np.random.default_rng(5).normal(size=N).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_fp32_against_float64(name, x, bias):
    weight, exact = make_weight(name)
    for b, loras in ((None, []), (bias, []), (bias, make_loras())):
        y = linear(jnp.asarray(x), weight, None if b is None else jnp.asarray(b), loras)
        assert y.dtype == jnp.float32 and y.shape == (2, 5, N)
        want = expected(x, exact, b, loras)
        # K products and their sum, each rounded to 2^-24 of the sum of magnitudes: sqrt(K) in the mean, K at worst
        bound = 2.0**-24 * K * (np.abs(x).astype(np.float64) @ np.abs(exact).T + 10)
        assert (np.abs(y - want) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_bf16_rounds_only_the_result(name, x, bias):
    """No weight is rounded to bf16 (NF4 alone excepted), so the error is the result's own 2^-8 and fp32 noise; a
    rounded weight adds 2^-8 of every product."""
    weight, exact = make_weight(name)
    if name == "nf4":
        exact = exact.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    y = linear(jnp.asarray(x), weight, jnp.asarray(bias))
    assert y.dtype == jnp.bfloat16
    want = expected(x, exact, bias, [])
    error = np.abs(np.asarray(y, np.float64) - want)
    assert (error <= 2.0**-8 * np.abs(want) * 1.01 + 1e-4).all()
    if name.startswith("nvfp4"):
        rounded = expected(x, exact.astype(jnp.bfloat16).astype(np.float64), bias, [])
        assert (np.abs(rounded - want) > 2.0**-8 * np.abs(want) * 1.01 + 1e-4).any(), "the bound would not notice"


def test_bf16_lora_rounds_once_in_between(x):
    weight, exact = make_weight("nvfp4")
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    loras = [dataclasses.replace(lo, a=lo.a.astype(jnp.bfloat16), b=lo.b.astype(jnp.bfloat16)) for lo in make_loras()]
    want = expected(x, exact, None, [])
    for lora in loras:
        shrunk = (x.astype(np.float64) @ np.asarray(lora.a, np.float64)).astype(np.float32).astype(jnp.bfloat16)
        b = np.asarray(lora.b, np.float64)
        want[..., lora.offset : lora.offset + b.shape[1]] += lora.scale * (shrunk.astype(np.float64) @ b)
    y = np.asarray(linear(jnp.asarray(x), weight, None, loras), np.float64)
    near = np.abs(y - want) <= 2.0**-8 * np.abs(want) * 1.01 + 1e-4
    assert near.mean() > 0.99  # an x A that lies at a rounding border may fall to the other side


@pytest.mark.parametrize("subset", [s for n in range(4) for s in itertools.combinations(range(3), n)], ids=str)
def test_any_subset_of_fused_adapters_in_any_order(subset, x):
    weight, exact = make_weight("nvfp4")
    loras = make_loras(subset)
    want = expected(x, exact, None, loras)
    for order in itertools.permutations(loras):
        np.testing.assert_allclose(linear(jnp.asarray(x), weight, None, list(order)), want, atol=1e-4)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_fused_a_has_its_columns_in_the_order_of_the_outputs(order):
    """In which kernels read them, whatever the order of the dictionary: that of the names, inside jit."""
    loras, names = make_loras(range(3)), "qkv"
    fused = fuse_lora_a({"qkv_proj": {names[i]: loras[i] for i in order}})["qkv_proj"]
    wanted = np.concatenate([lora.a for lora in loras], axis=1)
    by_offset = sorted(fused.values(), key=lambda lora: lora.offset)
    np.testing.assert_array_equal(concat_lora_a(by_offset), wanted)
    for i, lora in enumerate(loras):
        np.testing.assert_array_equal(fused[names[i]].own_a, lora.a)
        assert (fused[names[i]].offset, fused[names[i]].scale) == (lora.offset, lora.scale)
    assert [lora.column for lora in by_offset] == np.cumsum([0, *(lora.a.shape[1] for lora in loras)])[:-1].tolist()


@jax.default_matmul_precision("highest")  # a GPU's default for fp32 is tf32, and this is what `linear` is held against
def _plain(x, exact, bias, loras):
    y = x @ exact.T + bias
    for lora in loras:
        y = y.at[..., lora.offset : lora.offset + lora.b.shape[1]].add(lora.scale * (x @ lora.a @ lora.b))
    return y


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_equal_those_of_the_plain_formula(name, x, bias):
    weight, exact = make_weight(name)
    exact = jnp.asarray(exact, jnp.float32)
    probe = jnp.asarray(np.random.default_rng(6).normal(size=(2, 5, N)), jnp.float32)

    def ours(x, bias, loras):
        return jnp.sum(jnp.tanh(linear(x, weight, bias, loras)) * probe)

    def plain(x, bias, loras):
        return jnp.sum(jnp.tanh(_plain(x, exact, bias, loras)) * probe)

    arguments = (jnp.asarray(x), jnp.asarray(bias), make_loras())
    got, want = (jax.jit(jax.grad(function, (0, 1, 2)))(*arguments) for function in (ours, plain))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_gets_no_gradient(name, x):
    weight, _ = make_weight(name)
    gradient = jax.grad(lambda w: linear(jnp.asarray(x), w).sum(), allow_int=True)(weight)
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jax.dtypes.float0 or (np.asarray(leaf).astype(np.float32) == 0).all()


@pytest.mark.parametrize("name", ["nvfp4", "nf4"])
def test_bf16_gradient_of_x(name, x):
    weight, exact = make_weight(name)
    if name == "nf4":
        exact = exact.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    dy = np.asarray(jnp.asarray(np.random.default_rng(8).normal(size=(2, 5, N)), jnp.bfloat16))
    _, pull = jax.vjp(lambda x: linear(x, weight), jnp.asarray(x, jnp.bfloat16))
    (dx,) = pull(jnp.asarray(dy))
    assert dx.dtype == jnp.bfloat16
    want = dy.astype(np.float64) @ exact
    # dy is rounded to bf16 once more after the row factor (2^-8 of each of N terms, at random), then the result is
    spread = 2.0**-8 * np.sqrt((dy.astype(np.float64) ** 2) @ (exact**2))
    assert (np.abs(np.asarray(dx, np.float64) - want) <= 4 * spread + 2.0**-8 * np.abs(want)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_fp32_are_not_left_to_a_devices_default(name, x):
    weight, _ = make_weight(name)
    gradients = jax.grad(lambda x, loras: linear(x, weight, None, loras).sum(), (0, 1))
    text = jax.jit(gradients).lower(jnp.asarray(x), make_loras()).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) > 6 and all("precision = [HIGHEST, HIGHEST]" in line for line in products), products


@pytest.mark.parametrize("name", FORMATS)
def test_batch_invariant_products_have_blocks_of_rows(name):
    """Whatever the number of rows: libraries choose a kernel, and with it the order of its sums, by that number."""
    weight = make_weight(name)[0]

    def rows_of_products(rows: int, batch_invariant: bool) -> list[int]:
        call = functools.partial(linear, lora=make_loras(), batch_invariant=batch_invariant)
        program = jax.jit(call).lower(jnp.zeros((rows, K)), weight).as_text()
        return [int(count) for count in re.findall(r"dot_general.*-> tensor<(\d+)x", program)]

    assert set(rows_of_products(130, batch_invariant=False)) == {130}
    for rows in (1, 130):
        products = rows_of_products(rows, batch_invariant=True)
        assert len(products) >= 5 and set(products) == {ROWS}  # the weight, A and three B


def test_input_features_must_agree():
    weight, _ = make_weight("nvfp4")
    with pytest.raises(ValueError, match=rf"x has 60 input features, the weight {K} \(shape {N} x {K}\)"):
        linear(jnp.zeros((2, 60)), weight)
