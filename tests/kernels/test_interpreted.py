"""The warp-specialized GEMM and decode attention as whole kernels on a CPU (`interpreted`), against sums in fp64: which
CTA and warpgroup does what, the pipeline and its barriers, masks, accumulators, epilogues, stores. Instructions in
inline PTX run on the numpy machine for all threads of a warpgroup."""

import collections
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import ACCUMULATING, Namespace, interpreting, load, on_numpy, shaped
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy_machine import Memory, NumpyMachine
from qerl_kernels.decode_attention import combine, consumer, stages
from qerl_kernels.decode_attention import kernel as attention
from qerl_kernels.decode_attention.config import AttentionConfig
from qerl_kernels.gpu import H200, gpu_of
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.gemm import (
    epilogue,
    exchange,
    kernel,
    mainloop,
    operand,
    producer,
    reduce_partials,
    transposed,
)
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig as Config
from qerl_kernels.nvfp4_matmul.tcgen05 import kernel as tcgen05
from test_decode_attention import exact, inputs
from test_decode_attention_program import tile_scores, with_values
from test_dequant import dequantize, dequantize_transposed, load_transposed, store_transposed, swizzle

BF16 = jnp.bfloat16
ONE_SM = dataclasses.replace(H200, sms=1)
TILE = shaped((64, 64), BF16)

# ---- the GEMM ----


def reduced(partials: np.ndarray, rows: int) -> np.ndarray:
    """`reduce_partials.emit` of three warps; the tile [rows, 64] in shared memory."""
    memory = Memory(partials)
    machine = NumpyMachine(reduce_partials.THREADS, 128 * rows, memory)
    source = np.int64(memory.begins[0])
    reduce_partials.emit(machine, source, np.int64(0), np.arange(96), partials.shape, rows, None)
    return machine.shared[swizzle(np.arange(128 * rows))].view(BF16).reshape(rows, 64)


class Posts:
    """`exchange` by a dictionary of the host: what each CTA was sent, in the order of the shared tiles."""

    def __init__(self):
        self.came, self.changed = collections.defaultdict(list), threading.Condition()

    def send(self, parts, rank, sums_s, mbarrier) -> None:
        """To the warpgroup of the same number in the others."""

        def post(rank, cluster, warpgroup, *parts) -> None:
            with self.changed:
                for to, part in enumerate(parts):
                    self.came[int(cluster), int(warpgroup), to, int(rank)].append(np.asarray(part))
                self.changed.notify_all()

        io_callback(post, None, rank, lax.axis_index("cluster"), lax.axis_index("warpgroup"), *parts)

    def receive(self, own, sums_s, mbarrier, phase) -> jax.Array:
        place = [lax.axis_index(name) for name in ("cluster", "warpgroup", "cluster_rank")]

        def take(own, phase, *place) -> np.ndarray:
            others = [rank for rank in range(sums_s.shape[0] + 1) if rank != place[-1]]
            with self.changed:
                boxes = [self.came[*map(int, place), rank] for rank in others]
                assert self.changed.wait_for(lambda: min(map(len, boxes)) > phase, 60)
            return np.asarray(sum((box[int(phase)] for box in boxes), np.asarray(own)))

        return io_callback(take, shaped(own.shape), own, phase, *place)


@pytest.fixture
def gemms(monkeypatch):
    """Runs GEMM kernels in the interpreter."""
    u32 = lambda *shape: shaped(shape, jnp.uint32)  # noqa: E731

    def store(out_s, y):
        out_s[...] = on_numpy(store_transposed, shaped(out_s.shape, BF16), y)

    warps = []

    def warp_map(body):
        return plgpu.warp_map(lambda warp: (warps.append(warp), body(warp))[1])

    def reduce(partials_g, lora_x_s, registers):
        rows = lora_x_s.shape[0]

        @pl.when(warps[-1] == 1)  # which stores what the three store
        def _():
            lora_x_s[...] = on_numpy(lambda given: reduced(given, rows), shaped((rows, 64), BF16), partials_g[...])

        plgpu.commit_smem()

    def wgmma_wait(pending):
        """Orders the reads of what it waits for before the next copy, for which the interpreter asks for a fence."""
        plgpu.wgmma_wait(pending)
        plgpu.commit_smem()

    def loaded_transposed(*refs):
        return on_numpy(load_transposed, (u32(4, 128), u32(8, 128)), *(ref[...] for ref in refs))

    posts = Posts()
    stand_ins = {
        exchange: {"prepare": lambda mbarrier: None, "send": posts.send, "receive": posts.receive},
        operand: {"load": load, "dequantize": lambda *tile: on_numpy(dequantize, TILE, *tile)},
        mainloop: {"plgpu": Namespace(plgpu, wgmma_wait=wgmma_wait)},
        producer: {"plgpu": Namespace(plgpu, warp_map=warp_map), "reduce_partials": reduce},
        epilogue: {"load": load, **ACCUMULATING},
        transposed: {
            "load_transposed": loaded_transposed,
            "dequantize_transposed": lambda *held: on_numpy(dequantize_transposed, TILE, *held),
            "store_transposed": store,
        },
    }
    with interpreting(monkeypatch, stand_ins):
        yield


def random_packed(n: int, k: int):
    """A packed weight, and its exact values in fp64; with multipliers that differ between features."""
    packed = packing.pack(cases.random_weight(jax.random.key(n + k), n, k))
    packed = dataclasses.replace(packed, multiplier=packed.multiplier * (1 + jnp.arange(packed.multiplier.size) % 5))
    matrix, row = (np.asarray(part, np.float64) for part in packing.packed_parts(packed))
    return packed, matrix * row[:, None]


@pytest.mark.parametrize(
    "config, m, n, k, ranks, parts",
    [
        (Config(8, warpgroups_n=1, k_tiles=2, stages=2), 5, 128, 320, (24,), 3),
        (Config(16, warpgroups_n=2, k_tiles=1, stages=2), 24, 192, 192, (32, 8), 0),
        (Config(8, warpgroups_n=1, k_tiles=1, stages=3, lookahead=True), 8, 64, 320, (24,), 0),
        (Config(8, warpgroups_n=1, k_tiles=2, stages=2, lookahead=True), 16, 64, 384, (), 0),
        (Config(8, warpgroups_n=1, warpgroups_k=2, k_tiles=1, stages=6), 8, 128, 192, (16,), 0),
        (Config(16, warpgroups_n=2, cluster=2, k_tiles=1, stages=2), 40, 448, 192, (8, 16, 32), 0),
        (Config(40, warpgroups_n=1, cluster=3, k_tiles=1, stages=2), 37, 320, 256, (16,), 0),
        (Config(24, warpgroups_n=1, cluster=4, k_tiles=1, stages=2, lookahead=True), 20, 64, 640, (24,), 0),
        (Config(8, warpgroups_n=1, warpgroups_k=2, cluster=2, k_tiles=1, stages=3), 5, 64, 384, (24,), 3),
    ],
    ids=lambda value: None if isinstance(value, int) else "",
)
def test_gemm(gemms, config, m, n, k, ranks, parts):
    """Few CTAs do all tiles, one after another; the last tiles reach past the rows and the features."""
    packed, matrix = random_packed(n, k)
    rng = np.random.default_rng(m)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), BF16)  # noqa: E731
    x, bias, scale = draw(m, k), draw(n) * 4, 0.75
    expected = np.asarray(x, np.float64) @ matrix.T + np.asarray(bias, np.float64)
    lora_x, b = None, ()
    if ranks:
        widths = [n - 64 * (len(ranks) - 1), *[64] * (len(ranks) - 1)]
        b = tuple(draw(rank, width) for rank, width in zip(ranks, widths, strict=True))
        t = [draw(m, rank) for rank in ranks]
        lora_x = t[0] if len(t) == 1 else jnp.concatenate([jnp.pad(p, ((0, 0), (0, 64 - p.shape[1]))) for p in t], 1)
        if parts:
            lora_x = jnp.asarray(rng.integers(-999, 999, (parts, m, *ranks)) / 256, jnp.float32)  # exact sums
            t = [lora_x.sum(0).astype(BF16)]
        delta = [np.asarray(a, np.float64) @ np.asarray(of_b, np.float64) for a, of_b in zip(t, b, strict=True)]
        expected += scale * np.concatenate(delta, axis=1)
    y = kernel.gemm(x, packed, config, bias=bias, lora_x=lora_x, lora_b=b, scale=scale, gpu=ONE_SM)
    assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= 2.0**-8 * np.abs(expected) + 1e-4)


@pytest.mark.parametrize(
    "config, m, n, k",
    [
        (Config(8, warpgroups_n=2, k_tiles=1, stages=2), 8, 128, 192),
        (Config(16, warpgroups_n=1, k_tiles=1, stages=2, lookahead=True), 24, 192, 64),
    ],
)
def test_gemm_dx(gemms, config, m, n, k):
    packed = packing.pack(cases.random_weight(jax.random.key(n), n, k))
    matrix, row = (np.asarray(part, np.float64) for part in packing.packed_parts(packed))
    dy = jax.random.normal(jax.random.key(1), (m, n), BF16)
    expected = np.asarray(dy, np.float64) @ (matrix * row[:, None])
    dx = np.asarray(transposed.gemm_dx(dy, packed, config, gpu=ONE_SM), np.float64)
    assert np.all(np.abs(dx - expected) <= 2.0**-8 * np.abs(expected) + 1e-4)


@pytest.mark.parametrize(("m", "n", "k"), [(5, 64, 64), (130, 192, 448)])
def test_tcgen05_gemm(monkeypatch, m, n, k):
    """Stages are used again, the last tiles reach past the rows and the features."""

    def of_tiles(words, scales):
        return np.concatenate([dequantize(*tile) for tile in zip(words, scales, strict=True)])

    def commit_tmem():
        """Orders the reads of words before the next copy, for which the interpreter asks for a fence."""
        plgpu.commit_tmem()
        plgpu.commit_smem()

    stand_in = lambda *tiles: on_numpy(of_tiles, shaped((128, 64), BF16), *tiles)  # noqa: E731
    fenced = Namespace(plgpu, commit_tmem=commit_tmem)
    packed, matrix = random_packed(n, k)
    x = jax.random.normal(jax.random.key(m), (m, k), BF16)
    bias = jnp.arange(n, dtype=BF16)
    expected = np.asarray(x, np.float64) @ matrix.T + np.asarray(bias, np.float64)
    with interpreting(monkeypatch, {tcgen05: {"load": load, "dequantize": stand_in, "plgpu": fenced}}):
        y = tcgen05.gemm(x, packed, bias=bias, gpu=gpu_of("NVIDIA B200", 100, 148))
    assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= 2.0**-8 * np.abs(expected) + 1e-4)


# ---- decode attention ----


def store_output(out, out_g, first, skip, group) -> None:
    """By its definition; rows are in their order here."""
    y = out.astype(BF16).T
    for i in range(group):
        out_g[pl.ds(first + skip + i, 1)] = lax.dynamic_slice(y, (skip + i, 0), (1, y.shape[1]))


def keep(partial: combine.Partial, slot) -> None:
    """A partial in a slot, in an order of this file."""
    size = partial.out.size
    slot[pl.ds(0, size)] = partial.out.reshape(-1)
    slot[pl.ds(size, 8)], slot[pl.ds(size + 8, 8)] = partial.m, partial.l


def receive(slot, width: int) -> combine.Partial:
    size = 8 * width
    m, l, out = (slot[pl.ds(at, count)] for at, count in ((size, 8), (size + 8, 8), (0, size)))  # noqa: E741
    return combine.Partial(m, l, out.reshape(width, 8))


@pytest.fixture
def attentions(monkeypatch):
    """Runs the attention kernel in the interpreter."""

    def scores(q, keys):
        return on_numpy(tile_scores, shaped((4, 16, 8)), q, keys[...])

    def add_values(out, weights, values, tokens):
        return on_numpy(with_values, shaped(out.shape), out, weights.astype(BF16), values[...], tokens)

    fence = lambda: lambda emit: plgpu.commit_smem  # noqa: E731
    stand_ins = {
        consumer: {"load": load, "scores": scores, "add_values": add_values, "store_output": store_output},
        combine: {"load": load, "keep": keep, "receive": receive, "warpgroup_sync": lambda: None},
        stages: {"plgpu": Namespace(plgpu, inline_mgpu=fence)},
    }
    with interpreting(monkeypatch, stand_ins):
        yield


@pytest.mark.parametrize(
    "heads, kv_heads, width, stages, lengths, prompt_lengths",
    [
        (14, 2, 64, 2, (0, 136), (0, 70)),  # a sequence without a token, a tail in each cache
        (3, 1, 128, 3, (65, 1), (128, 330)),  # as many queries as fill the eight with those of another row
    ],
)
def test_attention(attentions, heads, kv_heads, width, stages, lengths, prompt_lengths):
    """Caches hold NaN and infinity past the lengths."""
    rows = len(lengths)
    args = inputs(rows, rows, 336, 136, heads, kv_heads, width, BF16, lengths=lengths,
                  prompt_lengths=prompt_lengths)  # fmt: skip
    found = attention.decode_attention(**args, scale=0.11, config=AttentionConfig(1, stages))
    expected = exact(**args, scale=0.11)
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= 2.0**-7 * np.abs(expected).max()
