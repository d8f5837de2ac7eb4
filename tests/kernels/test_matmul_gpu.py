"""The Mosaic GPU product on a Hopper GPU, against sums in fp64 of the dequantized weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qerl_kernels import dispatch
from qerl_kernels.formats import Mxfp4, Nvfp4
from qerl_kernels.nvfp4_matmul import cases, packing, reference
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        dispatch.missing_for_mosaic_gpu(jnp.bfloat16) is not None,
        reason=f"needs {dispatch.missing_for_mosaic_gpu(jnp.bfloat16)}",
    ),
]


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


kernel = functools.partial(nvfp4_matmul, implementation="mosaic_gpu")
EDGES = [*range(1, 18), 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129, 130, 257, 600, 2050]


@pytest.mark.parametrize("n, k", [(512, 1024), (576, 3584)])
def test_every_number_of_tokens(n, k):
    weight = weight_of(n, k)
    packed = packing.pack(weight)
    for m in EDGES:
        x = activations(m, k, m)
        x64, w = exact(x, weight)
        check(jax.jit(kernel)(x, packed), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("n, k", [(1, 16), (8, 48), (64, 64), (70, 80), (200, 1040), (1000, 208), (4608, 3584)])
@pytest.mark.parametrize("m", [1, 5, 16, 40, 200])
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


def adapters(k, widths, rank, seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    out, offset = [], 0
    for width in widths:
        a = jnp.asarray(rng.normal(size=(k, rank)) / k**0.5, jnp.bfloat16)
        b = jnp.asarray(rng.normal(size=(rank, width)) * 50, jnp.bfloat16)
        out.append(Lora(a, b, scale, offset))
        offset += width
    return out


@pytest.mark.parametrize("m", [1, 8, 17, 33, 64, 130, 700])
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


@pytest.mark.parametrize("m", [1, 8, 64, 128, 129])
@pytest.mark.parametrize("k", [3584, 1040])  # the last no multiple of 32: XLA makes `x A`
@pytest.mark.parametrize("widths, ranks", [((512,), (32,)), ((384, 64, 64), (64, 8, 24)), ((240, 272), (16, 16))])
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


def assert_near(got, expected):
    """Within what two or three roundings to bf16 on the way may do, in norm."""
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) <= 4e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("m", [8, 300])
@pytest.mark.parametrize("uniform", [True, False])
def test_gradients_agree_with_xla(m, uniform):
    weight = weight_of(512, 1024, uniform=uniform)
    packed, bias = packing.pack(weight), jnp.ones(512, jnp.bfloat16)
    assert packed.uniform == uniform
    assert_gradients_agree(packed, m, bias, adapters(1024, (384, 128), 32))


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


@pytest.mark.parametrize("m", [8, 64, 300])
def test_a_thousand_runs_give_the_same_bits(m):
    weight = packing.pack(weight_of(4608, 3584))
    x = activations(m, 3584)

    @jax.jit
    def differing(x):
        first = kernel(x, weight)

        def once(i, count):
            # the slice moves, so that no run is taken out of the loop; the rows are the same
            again = kernel(jax.lax.dynamic_slice(jnp.concatenate([x, x]), (i % 2 * m, 0), x.shape), weight)
            return count + jnp.sum(jax.lax.bitcast_convert_type(again, jnp.uint16)
                                   != jax.lax.bitcast_convert_type(first, jnp.uint16))  # fmt: skip

        return jax.lax.fori_loop(0, 1000, once, 0)

    assert int(differing(x)) == 0


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


@pytest.mark.parametrize("warpgroups_n, warpgroups_k, cluster", [(1, 1, 1), (2, 2, 2), (1, 3, 4), (1, 2, 3)])
def test_pipelines_of_every_depth_end(warpgroups_n, warpgroups_k, cluster):
    """A wrong barrier would hang or tear: pipelines of one to six stages over many lengths of the contraction."""
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
    from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm

    for k in (64, 192, 256, 1088, 2048):
        weight = weight_of(320, k, seed=k)
        packed = packing.pack(weight)
        x = activations(20, k)
        x64, w = exact(x, weight)
        for stages in (1, 2, 3, 6):
            config = GemmConfig(
                16, warpgroups_n, warpgroups_k, cluster, k_tiles=1, stages=stages, mma_sync=warpgroups_k == 2
            )
            check(gemm(x, packed, config), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("k_tiles", [1, 2])
def test_wide_tiles_of_two_stages_give_the_same_bits_again(k_tiles):
    """Tensor cores that are behind the dequantization, and stages that are filled as soon as they are free: a stage
    that is freed while `wgmma` reads it is torn."""
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
    from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm

    weight, config = weight_of(1024, 4096), GemmConfig(128, 2, 1, 1, k_tiles, 2)
    assert config.fits()
    packed, x = packing.pack(weight), activations(128, 4096)
    call = jax.jit(functools.partial(gemm, config=config))
    y = call(x, packed)
    x64, w = exact(x, weight)
    check(y, x64 @ w.T, x64, w, 4096)
    differing = [jnp.any(call(x, packed) != y) for _ in range(200)]
    assert not jnp.stack(differing).any()


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_lookahead(lookahead, transposed):
    """Pipelines of two to five stages, one or more k-tiles in each, over contractions of even and odd length and tiles
    that are shared; where sums are cut in the same places the bits are those of the plain loop."""
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
    from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
    from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx

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
            y = call(x, packed, dataclasses.replace(plain, lookahead=lookahead))
            check(y, x64 @ matrix, x64, matrix.T, len(matrix))
            if cluster == 1:
                same = call(x, packed, plain)
                np.testing.assert_array_equal(np.asarray(y).view(np.uint16), np.asarray(same).view(np.uint16))


def poison_shared():
    """NaN in most of every SM's shared memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out_g, kept_s, row_s):
        def fill(i, carry):
            kept_s[i] = jnp.full(256, jnp.nan, jnp.float32)
            return carry

        jax.lax.fori_loop(0, 200, fill, None)
        row_s[...] = jnp.full(256, jnp.nan, jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row_s, out_g.at[jax.lax.axis_index("block")])
        plgpu.wait_smem_to_gmem(0)

    scratch = {"kept_s": plgpu.SMEM((200, 256), jnp.float32), "row_s": plgpu.SMEM((256,), jnp.float32)}
    out = jax.ShapeDtypeStruct((264, 256), jnp.float32)
    return plgpu.kernel(body, out_type=out, grid=(264,), grid_names=("block",), scratch_types=scratch)()


PARTIALS_M = (1, 8, 17, 32, 40, 63, 64)
# Fields of GemmConfig: those of down of 7B, 14B and 32B at 32 and 64 rows; then every kind of barrier that there is,
# with CTAs that own no tile and such that own several.
PARTIALS_CONFIGS = [
    (32, 1, 4, 2, 2, 3), (64, 1, 2, 2, 2, 4), (32, 1, 3, 4, 2, 4), (32, 3, 1, 4, 4, 2), (64, 1, 2, 4, 2, 3),
    (64, 1, 1, 1, 1, 2), (64, 2, 1, 1, 1, 4, 1, False, 2), (32, 1, 2, 1, 1, 3, 2), (8, 2, 2, 3, 2, 3, 1, True),
    (64, 4, 1, 2, 1, 3),
]  # fmt: skip


@pytest.mark.parametrize("fields", PARTIALS_CONFIGS)
@pytest.mark.parametrize("n, k, rank, count", [(512, 1024, 32, 7), (704, 64 * 37, 8, 3), (28672, 1024, 64, 1)])
def test_lora_partials(fields, n, k, rank, count):
    """The kernel reduces split-K partials of `x A`: against fp64, and the bits of the same kernel that is given the
    whole, over shared memory that holds NaN; many runs give the same bits."""
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
    from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm

    config = GemmConfig(*fields)
    assert config.can_fuse_lora(n, [(rank, n)]) and config.fits(has_lora=True)
    packed = cases.random_packed(jax.random.key(n), n, k)
    for m in PARTIALS_M if fields == PARTIALS_CONFIGS[1] and n < 704 else (config.tile_m * 5 // 8 + 1, config.tile_m):
        x, terms, given, t = partials_of(m, n, k, rank, count)
        jax.block_until_ready(poison_shared())
        y = gemm(x, packed, config, lora_x=given, **terms)
        np.testing.assert_array_equal(bits(y), bits(gemm(x, packed, config, lora_x=t, **terms)))
        if n <= 704:
            x64, w = np.asarray(x, np.float64), matrix_of(packed)
            delta = terms["scale"] * np.asarray(t, np.float64) @ np.asarray(terms["lora_b"][0], np.float64)
            expected = x64 @ w.T + np.asarray(terms["bias"], np.float64) + delta
            got = np.asarray(y, np.float64)
            assert np.linalg.norm(got - expected) <= 2.6e-3 * np.linalg.norm(expected)
            assert np.abs(got - expected).max() <= 2.0**-6 * np.abs(expected).max()

    @jax.jit
    def differing(x, packed, given, first):
        def once(i, count):
            moved = jax.lax.dynamic_slice(jnp.concatenate([x, x]), (i % 2 * len(x), 0), x.shape)
            again = gemm(moved, packed, config, lora_x=given, **terms)
            return count + jnp.sum(jax.lax.bitcast_convert_type(again, jnp.uint16) != first)

        return jax.lax.fori_loop(0, 1000, once, 0)

    if n == 704:
        assert int(differing(x, packed, given, bits(y))) == 0


def partials_of(m, n, k, rank, count):
    """x, other terms of a GEMM, partials of `x A` whose sum is the same in every order, and the whole of it."""
    rng = np.random.default_rng(m)
    given = rng.integers(-64, 64, (count, m, rank)) / 64 * np.arange(1, count + 1)[:, None, None]
    b = jnp.asarray(rng.normal(size=(rank, n)) / 16, jnp.bfloat16)
    terms = {"bias": jnp.asarray(rng.normal(size=n), jnp.bfloat16), "lora_b": (b,), "scale": 0.75}
    return activations(m, k, m), terms, jnp.asarray(given, jnp.float32), jnp.asarray(given.sum(0), jnp.bfloat16)


def bits(y):
    return np.asarray(y).view(np.uint16)


def matrix_of(packed):
    """The weight in fp64."""
    matrix, row = packing.packed_parts(packed)
    return np.asarray(matrix.astype(jnp.float32), np.float64) * np.asarray(row, np.float64)[:, None]


def test_x_a_in_parts_comes_from_what_precedes_a_product():
    """SiLU and down of 7B as decode calls them, in parts and whole, beside XLA's; a row of NaN spoils no other."""
    from qerl_kernels.decode_prologue.api import silu_mul_prologue
    from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
    from qerl_kernels.nvfp4_matmul.route import route

    n, k = cases.SHAPES["down_7b"]
    packed = cases.random_packed(jax.random.key(0), n, k)
    [lora] = adapters(k, (n,), 32)

    @functools.partial(jax.jit, static_argnums=4)
    def layer(gate_up, packed, a, b, in_parts):
        form = LoraForm.PARTIALS if in_parts else LoraForm.WHOLE
        h, t = silu_mul_prologue(gate_up, a, (32,), lora_form=form, implementation="mosaic_gpu")
        assert (t.ndim == 3) == in_parts
        return h, t, kernel(h, packed, None, [Lora(a, b, 2.0, 0)], lora_x=t)

    for m in (32, 40, 64):
        gate_up, rest = activations(m, 2 * k, m), (packed, lora.a, lora.b)
        assert route(m, packed, [lora], jnp.bfloat16).lora_form is LoraForm.PARTIALS
        (h, t, ours), (_, _, whole) = layer(gate_up, *rest, True), layer(gate_up, *rest, False)
        expected = np.asarray(nvfp4_matmul(h, packed, None, [lora], lora_x=t, implementation="xla"), np.float64)
        for y in (ours, whole):
            assert np.linalg.norm(np.asarray(y, np.float64) - expected) <= 4e-3 * np.linalg.norm(expected)
        spoilt = bits(layer(gate_up.at[3].set(jnp.nan), *rest, True)[2])
        assert np.isnan(spoilt.view(ml_dtypes.bfloat16)[3].astype(np.float32)).all()
        np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(bits(ours), 3, 0))


# tile_m, m16_tiles, warps, cluster, stages
SKINNY = [(8, 1, 4, 1, 2), (8, 4, 8, 2, 3), (16, 8, 4, 3, 2), (16, 2, 12, 1, 1), (32, 4, 4, 7, 2), (24, 4, 4, 8, 3)]


@pytest.mark.parametrize("config", SKINNY)
@pytest.mark.parametrize("n, k", [(512, 64 * 8), (640, 64 * 37), (600, 1040), (4608, 3584)])
def test_skinny(config, n, k):
    """The skinny kernel, with fewer k-tiles than warps and with many rounds of a warp's stages."""
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
    from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

    config = SkinnyConfig(*config).specialize(n)
    weight = weight_of(n, k, seed=n, uniform=False)
    packed = packing.pack(weight)
    for m in (1, config.tile_m - 3, config.tile_m):
        x = activations(m, k, m)
        x64, w = exact(x, weight)
        check(skinny_matmul(x, packed, config), x64 @ w.T, x64, w, k)


@pytest.mark.parametrize("config", SKINNY)
@pytest.mark.parametrize(
    "widths, ranks", [((640,), (32,)), ((640,), (8,)), ((512, 64, 64), (64, 16, 40)), ((400, 240), (24, 32))]
)
def test_skinny_with_adapters(config, widths, ranks):
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
    from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

    config, k = SkinnyConfig(*config), 1024
    weight = weight_of(640, k)
    packed = packing.pack(weight)
    rng = np.random.default_rng(len(ranks))
    for m, dtype in ((config.tile_m, jnp.bfloat16), (config.tile_m - 5, jnp.float32)):
        x, bias = activations(m, k), jnp.asarray(rng.normal(size=640) * 100, dtype)
        t = [jnp.asarray(rng.normal(size=(m, rank)), jnp.bfloat16) for rank in ranks]
        b = [jnp.asarray(rng.normal(size=shape) * 50, jnp.bfloat16) for shape in zip(ranks, widths, strict=True)]
        lora_x = t[0] if len(t) == 1 else jnp.concatenate([jnp.pad(p, ((0, 0), (0, 64 - p.shape[1]))) for p in t], 1)
        x64, w = exact(x, weight)
        delta = [np.asarray(p, np.float64) @ np.asarray(q, np.float64) for p, q in zip(t, b, strict=True)]
        expected = x64 @ w.T + np.asarray(bias, np.float64) + 0.75 * np.concatenate(delta, axis=1)
        call = functools.partial(skinny_matmul, x, packed, config, bias=bias, lora_b=tuple(b), scale=0.75)
        y = call(lora_x=lora_x)
        half = jnp.concatenate(t, axis=1).astype(jnp.float32) / 2
        parts = jnp.stack([half, jnp.zeros_like(half), half])
        np.testing.assert_array_equal(np.asarray(call(lora_x=parts)), np.asarray(y))
        y = np.asarray(y, np.float64)
        assert np.linalg.norm(y - expected) <= 2.6e-3 * np.linalg.norm(expected)
        assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + 1e-4 * np.abs(x64 @ w.T).max())


# the same of configs that compute `x A`
SKINNY_OWN = [(8, 8, 8, 4, 2), (8, 2, 4, 1, 3), (16, 4, 8, 3, 2), (16, 1, 12, 8, 1), (32, 2, 4, 4, 2), (24, 4, 4, 2, 1)]


@pytest.mark.parametrize("config", SKINNY_OWN)
@pytest.mark.parametrize("k", [64 * 37, 1040])
@pytest.mark.parametrize(
    "widths, ranks", [((640,), (32,)), ((640,), (8,)), ((384, 128, 128), (32, 16, 24)), ((256, 384), (48, 64))]
)
def test_skinny_that_computes_x_a(config, k, widths, ranks):
    """Against fp64, each warp's part of `x A` within bf16's rounding; a thousand runs give the same bits."""
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
    from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

    config = SkinnyConfig(*config, computes_lora_x=True)
    if not config.fits(640, k, max(ranks)):  # a rank of 64 takes more of a stage
        config = dataclasses.replace(config, stages=1)
    weight = weight_of(640, k)
    packed = packing.pack(weight)
    rng = np.random.default_rng(k + len(ranks))
    b = [jnp.asarray(rng.normal(size=shape) * 2000, jnp.bfloat16) for shape in zip(ranks, widths, strict=True)]
    a = jnp.asarray(rng.normal(size=(k, sum(ranks))) / k**0.5, jnp.bfloat16)
    for m, dtype in ((config.tile_m, jnp.bfloat16), (config.tile_m - 5, jnp.float32)):
        x, bias = activations(m, k), jnp.asarray(rng.normal(size=640) * 100, dtype)
        x64, w = exact(x, weight)
        t = np.split(x64 @ np.asarray(a, np.float64), np.cumsum(ranks)[:-1], axis=1)
        delta = [p @ np.asarray(q, np.float64) for p, q in zip(t, b, strict=True)]
        expected = x64 @ w.T + np.asarray(bias, np.float64) + 0.75 * np.concatenate(delta, axis=1)
        call = functools.partial(skinny_matmul, weight=packed, bias=bias, lora_b=tuple(b), scale=0.75)
        y = np.asarray(call(x, config=config, lora_a=a), np.float64)
        assert np.linalg.norm(y - expected) <= 2.8e-3 * np.linalg.norm(expected)
        assert np.abs(y - expected).max() <= 2.0**-6 * np.abs(expected).max()
        # a warp's part of t has a variance of 1 / parts, so that its rounding is 2^-9 of some three times that root
        parts = config.warps * config.cluster
        of_t = 3 * 2.0**-9 * parts**0.5 * np.concatenate([np.abs(np.asarray(q, np.float64)).sum(0) for q in b])
        assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + 0.75 * of_t)

    @jax.jit
    def differing(x, first):
        def once(i, count):
            again = call(jax.lax.dynamic_slice(jnp.concatenate([x, x]), (i % 2 * len(x), 0), x.shape), config=config,
                         lora_a=a)  # fmt: skip
            return count + jnp.sum(jax.lax.bitcast_convert_type(again, jnp.uint16) != first)

        return jax.lax.fori_loop(0, 1000, once, 0)

    assert int(differing(x, jax.lax.bitcast_convert_type(call(x, config=config, lora_a=a), jnp.uint16))) == 0


def test_a_gemm_that_computes_x_a_is_called_so(monkeypatch):
    """From the entry point with a table that says so; NaN in one row stays there."""
    from qerl_kernels.nvfp4_matmul import tuning
    from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
    from qerl_kernels.nvfp4_matmul.route import route
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

    n, k = 1024, 3584
    config = SkinnyConfig(8, 8, 8, 4, 2, computes_lora_x=True)
    plain = dataclasses.replace(config, computes_lora_x=False)
    packed, x = packing.pack(weight_of(n, k)), activations(8, k)
    loras = adapters(k, (768, 256), 32)
    found = {}
    for how in (config, plain):
        monkeypatch.setattr(tuning, "table", lambda how=how: (tuning.Row("forward", n, k, 8, how, 5.0),))
        form = LoraForm.A if how.computes_lora_x else LoraForm.PARTIALS
        assert route(8, packed, loras, x.dtype).lora_form is form
        found[how] = np.asarray(kernel(x, packed, None, loras), np.float64)
        spoilt = np.asarray(kernel(x.at[3].set(jnp.nan), packed, None, loras), np.float64)
        assert np.isnan(spoilt[3]).all()
        np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(found[how], 3, 0))
    assert np.linalg.norm(found[config] - found[plain]) <= 2e-3 * np.linalg.norm(found[plain])


@pytest.mark.parametrize("config", SKINNY)
def test_skinny_rows_do_not_touch_each_other(config):
    """A row's bits are the same whatever the others hold, NaN too, and however many there are, a thousand times."""
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
    from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

    config = SkinnyConfig(*config)
    packed = packing.pack(weight_of(1024, 3584))
    x = activations(config.tile_m, 3584)
    bits = lambda y: np.asarray(y).view(np.uint16)  # noqa: E731
    whole = bits(skinny_matmul(x, packed, config))
    np.testing.assert_array_equal(bits(skinny_matmul(x[:5], packed, config)), whole[:5])
    spoilt = skinny_matmul(x.at[3].set(jnp.nan), packed, config)
    assert np.isnan(np.asarray(spoilt[3], np.float32)).all()
    np.testing.assert_array_equal(np.delete(bits(spoilt), 3, 0), np.delete(whole, 3, 0))

    @jax.jit
    def differing(x, first):
        def once(i, count):
            again = skinny_matmul(jax.lax.dynamic_slice(jnp.concatenate([x, x]), (i % 2 * len(x), 0), x.shape),
                                      packed, config)  # fmt: skip
            return count + jnp.sum(jax.lax.bitcast_convert_type(again, jnp.uint16) != first)

        return jax.lax.fori_loop(0, 1000, once, 0)

    assert int(differing(x, whole)) == 0
