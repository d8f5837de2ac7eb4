"""The skinny GEMM on the numpy machine, against sums in fp64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_machine import NumpyLaunch
from qerl_kernels.gpu import H200, gpu_of
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.skinny import kernel
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

PLAIN = SkinnyConfig(8, m16_tiles=2, warps=4, stages=1)
ADA = gpu_of("RTX 4090", 89, 128)
OWN = dataclasses.replace(PLAIN, computes_lora_x=True)
WIDE = dataclasses.replace(OWN, m16_tiles=4)


def zeros(*shape: int, dtype=jnp.bfloat16) -> np.ndarray:
    return np.zeros(shape, dtype)


def run(config, x, packed, eager=False, **terms) -> np.ndarray:
    """A CTA alone uses no instruction and no more shared memory than a GPU of sm_89 has."""
    gpu = H200 if config.cluster > 1 else ADA
    return np.asarray(kernel.run(NumpyLaunch(eager), x, packed, config, **terms, gpu=gpu), np.float64)


@pytest.mark.parametrize(("n", "m16_tiles"), [(64, 4), (96, 8), (128, 8), (160, 4), (640, 8), (672, 4)])
def test_a_cta_has_no_more_features_than_divide_the_padded_ones(n, m16_tiles):
    """Those are whole tiles of 64: 96 are 128, 160 are 192."""
    config = SkinnyConfig(8, m16_tiles=8).specialize(n)
    assert (
        config.m16_tiles == m16_tiles
        and config.fits(n, 1024)
        and config.clusters(n) * config.tile_n == -(-n // 64) * 64
    )


@pytest.mark.parametrize(
    "config, m, n, k, ranks, parts",
    [
        (SkinnyConfig(8, m16_tiles=1, warps=4, stages=2), 8, 64, 192, (), 0),
        (SkinnyConfig(8, m16_tiles=2, warps=4, stages=2), 5, 96, 64 * 11, (32,), 6),
        (SkinnyConfig(16, m16_tiles=4, warps=4, stages=3, cluster=3), 13, 128, 64 * 17, (32, 16), 0),
        (SkinnyConfig(16, m16_tiles=4, warps=4, stages=3, cluster=3), 13, 128, 64 * 17, (32, 16), 3),
        (SkinnyConfig(8, m16_tiles=8, warps=4, stages=1, cluster=2), 1, 128, 64 * 9, (64, 8, 24), 1),
        (SkinnyConfig(32, m16_tiles=4, warps=8, stages=2, cluster=2), 27, 64, 64 * 3, (40,), 2),
        (SkinnyConfig(24, m16_tiles=2, warps=12, stages=1), 24, 32, 80, (), 0),
        (SkinnyConfig(64, m16_tiles=2, warps=4, stages=2, cluster=2), 57, 64, 64 * 9, (32,), 2),
        (SkinnyConfig(64, m16_tiles=1, warps=8, stages=1), 64, 64, 64 * 9, (32, 16), 0),
        (SkinnyConfig(48, m16_tiles=2, warps=4, stages=1), 41, 128, 64 * 7, (), 0),
        (SkinnyConfig(8, m16_tiles=2, warps=4, stages=2), 21, 128, 64 * 5, (32,), 3),
        (SkinnyConfig(16, m16_tiles=4, warps=4, stages=2, cluster=3), 27, 128, 64 * 9, (32, 16), 0),
        (SkinnyConfig(16, m16_tiles=2, warps=4, stages=2, cluster=2), 48, 96, 64 * 5, (32,), 1),
    ],
)
def test_against_fp64(config, m, n, k, ranks, parts):
    """`parts` of which x A is given as the sum; 0: it is given whole. Copies arrive as late as they may, or at once
    where the number of parts is odd."""
    packed = packing.pack(cases.random_weight(jax.random.key(n + k), n, k))
    packed = dataclasses.replace(packed, multiplier=packed.multiplier * (1 + jnp.arange(packed.multiplier.size) % 5))
    rng = np.random.default_rng(m)
    bf16 = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, bias, scale = bf16(m, k), bf16(n) * 4, 0.75
    bias = bias.astype({1: jnp.bfloat16, 5: jnp.float16}.get(m % 8, jnp.float32))
    matrix, row = (np.asarray(part, np.float64) for part in packing.packed_parts(packed))
    expected = np.asarray(x, np.float64) @ (matrix * row[:, None]).T
    norm = np.linalg.norm(expected) / expected.size**0.5
    expected += np.asarray(bias, np.float64)
    lora_x, b = None, ()
    if ranks:
        widths = [n - 16 * (len(ranks) - 1), *[16] * (len(ranks) - 1)]
        b = tuple(bf16(rank, width) for rank, width in zip(ranks, widths, strict=True))
        t = [bf16(m, rank) for rank in ranks]
        lora_x = t[0] if len(t) == 1 else jnp.concatenate([jnp.pad(p, ((0, 0), (0, 64 - p.shape[1]))) for p in t], 1)
        if parts:
            lora_x = jnp.asarray(rng.integers(-999, 999, (parts, m, sum(ranks))) / 256, jnp.float32)  # exact sums
            t = jnp.split(lora_x.sum(0).astype(jnp.bfloat16), np.cumsum(ranks)[:-1], axis=1)
        delta = [np.asarray(a, np.float64) @ np.asarray(of_b, np.float64) for a, of_b in zip(t, b, strict=True)]
        expected += scale * np.concatenate(delta, axis=1)
    y = run(config, x, packed, parts % 2 == 1, bias=bias, lora_x=lora_x, lora_b=b, scale=scale)
    assert np.abs(y - expected).max() <= 1e-5 * norm + 2.0**-8 * np.abs(expected).max()
    assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + 1e-5 * (norm + 4))


def units_of_warps(units: int, config: SkinnyConfig) -> list[range]:
    """The units of each warp of a cluster: an even share of its CTA's, which has an even share of all."""

    def shares(some: range, count: int) -> list[range]:
        cuts = np.cumsum([0, *(len(some) // count + (i < len(some) % count) for i in range(count))])
        return [some[begin:end] for begin, end in itertools.pairwise(cuts)]

    return [each for cta in shares(range(units), config.cluster) for each in shares(cta, config.warps)]


@pytest.mark.parametrize(
    "config, m, n, k, ranks, widths",
    [
        (SkinnyConfig(8, m16_tiles=8, warps=4, stages=2), 8, 128, 64 * 11, (32,), (128,)),
        (SkinnyConfig(8, m16_tiles=1, warps=4, stages=1), 5, 80, 80, (8, 24, 16), (16, 48, 16)),
        (SkinnyConfig(16, m16_tiles=4, warps=4, cluster=3, stages=3), 13, 192, 64 * 17, (32, 16), (64, 128)),
        (SkinnyConfig(8, m16_tiles=2, warps=4, cluster=2, stages=2), 8, 112, 64 * 9, (64, 8, 40), (32, 32, 48)),
        (SkinnyConfig(32, m16_tiles=2, warps=8, cluster=2, stages=1), 27, 64, 64 * 3, (48,), (64,)),
        (SkinnyConfig(24, m16_tiles=2, warps=12, stages=1), 24, 32, 64 * 13, (16,), (32,)),
        (SkinnyConfig(64, m16_tiles=1, warps=4, cluster=2, stages=2), 61, 64, 64 * 9, (32,), (64,)),
        (SkinnyConfig(16, m16_tiles=2, warps=4, cluster=2, stages=2), 37, 64, 64 * 5, (16, 32), (32, 32)),
        # warps without a k-tile
        (SkinnyConfig(16, m16_tiles=1, warps=12, cluster=8, stages=1), 11, 64, 1040, (8,), (64,)),
    ],
)
def test_x_a_within_the_product(config, m, n, k, ranks, widths):
    """Against each warp's part of t in fp64, rounded once: where a sum lies between two bf16 it may be rounded to
    either, which is less than one in a hundred, and t is large enough beside the product to see any other."""
    config = dataclasses.replace(config, computes_lora_x=True)
    packed = packing.pack(cases.random_weight(jax.random.key(n + k), n, k))
    rng = np.random.default_rng(m)
    bf16 = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, bias, scale = bf16(m, k), bf16(n) * 4, 0.75
    a, b = bf16(k, sum(ranks)) / 8, tuple(bf16(*shape) for shape in zip(ranks, widths, strict=True))
    matrix, row = (np.asarray(part, np.float64) for part in packing.packed_parts(packed))
    plain = np.asarray(x, np.float64) @ (matrix * row[:, None]).T + np.asarray(bias, np.float64)
    wide_b = [np.asarray(part, np.float64) for part in b]
    expected, spare = plain, 0
    for units in units_of_warps(-(-k // 64), config):
        part = slice(64 * units.start, 64 * units.stop)
        exact = np.asarray(x, np.float64)[:, part] @ np.asarray(a, np.float64)[part]
        rounded = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
        t, exact = (np.split(each, np.cumsum(ranks)[:-1], axis=1) for each in (rounded, exact))
        expected = expected + scale * np.concatenate([np.matmul(*two) for two in zip(t, wide_b, strict=True)], axis=1)
        # one sum that is rounded to the other side, for each token and adapter
        other = [np.abs(one).max(1)[:, None] * np.abs(two).max(0) for one, two in zip(exact, wide_b, strict=True)]
        spare = np.maximum(spare, scale * 2.0**-7 * np.concatenate(other, axis=1))
    y = run(config, x, packed, m % 2 == 1, bias=bias, lora_a=a, lora_b=b, scale=scale)
    rounding = 2.0**-8 * np.abs(expected) + 1e-4 * np.abs(expected).max()
    assert np.all(np.abs(y - expected) <= rounding + spare)
    assert (np.abs(y - expected) <= rounding).mean() > 0.9


@pytest.mark.parametrize(
    "config, terms, words",
    [
        (PLAIN, {"x": zeros(8, 128, dtype=jnp.float32)}, r"x is float32\[8, 128\]"),
        (PLAIN, {"x": zeros(8, 64)}, r"x is bfloat16\[8, 64\]"),
        (PLAIN, {"bias": zeros(64)}, r"the bias is bfloat16\[64\]"),
        (PLAIN, {}, "x A is not given"),
        (PLAIN, {"lora_x": zeros(3, 7, 32, dtype=jnp.float32)}, r"x A is float32\[3, 7, 32\]"),
        (PLAIN, {"lora_x": zeros(3, 8, 64, dtype=jnp.float32)}, r"x A is float32\[3, 8, 64\]"),
        (PLAIN, {"lora_x": zeros(3, 8, 32)}, r"x A is bfloat16\[3, 8, 32\]"),
        (PLAIN, {"lora_x": zeros(0, 8, 32, dtype=jnp.float32)}, r"x A is float32\[0, 8, 32\]"),
        (PLAIN, {"lora_x": zeros(7, 64)}, r"x A is bfloat16\[7, 64\]"),
        (PLAIN, {"lora_x": zeros(8, 48)}, r"x A is bfloat16\[8, 48\]"),
        (PLAIN, {"lora_x": zeros(8, 64, dtype=jnp.float32)}, r"x A is float32\[8, 64\]"),
        (PLAIN, {"lora_x": zeros(8, 32), "lora_b": (zeros(16, 64), zeros(16, 64))}, r"x A is bfloat16\[8, 32\]"),
        (PLAIN, {"lora_x": zeros(8, 64), "lora_b": ()}, r"x A is bfloat16\[8, 64\]"),
        (PLAIN, {"lora_x": zeros(8, 64), "lora_a": zeros(128, 32)}, r"A is bfloat16\[128, 32\]"),
        (PLAIN, {"lora_x": zeros(8, 64), "lora_b": (zeros(32, 128, dtype=jnp.float32),)}, r"B are \['float32"),
        (OWN, {"lora_x": zeros(8, 64), "lora_a": zeros(128, 32)}, r"x A is bfloat16\[8, 64\]"),
        (OWN, {"lora_a": zeros(128, 32, dtype=jnp.float32)}, r"A is float32\[128, 32\]"),
        (OWN, {}, "A is not given"),
        (WIDE, {"lora_a": zeros(128, 64), "lora_b": (zeros(32, 96), zeros(32, 32))}, r"\(\(32, 96\), .* do not fit"),
        (WIDE, {"lora_b": ()}, "does not fit an SM"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(config, terms, words):
    """The kernel sees addresses alone. What it may be given passes."""
    packed = packing.pack(cases.random_weight(jax.random.key(0), 128, 128))
    launch = lambda emit, inputs, out, **grid: jnp.zeros(out.shape, out.dtype)  # noqa: E731
    call = lambda **given: kernel.run(  # noqa: E731
        **{"launch": launch, "x": zeros(8, 128), "weight": packed, "config": config, "lora_b": (zeros(32, 128),)}
        | given
    )
    good = (
        [{"lora_a": zeros(128, 32)}]
        if config.computes_lora_x
        else [{"lora_x": zeros(8, columns)} for columns in (32, 64)]
    )
    for given in good if config.computes_lora_x else [*good, {"lora_x": zeros(3, 8, 32, dtype=jnp.float32)}]:
        assert call(**given).shape == (8, 128)
    with pytest.raises(ValueError, match=words):
        call(**({**good[0], **terms} if {"x", "bias"} & set(terms) else terms))
