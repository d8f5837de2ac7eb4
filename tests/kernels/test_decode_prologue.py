"""The plain path of the decode prologues against NumPy in fp64, and what their entry points refuse."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.decode_prologue import config
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.gpu import H200, gpu_of
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm

EPS = 1e-6
ROUNDING = {jnp.float32: 2.0**-18, jnp.bfloat16: 2.0**-8}


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def slots(t, ranks):
    """t without its padding, which must be zero."""
    parts = np.split(wide(t), len(ranks), axis=1)
    for part, rank in zip(parts, ranks, strict=True):
        assert part.shape[1] == MAX_RANK
        assert not part[:, rank:].any()
    return np.concatenate([part[:, :rank] for part, rank in zip(parts, ranks, strict=True)], axis=1)


def close(got, expected, dtype, scale=1.0):
    np.testing.assert_allclose(got, expected, rtol=ROUNDING[dtype], atol=scale * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ranks", [(8,), (32, 8, 64)])
def test_rms_norm_prologue(dtype, ranks):
    x, delta = draw(5, 48, seed=1) * 3, draw(5, 48, seed=2, dtype=dtype)
    weight, a = draw(48, seed=3), draw(48, sum(ranks), seed=4, dtype=dtype)
    s, y, t = rms_norm_prologue(x, delta, weight, EPS, a, ranks, dtype=dtype)
    assert (s.dtype, y.dtype, t.dtype) == (jnp.float32, dtype, dtype)
    close(wide(s), wide(x) + wide(delta), jnp.float32)
    expected = wide(s) / np.sqrt(np.mean(wide(s) ** 2, axis=1, keepdims=True) + EPS) * wide(weight)
    close(wide(y), expected, dtype)
    close(slots(t, ranks), wide(y) @ wide(a), dtype)
    alone = rms_norm_prologue(s, None, weight, EPS, a, ranks, dtype=dtype)
    for ours, theirs in zip(alone, (s, y, t), strict=True):
        np.testing.assert_array_equal(wide(ours), wide(theirs))
    assert rms_norm_prologue(x, delta, weight, EPS, dtype=dtype)[2] is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_silu_mul_prologue(dtype):
    gate_up, a = draw(5, 96, seed=1, dtype=dtype) * 4, draw(48, 24, seed=2, dtype=dtype)
    h, t = silu_mul_prologue(gate_up, a, (16, 8))
    gate, up = np.split(wide(gate_up), 2, axis=1)
    close(wide(h), gate / (1 + np.exp(-gate)) * up, dtype)
    close(slots(t, (16, 8)), wide(h) @ wide(a), dtype)
    assert silu_mul_prologue(gate_up)[1] is None
    same, parts = silu_mul_prologue(gate_up, a, (16, 8), lora_form=LoraForm.PARTIALS)
    np.testing.assert_array_equal(wide(same), wide(h))
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (5, 24)
    np.testing.assert_allclose(wide(parts).sum(0), wide(h) @ wide(a), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lora_prologue(dtype):
    x, a = draw(5, 48, dtype=dtype), draw(48, 64, seed=1, dtype=dtype)
    close(slots(lora_prologue(x, a, (64,)), (64,)), wide(x) @ wide(a), dtype)
    parts = lora_prologue(x, a, (64,), lora_form=LoraForm.PARTIALS)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (5, 64)
    np.testing.assert_allclose(wide(parts).sum(0), wide(x) @ wide(a), rtol=1e-5, atol=1e-5)


def test_refusals():
    x, a = draw(2, 64), draw(64, 16)
    with pytest.raises(ValueError, match=r"A has 16 columns, the ranks are \[8\]"):
        lora_prologue(x, a, (8,))
    for call in (
        functools.partial(lora_prologue, x, a, (16,)),
        functools.partial(silu_mul_prologue, draw(2, 128), a, (16,)),
        functools.partial(rms_norm_prologue, x, x, draw(64), EPS, a, (16,), dtype=jnp.float32),
    ):
        with pytest.raises(ValueError, match="no implementation 'cuda'"):
            call(implementation="cuda")
        if jax.default_backend() == "cpu":
            with pytest.raises(ValueError, match="'mosaic_gpu' needs"):
                call(implementation="mosaic_gpu")


@pytest.mark.parametrize("gpu", [gpu_of("H100 PCIe", 90, 114), gpu_of("RTX 3090", 86, 82), H200])
def test_split_k_takes_every_k_tile_once(gpu):
    """In the shared memory of the smallest. Without clusters of 16 each CTA is alone and takes its share of the
    features where no sum crosses them; with them no more are launched for up to 32 tokens than are resident at once.
    """
    kinds = [("silu", (32,), True), ("plain", (32,) * 3, True), ("silu", (), False), ("silu", (64,), True)]
    for kind, ranks, partials in kinds[:: 3 if gpu == H200 else 1]:
        for tokens, features in itertools.product((1, 8, 9, 32, 128), (896, 3584, 18944, 29568)):
            spec = config.PrologueSpec(kind, tokens, features, ranks, partials=partials)
            found = config.best_config(spec, gpu)
            assert found.column_splits == 1
            if gpu == H200:
                assert found.cluster == (8 if features <= 3584 else 16)  # of SiLU
                assert tokens > 32 or found.clusters(tokens) <= gpu.resident_clusters(found.cluster)
                assert tokens > 32 or features != 18944 or found.k_splits == 7
            else:
                assert found.cluster == 1 < found.k_splits
                assert sum(config.shared_bytes(spec, found).values()) <= 95 * 1024
            ctas = found.cluster * found.k_splits
            of_cta = -(-features // config.K_TILE // ctas)
            assert found.warps * -(-of_cta // found.warps) * ctas >= features // config.K_TILE


def test_a_partial_more_costs_the_gemm():
    """2048 features by ten CTAs: 0.30 us for partials, 0.28 to read 2048 × 32 of A, 0.13 for the sums of 8 warps; by
    sixteen 0.48, 0.17, and 0.07 for 4 warps.
    """
    spec, gpu = config.PrologueSpec("plain", 1, 2048, (32,), partials=True), gpu_of("RTX 3090", 86, 82)
    found = {each.k_splits: config.predicted_us(spec, each, gpu) for each in config.candidate_configs(spec, gpu)}
    assert (found[10], found[16]) == pytest.approx((1.83 + 0.71, 1.83 + 0.72), abs=0.005)
    assert config.best_config(spec, gpu).k_splits == 10


@pytest.mark.parametrize(
    ("kind", "features", "ranks"),
    [
        ("norm", 3584, ()), ("norm", 3584, (32, 32, 32)), ("norm", 3584, (64, 64, 64)), ("plain", 3584, (8,)),
        ("norm", 896, (32, 32)),
        ("silu", 18944, (32,)), ("silu", 896, (64, 64, 64)),
    ],
)  # fmt: skip
def test_no_configuration_lets_the_tokens_change_the_order_of_a_sum(kind, features, ranks):
    """Cluster size and warps fix the order of the sums; the fields that depend on the number of tokens split the work
    otherwise and stay in bounds. This holds for every configuration, not only the one taken."""
    specs = [config.PrologueSpec(kind, tokens, features, ranks) for tokens in (*range(1, 129), 129, 200, 256)]
    taken = [config.best_config(spec) for spec in specs]
    every = [(spec, each) for spec in specs for each in config.candidate_configs(spec)]
    assert len({(each.cluster, each.warps) for _, each in every}) == 1
    for spec, each in every:
        assert each.column_splits == 1 or spec.columns % (config.MIN_COLUMNS * each.column_splits) == 0
        assert each.k_splits == 1 and each.token_tiles <= -(-spec.tokens // 8)
    if ranks == (32, 32, 32) and kind == "norm":  # fewer tokens, more clusters to read A; many, fewer to read it again
        splits = [(taken[m - 1].column_splits, taken[m - 1].token_tiles) for m in (8, 16, 32, 64)]
        assert splits == [(6, 1), (3, 1), (3, 2), (1, 2)]


@pytest.mark.parametrize(("kind", "rank", "prefetch"), [("silu", 32, [3, 2, 1]), ("plain", 64, [2, 1])])
def test_the_prefetch_is_as_deep_as_the_registers_allow(kind, rank, prefetch):
    """Of 16 warps a thread has 128: 40 of its own and `rank / 4` of sums for each eight tokens; k-tiles in flight take
    `rank / 2`, and of x 4 for each eight tokens, twice that of gate and up.
    """
    every = config.candidate_configs(config.PrologueSpec(kind, 128, 18944, (rank,)))
    found = {each.token_tiles: each.prefetch for each in every if each.column_splits == 1 and each.warps == 16}
    assert [found[tiles] for tiles in sorted(found)[: len(prefetch)]] == prefetch
    for ranks, warps in (((32, 32, 32), 16), ((64, 40), 8)):  # up to 96 columns
        specs = (config.PrologueSpec(kind, 1, 18944, ranks) for kind in ("norm", "silu", "plain"))
        assert {each.warps for spec in specs for each in config.candidate_configs(spec)} == {warps}
