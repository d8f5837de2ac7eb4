"""`nvfp4_matmul` on the CPU: the XLA path against the reference, its gradients, and what dispatch says."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.gpu import H200
from qerl_kernels.nvfp4_matmul import api, packing, reference, tuning
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import Problem, Route
from test_packing import mxfp4, random_weight
from test_route import calls, here, matmul  # noqa: F401


def draw_adapters(k, parts, dtype="float32"):
    """One adapter for each (rank, first output feature, output features, scale)."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return [
        types.SimpleNamespace(a=normal(k, rank), b=normal(rank, width), scale=scale, offset=offset)
        for rank, offset, width, scale in parts
    ]


@pytest.mark.parametrize("weight", [random_weight(96, 80, 0, True), mxfp4(12)], ids=["nvfp4", "mxfp4"])
def test_agrees_with_the_reference(weight):
    n, k = weight.shape
    x = jax.random.normal(jax.random.key(0), (2, 5, k), jnp.bfloat16)
    y = nvfp4_matmul(x, packing.pack(weight), implementation="xla")
    expected = np.asarray(x.reshape(-1, k), np.float64) @ np.asarray(reference.dequantize(weight), np.float64).T
    assert y.shape == (2, 5, n) and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(y, np.float64).reshape(-1, n), expected, rtol=2.0**-8, atol=1e-5 * abs(expected).max()
    )


def test_batch_invariant_rows_do_not_depend_on_the_others():
    loras, x = draw_adapters(512, [(8, 0, 96, 0.5)]), jax.random.normal(jax.random.key(0), (64, 512))
    more = {"loras": loras, "batch_invariant": True, "implementation": "xla"}
    product = jax.jit(functools.partial(nvfp4_matmul, weight=packing.pack(random_weight(96, 512, 0)), **more))
    np.testing.assert_array_equal(product(x)[:3], product(x[:3]))


def test_many_rows_are_multiplied_in_blocks():
    """Each row has its terms; how many rows there are at a time."""
    x, own = jnp.arange(48.0).reshape(12, 4), jnp.arange(36.0).reshape(12, 3)
    terms = lambda x, own: x[:, 1:] * own  # noqa: E731
    by_rows = lambda x, own: api._by_rows(terms, five, x, own)  # noqa: E731
    five = api.WIDE_BYTES // (4 * 5)  # features of which five rows are taken at once
    np.testing.assert_array_equal(by_rows(x, own), terms(x, own))
    assert "length=3\n" in str(jax.make_jaxpr(by_rows)(x, own))
    assert [api.rows_at_once(m, five) for m in (5, 6, 7, 12, 25, 26)] == [5, 3, 7, 4, 5, 26]
    weight, loras = packing.pack(random_weight(96, 16, 1)), draw_adapters(16, [(8, 0, 64, 0.5), (8, 64, 32, 0.5)])
    product = functools.partial(nvfp4_matmul, weight=weight, loras=loras, implementation="xla")
    assert "length=2\n" in str(jax.make_jaxpr(product)(jax.ShapeDtypeStruct((1 << 20, 16), jnp.float32)))
    # of gate and up of 7B, 14B, 32B; qkv of 7B
    cases = (8192, 37888), (8192, 27648), (8192, 55296), (4608, 37888), (8192, 4608)
    assert [api.rows_at_once(m, n) for m, n in cases] == [1024, 2048, 1024, 1536, 8192]


def test_the_adapters_product_by_blocks_does_not_depend_on_the_other_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (130, 208), jnp.bfloat16)
    a = [jax.random.normal(key, (208, 8), jnp.bfloat16) for key in keys[1:]]
    adapters = tuple((8, 104, 104 * i, 1.0) for i in range(2))
    problem = Problem(130, 208, 208, adapters, False, "mosaic_gpu", True, H200)
    route = Route(problem, "gemm", tuning.BATCH_INVARIANT, LoraForm.WHOLE, True)
    whole, by_kernel = api._compute_lora_x(route, x, a, None)
    assert by_kernel is None
    for exact, part in zip(a, whole, strict=True):
        expected = np.asarray(x, np.float64) @ np.asarray(exact, np.float64)
        np.testing.assert_allclose(np.asarray(part, np.float64), expected, rtol=2.0**-8, atol=1e-4)
    for first, m in ((0, 1), (5, 33), (100, 30), (0, 64), (3, 127)):
        some, _ = api._compute_lora_x(route, x[first : first + m], a, None)
        for part, all_rows in zip(some, whole, strict=True):
            np.testing.assert_array_equal(part, all_rows[first : first + m])


def test_x_a_of_another_shape_or_dtype_is_refused():
    weight, x = packing.pack(random_weight(96, 80, 1)), jnp.zeros((6, 80))
    loras, lora_x = draw_adapters(80, [(8, 0, 64, 0.5), (8, 64, 32, 0.5)]), jnp.zeros((6, 128))
    high = draw_adapters(80, [(72, 0, 64, 0.5)])
    for wrong, parts, words in (
        (lora_x, loras[:1], r"\[6, 128\], 6 rows with adapters of ranks \[8\] need float32\[6, 64\]"),
        (lora_x[:1], loras, r"\[1, 128\], 6 rows with .* need float32\[6, 128\]"),  # XLA would spread it over the rows
        (lora_x.astype(jnp.bfloat16), loras, r"bfloat16\[6, 128\], .* need float32\[6, 128\]"),
        (jnp.zeros((2, 5, 16)), loras, r"\[2, 5, 16\], .* need float32\[2, 6, 16\]"),
        (jnp.zeros((0, 6, 16)), loras, r"\[0, 6, 16\], .* need float32\[1, 6, 16\]"),
        (jnp.zeros((2, 6, 16), jnp.bfloat16), loras, r"bfloat16\[2, 6, 16\], .* need float32\[2, 6, 16\]"),
        (lora_x, [*high, loras[1]], r"ranks \[72, 8\] need float32\[6, 128\] and ranks up to 64"),
    ):
        with pytest.raises(ValueError, match=words):
            nvfp4_matmul(x, weight, None, parts, implementation="xla", lora_x=wrong)


def exact_gradients(dy, x, weight, loras):
    """[(value, the same sum over absolute values)] of dx, dbias, and dA, dB of each adapter, in float64:
    dx = dy W + Σ s (dy Bᵀ) Aᵀ, dA = s xᵀ (dy Bᵀ), dB = s (x A)ᵀ dy, dbias = Σ dy, dy at the adapter's features.
    """

    def once(size):
        d, rows, matrix = size(dy), size(x), size(reference.dequantize(weight))
        dx, pairs = d @ matrix, []
        for lora in loras:
            own = d[:, lora.offset : lora.offset + lora.b.shape[1]] * lora.scale
            dx = dx + own @ size(lora.b).T @ size(lora.a).T
            pairs += [rows.T @ (own @ size(lora.b).T), (rows @ size(lora.a)).T @ own]
        return [dx, d.sum(0), *pairs]

    as_float64 = lambda array: np.asarray(array, np.float64)  # noqa: E731
    return list(zip(once(as_float64), once(lambda array: np.abs(as_float64(array))), strict=True))


ADJACENT = ((8, 0, 64, 0.5), (16, 64, 64, 0.5))
ALIKE = ((8, 0, 32, 0.5), (8, 32, 32, 0.5), (8, 64, 32, 2.0), (8, 112, 16, 0.5))  # the first two are one product
GAP = ((8, 0, 32, 0.5), (8, 64, 32, 0.5))
APART = ((8, 0, 48, 0.5), (16, 64, 32, 2.0))  # the kernel adds none of them


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("implementation", "dtype", "rows", "parts"),
    [
        ("xla", "float32", "unequal", APART),
        ("xla", "bfloat16", "unequal", ADJACENT),
        ("mosaic_gpu", "bfloat16", "unequal", ADJACENT),
        ("mosaic_gpu", "bfloat16", "uniform", APART),
        ("xla", "float32", "unequal", ALIKE),
        ("xla", "float32", "uniform", GAP),
        ("mosaic_gpu", "bfloat16", "uniform", ((8, 0, 64, 0.5), (8, 64, 64, 0.5))),
    ],
)
def test_each_gradient(implementation, dtype, rows, parts):
    """Against float64. A result is rounded to the dtype at most three times on its way (dy over the row multipliers,
    one product, the sum), once for each addend of an fp32 sum of at most N + K + R, each time relative to the sum of
    absolute values; 2 % are left for the products of errors.
    """
    n, k, m = 128, 80, 5
    weight = random_weight(n, k, 2, True)
    if rows == "uniform":
        weight = dataclasses.replace(weight, global_scale=jnp.full(n, 0.7))
    packed, loras, rng = packing.pack(weight), draw_adapters(k, parts, dtype), np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(size=(m, width)), dtype) for width in (k, n))

    def product(x, bias, pairs):
        adapters = [
            types.SimpleNamespace(a=a, b=b, scale=lora.scale, offset=lora.offset)
            for lora, (a, b) in zip(loras, pairs, strict=True)
        ]
        return matmul(x, packed, bias, adapters, implementation=implementation)

    _, pullback = jax.vjp(product, x, jnp.ones(n), [(lora.a, lora.b) for lora in loras])
    found = jax.tree.leaves(pullback(dy))
    wanted = exact_gradients(dy, x, weight, loras)
    names = ["dx", "dbias", *(f"d{name} of adapter {i}" for i in range(len(loras)) for name in "AB")]
    rounding = {"float32": 2.0**-24, "bfloat16": 2.0**-9}[dtype]
    for name, gradient, (value, size) in zip(names, found, wanted, strict=True):
        bound = 1.02 * size * (3 * rounding + (n + k + 16) * 2.0**-24)
        assert gradient.shape == value.shape
        assert np.median(np.abs(value) / bound) > 5, f"a {name} of zero would pass"
        np.testing.assert_array_less(np.abs(np.asarray(gradient, np.float64) - value), bound, err_msg=name)


def test_the_gradient_in_x_of_adapters_whose_a_lie_side_by_side():
    """As a rollout has them (`models.lora.fuse_lora_a`): each reads its own columns."""
    weight, loras = random_weight(128, 80, 2, True), draw_adapters(80, ((8, 0, 64, 0.5), (16, 64, 64, 0.5)))
    whole = jnp.concatenate([lora.a for lora in loras], axis=1)
    fused = [
        types.SimpleNamespace(**vars(lora) | {"a": whole, "column": at}) for lora, at in zip(loras, (0, 8), strict=True)
    ]
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(size=(5, width)), jnp.float32) for width in (80, 128))
    _, pullback = jax.vjp(lambda x: matmul(x, packing.pack(weight), None, fused, implementation="xla"), x)
    (dx,), (wanted, size) = pullback(dy), exact_gradients(dy, x, weight, loras)[0]
    np.testing.assert_array_less(np.abs(dx - wanted), 1e-4 * size)


def test_an_implementation_that_cannot_run_here_is_refused():
    packed, x = packing.pack(random_weight(64, 64, 0)), jnp.zeros((2, 64), jnp.float32)
    with pytest.raises(ValueError, match="'mosaic_gpu' needs"):
        nvfp4_matmul(x, packed, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="no implementation 'triton'"):
        nvfp4_matmul(x, packed, implementation="triton")
    with pytest.raises(ValueError, match="x has 63 input features"):
        nvfp4_matmul(x[:, :63], packed)
