"""Split-K partials of `x A` within the GEMM on a Hopper GPU: against fp64, and against `x A` given whole."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_oracle import Lora, activations, adapters, assert_repeats, bits, kernel, needs_gpu
from qerl_kernels.decode_prologue.api import silu_mul_prologue
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import route

pytestmark = needs_gpu


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
# with CTAs with no part of a shared tile and such that own several.
PARTIALS_CONFIGS = [
    (32, 1, 4, 2, 2, 3), (64, 1, 2, 2, 2, 4), (32, 1, 3, 4, 2, 4), (32, 3, 1, 4, 4, 2), (64, 1, 2, 4, 2, 3),
    (64, 1, 1, 1, 1, 2), (64, 2, 1, 1, 1, 4, 1, True), (32, 1, 2, 1, 1, 3, 2), (8, 2, 2, 3, 2, 3), (64, 4, 1, 2, 1, 3),
]  # fmt: skip


@pytest.mark.parametrize("fields", PARTIALS_CONFIGS)
@pytest.mark.parametrize("n, k, rank, count", [(512, 1024, 32, 7), (704, 64 * 37, 8, 3), (28672, 1024, 64, 1)])
def test_lora_partials(fields, n, k, rank, count):
    """The kernel reduces split-K partials of `x A`: against fp64, and the bits of the same kernel that is given the
    whole, over shared memory that holds NaN; many runs give the same bits."""
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

    if n == 704:
        assert_repeats(lambda x: gemm(x, packed, config, lora_x=given, **terms), x)


def partials_of(m, n, k, rank, count):
    """x, other terms of a GEMM, partials of `x A` whose sum is the same in every order, and the whole of it."""
    rng = np.random.default_rng(m)
    given = rng.integers(-64, 64, (count, m, rank)) / 64 * np.arange(1, count + 1)[:, None, None]
    b = jnp.asarray(rng.normal(size=(rank, n)) / 16, jnp.bfloat16)
    terms = {"bias": jnp.asarray(rng.normal(size=n), jnp.bfloat16), "lora_b": (b,), "scale": 0.75}
    return activations(m, k, m), terms, jnp.asarray(given, jnp.float32), jnp.asarray(given.sum(0), jnp.bfloat16)


def matrix_of(packed):
    """The weight in fp64."""
    matrix, row = packing.packed_parts(packed)
    return np.asarray(matrix.astype(jnp.float32), np.float64) * np.asarray(row, np.float64)[:, None]


def test_x_a_in_parts_comes_from_what_precedes_a_product():
    """SiLU and down of 7B as decode calls them, in parts and whole, beside XLA's; a row of NaN spoils no other."""
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
