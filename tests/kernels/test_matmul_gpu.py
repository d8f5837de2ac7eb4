"""The Mosaic GPU product on a Hopper GPU, against sums in fp64 of the dequantized weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_oracle import (
    Lora,
    activations,
    adapters,
    assert_gradients_agree,
    assert_near,
    assert_repeats,
    check,
    exact,
    kernel,
    needs_gpu,
    weight_of,
    with_parameters,
)  # fmt: skip
from qerl_kernels.formats import Mxfp4
from qerl_kernels.nvfp4_matmul import packing, reference
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx

pytestmark = needs_gpu
EDGES = [*range(1, 18), 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129, 130, 257, 600, 2050]


@pytest.mark.parametrize("n, k", [(512, 1024), (576, 3584)])
def test_every_number_of_tokens(n, k):
    weight = weight_of(n, k)
    packed = packing.pack(weight)
    for m in EDGES:
        x = activations(m, k, m)
        x64, w = exact(x, weight)
        check(jax.jit(kernel)(x, packed), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("n, k", [(1, 16), (70, 80), (1000, 208), (4608, 3584)])
@pytest.mark.parametrize("m", [5, 40, 200])
def test_any_shape(m, n, k):
    weight = weight_of(n, k, seed=n)
    bias = jnp.asarray(np.random.default_rng(m).normal(size=n), jnp.bfloat16)
    x = activations(m, k)
    x64, w = exact(x, weight)
    expected = x64 @ w.T
    check(kernel(x, packing.pack(weight)), expected, x64, w, k)
    shifted = expected + np.asarray(bias.astype(jnp.float32), np.float64)
    y = np.asarray(kernel(x, packing.pack(weight), bias).astype(jnp.float32))
    np.testing.assert_allclose(y, shifted, rtol=2.0**-8, atol=2.0**-8 * np.abs(expected).max() * 0.05 + 1e-6)


@pytest.mark.parametrize("m", [3, 64, 300])
def test_mxfp4(m):
    rng = np.random.default_rng(0)
    exponents = rng.integers(110, 141, (640, 1024 // 32), dtype=np.uint8)
    weight = Mxfp4(jnp.asarray(rng.integers(0, 256, (640, 512), dtype=np.uint8)), jnp.asarray(exponents))
    x = activations(m, 1024)
    x64, w = np.asarray(x, np.float64), np.asarray(reference.dequantize(weight), np.float64)
    check(kernel(x, packing.pack(weight)), x64 @ w.T, x64, w, 1024)


@pytest.mark.parametrize("m", [17, 64, 700])
@pytest.mark.parametrize(
    "widths, rank", [((512,), 32), ((384, 64, 64), 32), ((256, 256), 16), ((256, 192), 24), ((512,), 80)]
)
def test_adapters(m, widths, rank):
    """Within the kernel where they fit, around it where they do not (a part without adapter, a rank above 64)."""
    weight, k = weight_of(512, 1024), 1024
    loras = adapters(k, widths, rank)
    x, bias = activations(m, k), jnp.full(512, 3.0, jnp.bfloat16)
    x64, w = exact(x, weight)
    expected = x64 @ w.T + 3.0
    for lora in loras:
        shrunk = jnp.matmul(x, lora.a, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        delta = np.asarray(shrunk, np.float64) @ np.asarray(lora.b, np.float64) * lora.scale
        expected[:, lora.offset : lora.offset + delta.shape[1]] += delta
    y = np.asarray(kernel(x, packing.pack(weight), bias, loras), np.float64)
    assert np.linalg.norm(y - expected) <= 2.6e-3 * np.linalg.norm(expected)
    assert np.abs(y - expected).max() <= 2.0**-6 * np.abs(expected).max()


@pytest.mark.parametrize("m", [1, 64, 128, 129])
@pytest.mark.parametrize(
    "k, widths, ranks",
    [
        (3584, (512,), (32,)),
        (3584, (384, 64, 64), (64, 8, 24)),
        (3584, (240, 272), (16, 16)),
        (1040, (384, 64, 64), (64, 8, 24)),  # k is no multiple of 32: XLA makes `x A`
    ],
)
def test_adapters_and_their_gradients(m, k, widths, ranks):
    """y and the gradients in x, A and B against fp64, called once and as two halves by `vmap`."""
    weight, target = weight_of(512, k), activations(m, 512, 7)
    packed, x = packing.pack(weight), activations(m, k)
    drawn = [adapters(k, [width], rank, seed=rank)[0] for width, rank in zip(widths, ranks, strict=True)]
    loras = [Lora(lora.a, 16 * lora.b, 2.0, sum(widths[:i])) for i, lora in enumerate(drawn)]  # as large as x Wᵀ
    pairs = [(lora.a, lora.b) for lora in loras]

    @jax.jit
    def of(x, pairs, target):
        y, back = jax.vjp(lambda x, pairs: kernel(x, packed, None, with_parameters(loras, pairs, 2.0)), x, pairs)
        return y, back(target)

    y, (dx, d_pairs) = of(x, pairs, target)
    x64, w = exact(x, weight)
    wide = lambda array: np.asarray(array, np.float64)  # noqa: E731
    dy, expected_pairs = wide(target), []
    expected_y, expected_dx = x64 @ w.T, dy @ w
    for lora in loras:
        a, b, part = wide(lora.a), wide(lora.b), slice(lora.offset, lora.offset + lora.b.shape[1])
        expected_y[:, part] += 2 * (x64 @ a) @ b
        through_b = 2 * dy[:, part] @ b.T
        expected_dx += through_b @ a.T
        expected_pairs += [x64.T @ through_b, 2 * (x64 @ a).T @ dy[:, part]]
    all_expected = [expected_y, expected_dx, *expected_pairs]
    for ours, expected in zip(jax.tree.leaves((y, dx, d_pairs)), all_expected, strict=True):
        assert_near(ours, expected)
    if m % 2 == 0:
        halves = jax.vmap(of, (0, None, 0))
        y, (dx, d_pairs) = halves(x.reshape(2, m // 2, k), pairs, target.reshape(2, m // 2, 512))
        assert_near(y.reshape(m, 512), expected_y)
        assert_near(dx.reshape(m, k), expected_dx)
        for ours, expected in zip(jax.tree.leaves(d_pairs), expected_pairs, strict=True):
            assert_near(wide(ours).sum(0), expected)


@pytest.mark.parametrize("m", [8, 300])
@pytest.mark.parametrize("uniform", [True, False])
def test_gradients_agree_with_xla(m, uniform):
    weight = weight_of(512, 1024, uniform=uniform)
    packed, bias = packing.pack(weight), jnp.ones(512, jnp.bfloat16)
    assert packed.uniform == uniform
    assert_gradients_agree(packed, m, bias, adapters(1024, (384, 128), 32))


@pytest.mark.parametrize("m", [8, 64, 300])
def test_a_thousand_runs_give_the_same_bits(m):
    weight = packing.pack(weight_of(4608, 3584))
    assert_repeats(lambda x: kernel(x, weight), activations(m, 3584))


def test_transformations():
    """scan, while_loop, remat and vmap (folded into the tokens) give what plain calls give."""
    packed = packing.pack(weight_of(1024, 1024))
    x = activations(24, 1024).reshape(3, 8, 1024)
    plain = jnp.stack([kernel(part, packed) for part in x])
    np.testing.assert_array_equal(jax.lax.scan(lambda c, part: (c, kernel(part, packed)), 0, x)[1], plain)
    np.testing.assert_array_equal(jax.checkpoint(lambda part: kernel(part, packed))(x[0]), plain[0])
    folded = jax.vmap(lambda part: kernel(part, packed))(x)
    slack = 1e-3 * float(jnp.abs(plain).max())
    np.testing.assert_allclose(np.asarray(folded, np.float32), np.asarray(plain, np.float32), rtol=2.0**-7, atol=slack)
    end = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, kernel(x[1], packed)), (0, plain[0]))
    np.testing.assert_array_equal(end[1], plain[1])


@pytest.mark.parametrize("adapted", [False, True])
def test_batch_invariant_rows_do_not_depend_on_the_others(adapted):
    packed = packing.pack(weight_of(1024, 3584))
    x = activations(700, 3584)
    loras = adapters(3584, (512, 512), 32) if adapted else []
    call = functools.partial(kernel, loras=loras, batch_invariant=True)
    whole = np.asarray(call(x, packed)).view(np.uint16)
    for first, m in ((0, 1), (0, 8), (5, 33), (64, 64), (100, 200), (3, 697)):
        part = np.asarray(call(x[first : first + m], packed)).view(np.uint16)
        np.testing.assert_array_equal(part, whole[first : first + m])


@pytest.mark.parametrize(
    "warpgroups_n, warpgroups_k, cluster, k_tiles",
    [(1, 1, 1, 1), (2, 2, 2, 1), (1, 3, 4, 1), (1, 2, 3, 2), (2, 1, 2, 4)],
)
def test_pipelines_of_every_depth_end(warpgroups_n, warpgroups_k, cluster, k_tiles):
    """A wrong barrier would hang or tear: pipelines of one to six stages over contractions shorter than the pipeline,
    as long, and many times as long."""
    for k in (64, 192, 256, 1088, 8256):
        weight = weight_of(320, k, seed=k)
        packed = packing.pack(weight)
        x = activations(20, k)
        x64, w = exact(x, weight)
        for stages in (1, 2, 3, 6):
            config = GemmConfig(16, warpgroups_n, warpgroups_k, cluster, k_tiles, stages)
            check(gemm(x, packed, config), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("k_tiles", [1, 2])
def test_wide_tiles_of_two_stages_give_the_same_bits_again(k_tiles):
    """Tensor cores that are behind the dequantization, and stages that are filled as soon as they are free: a stage
    that is freed while `wgmma` reads it is torn."""
    weight, config = weight_of(1024, 4096), GemmConfig(128, 2, 1, 1, k_tiles, 2)
    assert config.fits()
    packed, x = packing.pack(weight), activations(128, 4096)
    call = jax.jit(functools.partial(gemm, config=config))
    y = call(x, packed)
    x64, w = exact(x, weight)
    check(y, x64 @ w.T, x64, w, 4096)
    differing = [jnp.any(call(x, packed) != y) for _ in range(200)]
    assert not jnp.stack(differing).any()


@pytest.mark.parametrize("transposed", [False, True])
def test_lookahead(transposed):
    """Pipelines of two to five stages, one or more k-tiles in each, over contractions of even and odd length and tiles
    that are shared; where sums are cut in the same places the bits are those of the plain loop."""
    call = gemm_dx if transposed else gemm

    for n, k in ((1024, 1088), (1088, 1024), (640, 64 * 37)):
        weight = weight_of(n, k)
        packed = packing.pack(weight)
        x = activations(300, n if transposed else k)
        x64, w = exact(x, weight)
        matrix = w if transposed else w.T
        for warpgroups_n, warpgroups_k, cluster, k_tiles, stages in (
            (1, 1, 1, 1, 2), (2, 1, 1, 2, 2), (2, 2, 2, 1, 3), (3, 1, 2, 2, 3), (1, 2, 4, 1, 5), (2, 1, 3, 1, 4),
            (2, 1, 1, 1, 4),
        ):  # fmt: skip
            plain = GemmConfig(64, warpgroups_n, warpgroups_k, cluster, k_tiles, stages)
            y = call(x, packed, dataclasses.replace(plain, lookahead=True))
            check(y, x64 @ matrix, x64, matrix.T, len(matrix))
            if cluster == 1:
                same = call(x, packed, plain)
                np.testing.assert_array_equal(np.asarray(y).view(np.uint16), np.asarray(same).view(np.uint16))
