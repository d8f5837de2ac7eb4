"""The kernel for few tokens, its instructions run for all threads of all blocks on numpy, against sums in fp64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_dequant
from lanes_on_numpy import Block, Cluster, Memory, install, laid_out
from qerl_kernels.nvfp4_matmul import adapters, cases, few_tokens, packing, ring, sums
from test_dequant import machine  # noqa: F401  # a fixture

Split = few_tokens.Split
PLAIN = Split(8, rows=2, warps=4, depth=1)
OWN = dataclasses.replace(PLAIN, shrinks=True)


def zeros(*shape: int, dtype=jnp.bfloat16) -> np.ndarray:
    return np.zeros(shape, dtype)


def run(monkeypatch, split, x, packed, eager=False, **terms) -> np.ndarray:
    """`few_tokens.matmul` on numpy: its wrapper as it is, in place of the launch a loop over the blocks."""

    def call(task, split, inputs, out):
        memory = Memory(*map(np.asarray, inputs), zeros(*out.shape))
        shared, shared_bytes = laid_out(few_tokens.Layout(split, task.rank).arrays())
        threads = 32 * split.warps
        for block in range(split.clusters(task.features)):
            cluster = Cluster()
            for part in reversed(range(split.cluster)):
                lanes = Block(memory, threads, shared_bytes, part, cluster, eager)
                install(monkeypatch, lanes, few_tokens, ring, sums, adapters)
                thread = np.arange(threads)
                place = np.int64(block), np.int64(part), thread, thread // 32
                few_tokens._Program(task, split, place, list(memory.begins), shared).emit()
                cluster.end(part)
            assert not cluster.boxes
        assert memory.written_once(-1)
        return memory.array(-1, out.dtype).astype(np.float32).reshape(out.shape)

    def operands(words, scales):
        found = []
        for at in range(0, 32 * split.warps, 128):
            some = [[np.asarray(w[at : at + 128], np.uint32) for w in part] for part in (words, scales)]
            found.append(test_dequant.dequant.operands(*some))
        return [[np.concatenate(parts) for parts in zip(*step, strict=True)] for step in zip(*found, strict=True)]

    monkeypatch.setattr(few_tokens, "_call", call)
    monkeypatch.setattr(few_tokens, "operands", operands)
    matmul = few_tokens.matmul.__wrapped__
    return np.asarray(matmul(x, packed, split, **terms), np.float64)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "split, m, n, k, ranks, parts",
    [
        (Split(8, rows=1, warps=4, depth=2), 8, 64, 192, (), 0),
        (Split(8, rows=2, warps=4, depth=2), 5, 96, 64 * 11, (32,), 0),
        (Split(8, rows=2, warps=4, depth=2), 5, 96, 64 * 11, (32,), 6),
        (Split(16, rows=4, warps=4, depth=3, cluster=3), 13, 128, 64 * 17, (32, 16), 0),
        (Split(16, rows=4, warps=4, depth=3, cluster=3), 13, 128, 64 * 17, (32, 16), 3),
        (Split(8, rows=8, warps=4, depth=1, cluster=2), 1, 128, 64 * 9, (64, 8, 24), 0),
        (Split(8, rows=8, warps=4, depth=1, cluster=2), 1, 128, 64 * 9, (64, 8, 24), 1),
        (Split(32, rows=4, warps=8, depth=2, cluster=2), 27, 64, 64 * 3, (40,), 2),
        (Split(24, rows=2, warps=12, depth=1), 24, 32, 80, (), 0),
    ],
)
@pytest.mark.usefixtures("machine")
def test_against_fp64(monkeypatch, split, m, n, k, ranks, parts, eager):
    """`parts` of which x A is given as the sum; 0: it is given whole."""
    packed = packing.pack(cases.random_weight(jax.random.key(n + k), n, k))
    packed = dataclasses.replace(packed, multiplier=packed.multiplier * (1 + jnp.arange(packed.multiplier.size) % 5))
    rng = np.random.default_rng(m)
    bf16 = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, bias, scale = bf16(m, k), bf16(n) * 4, 0.75
    bias = bias if m % 2 else bias.astype(jnp.float32)
    matrix, row = (np.asarray(part, np.float64) for part in packing.packed_parts(packed))
    expected = np.asarray(x, np.float64) @ (matrix * row[:, None]).T
    norm = np.linalg.norm(expected) / expected.size**0.5
    expected += np.asarray(bias, np.float64)
    shrunk, expand = None, ()
    if ranks:
        widths = [n - 16 * (len(ranks) - 1), *[16] * (len(ranks) - 1)]
        expand = tuple(bf16(rank, width) for rank, width in zip(ranks, widths, strict=True))
        t = [bf16(m, rank) for rank in ranks]
        shrunk = t[0] if len(t) == 1 else jnp.concatenate([jnp.pad(p, ((0, 0), (0, 64 - p.shape[1]))) for p in t], 1)
        if parts:
            shrunk = jnp.asarray(rng.integers(-999, 999, (parts, m, sum(ranks))) / 256, jnp.float32)  # exact sums
            t = jnp.split(shrunk.sum(0).astype(jnp.bfloat16), np.cumsum(ranks)[:-1], axis=1)
        delta = [np.asarray(a, np.float64) @ np.asarray(b, np.float64) for a, b in zip(t, expand, strict=True)]
        expected += scale * np.concatenate(delta, axis=1)
    y = run(monkeypatch, split, x, packed, eager, bias=bias, shrunk=shrunk, expand=expand, scale=scale)
    assert np.abs(y - expected).max() <= 1e-5 * norm + 2.0**-8 * np.abs(expected).max()
    assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + 1e-5 * (norm + 4))


def units_of_warps(units: int, split: Split) -> list[range]:
    """The units of each warp of a cluster: an even share of its block's, which has an even share of all."""

    def shares(some: range, count: int) -> list[range]:
        cuts = np.cumsum([0, *(len(some) // count + (i < len(some) % count) for i in range(count))])
        return [some[begin:end] for begin, end in itertools.pairwise(cuts)]

    return [each for block in shares(range(units), split.cluster) for each in shares(block, split.warps)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "split, m, n, k, ranks, widths",
    [
        (Split(8, rows=8, warps=4, depth=2), 8, 128, 64 * 11, (32,), (128,)),
        (Split(8, rows=1, warps=4, depth=1), 5, 80, 80, (8, 24, 16), (16, 48, 16)),
        (Split(16, rows=4, warps=4, cluster=3, depth=3), 13, 192, 64 * 17, (32, 16), (64, 128)),
        (Split(8, rows=8, warps=8, cluster=4, depth=2), 1, 128, 64 * 14, (32,), (128,)),
        (Split(8, rows=2, warps=4, cluster=2, depth=2), 8, 112, 64 * 9, (64, 8, 40), (32, 32, 48)),
        (Split(32, rows=2, warps=8, cluster=2, depth=1), 27, 64, 64 * 3, (48,), (64,)),
        (Split(24, rows=2, warps=12, depth=1), 24, 32, 64 * 13, (16,), (32,)),
        (Split(16, rows=1, warps=16, cluster=2, depth=1), 16, 64, 64 * 35, (64,), (64,)),
        (Split(16, rows=1, warps=12, cluster=8, depth=1), 11, 64, 1040, (8,), (64,)),  # warps without a unit
    ],
)
@pytest.mark.usefixtures("machine")
def test_x_a_within_the_product(monkeypatch, split, m, n, k, ranks, widths, eager):
    """Against each warp's part of t in fp64, rounded once: where a sum lies between two bf16 it may be rounded to
    either, which is less than one in a hundred, and t is large enough beside the product to see any other."""
    split = dataclasses.replace(split, shrinks=True)
    packed = packing.pack(cases.random_weight(jax.random.key(n + k), n, k))
    rng = np.random.default_rng(m)
    bf16 = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, bias, scale = bf16(m, k), bf16(n) * 4, 0.75
    a, expand = bf16(k, sum(ranks)) / 8, tuple(bf16(*shape) for shape in zip(ranks, widths, strict=True))
    matrix, row = (np.asarray(part, np.float64) for part in packing.packed_parts(packed))
    plain = np.asarray(x, np.float64) @ (matrix * row[:, None]).T + np.asarray(bias, np.float64)
    b = [np.asarray(part, np.float64) for part in expand]
    expected, spare = plain, 0
    for units in units_of_warps(-(-k // 64), split):
        part = slice(64 * units.start, 64 * units.stop)
        exact = np.asarray(x, np.float64)[:, part] @ np.asarray(a, np.float64)[part]
        rounded = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
        t, exact = (np.split(each, np.cumsum(ranks)[:-1], axis=1) for each in (rounded, exact))
        expected = expected + scale * np.concatenate([np.matmul(*two) for two in zip(t, b, strict=True)], axis=1)
        # one sum that is rounded to the other side, for each token and adapter
        other = [np.abs(one).max(1)[:, None] * np.abs(two).max(0) for one, two in zip(exact, b, strict=True)]
        spare = np.maximum(spare, scale * 2.0**-7 * np.concatenate(other, axis=1))
    y = run(monkeypatch, split, x, packed, eager, bias=bias, a=a, expand=expand, scale=scale)
    rounding = 2.0**-8 * np.abs(expected) + 1e-4 * np.abs(expected).max()
    assert np.all(np.abs(y - expected) <= rounding + spare)
    assert (np.abs(y - expected) <= rounding).mean() > 0.9


@pytest.mark.parametrize(
    "split, terms, words",
    [
        (PLAIN, {"x": zeros(8, 128, dtype=jnp.float32)}, r"x is float32\[8, 128\]"),
        (PLAIN, {"x": zeros(9, 128)}, r"x is bfloat16\[9, 128\]"),
        (PLAIN, {"bias": zeros(64)}, r"the bias is bfloat16\[64\]"),
        (PLAIN, {}, "x A is not given"),
        (PLAIN, {"shrunk": zeros(3, 7, 32, dtype=jnp.float32)}, r"x A is float32\[3, 7, 32\]"),
        (PLAIN, {"shrunk": zeros(3, 8, 64, dtype=jnp.float32)}, r"x A is float32\[3, 8, 64\]"),
        (PLAIN, {"shrunk": zeros(3, 8, 32)}, r"x A is bfloat16\[3, 8, 32\]"),
        (PLAIN, {"shrunk": zeros(0, 8, 32, dtype=jnp.float32)}, r"x A is float32\[0, 8, 32\]"),
        (PLAIN, {"shrunk": zeros(7, 64)}, r"x A is bfloat16\[7, 64\]"),
        (PLAIN, {"shrunk": zeros(8, 48)}, r"x A is bfloat16\[8, 48\]"),
        (PLAIN, {"shrunk": zeros(8, 64, dtype=jnp.float32)}, r"x A is float32\[8, 64\]"),
        (PLAIN, {"shrunk": zeros(8, 32), "expand": (zeros(16, 64), zeros(16, 64))}, r"x A is bfloat16\[8, 32\]"),
        (PLAIN, {"shrunk": zeros(8, 64), "expand": ()}, r"x A is bfloat16\[8, 64\]"),
        (PLAIN, {"shrunk": zeros(8, 64), "a": zeros(128, 32)}, r"A is bfloat16\[128, 32\]"),
        (PLAIN, {"shrunk": zeros(8, 64), "expand": (zeros(32, 128, dtype=jnp.float32),)}, r"B are \['float32"),
        (OWN, {"shrunk": zeros(8, 64), "a": zeros(128, 32)}, r"x A is bfloat16\[8, 64\]"),
        (OWN, {"a": zeros(128, 32, dtype=jnp.float32)}, r"A is float32\[128, 32\]"),
        (OWN, {}, "A is not given"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(monkeypatch, split, terms, words):
    """The kernel sees addresses alone. What it may be given passes."""
    monkeypatch.setattr(few_tokens, "_call", lambda task, split, inputs, out: jnp.zeros(out.shape, out.dtype))
    packed = packing.pack(cases.random_weight(jax.random.key(0), 128, 128))
    call = lambda **given: few_tokens.matmul.__wrapped__(  # noqa: E731
        **{"x": zeros(8, 128), "weight": packed, "split": split, "expand": (zeros(32, 128),)} | given
    )
    good = [{"a": zeros(128, 32)}] if split.shrinks else [{"shrunk": zeros(8, columns)} for columns in (32, 64)]
    for given in good if split.shrinks else [*good, {"shrunk": zeros(3, 8, 32, dtype=jnp.float32)}]:
        assert call(**given).shape == (8, 128)
    with pytest.raises(ValueError, match=words):
        call(**({**good[0], **terms} if {"x", "bias"} & set(terms) else terms))


def test_what_shrinks_is_refused_where_it_cannot():
    packed = packing.pack(cases.random_weight(jax.random.key(0), 128, 128))
    split, x = Split(8, rows=4, warps=4, depth=1, shrinks=True), jnp.zeros((8, 128), jnp.bfloat16)
    b = lambda rank, *widths: tuple(jnp.zeros((rank, width), jnp.bfloat16) for width in widths)  # noqa: E731
    a = lambda columns: jnp.zeros((128, columns), jnp.bfloat16)  # noqa: E731
    with pytest.raises(ValueError, match=r"adapters of shapes \(\(32, 96\), \(32, 32\)\) do not fit"):
        few_tokens.matmul(x, packed, split, a=a(64), expand=b(32, 96, 32))
    with pytest.raises(ValueError, match="does not fit a multiprocessor"):
        few_tokens.matmul(x, packed, split)
    with pytest.raises(ValueError, match=r"A is bfloat16\[128, 16\]"):
        few_tokens.matmul(x, packed, split, a=a(16), expand=b(32, 128))
