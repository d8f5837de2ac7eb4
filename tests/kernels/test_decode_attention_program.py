"""Parts of the attention kernel on a CPU: a KV tile as operands of the matmuls, their instructions run for all threads
of a warpgroup on the numpy machine; which CTA has which tile; and the merge of partials."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_machine import Memory, NumpyMachine
from ptx_interpreter import statements
from qerl_kernels.decode_attention import kv_tiles, warp_mma
from qerl_kernels.decode_attention.combine import Partial, merge
from qerl_kernels.decode_attention.config import KV_TILE, QUERIES, SPLITS, AttentionConfig, partial_slots
from qerl_kernels.decode_attention.consumer import M_INIT
from qerl_kernels.decode_attention.work import Global, Work

THREAD = np.arange(128)
WARP, G, C = THREAD // 32, THREAD % 32 // 4, THREAD % 4  # a thread's places in the fragments of `mma.m16n8k16`
TILE_AT = 2048
BF16 = jnp.bfloat16
shapes = pytest.mark.parametrize("width", [64, 128])


def machine_with(tile: np.ndarray) -> NumpyMachine:
    """Shared memory that has a tile [64, H] as TMA writes it: blocks of 8 tokens × 128 bytes, the 16-byte chunk j of
    token t at j ^ t."""
    machine = NumpyMachine(128, shared_bytes=TILE_AT + tile.nbytes)
    tokens = tile.view(np.uint8).reshape(KV_TILE, -1, 16)
    for t, j in np.ndindex(tokens.shape[:2]):
        block = t // 8 * (tokens.shape[1] // 8) + j // 8
        at = TILE_AT + (block * 8 + t % 8) * 128 + 16 * (j % 8 ^ t % 8)
        machine.shared[at : at + 16] = tokens[t, j]
    return machine


def words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit numbers of each thread as a word."""
    return low.view(np.uint16).astype(np.int64) | high.view(np.uint16).astype(np.int64) << 16


def tile_scores(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`kv_tiles.load_keys` and `mma`: [4, 16, 8] of a tile's keys and eight queries [8, H]."""
    width = keys.shape[1]
    machine, out = machine_with(keys), np.zeros((KV_TILE, QUERIES), np.float32)
    sums = [np.zeros(128, np.float32)] * 4
    operands = kv_tiles.load_keys(machine, TILE_AT, width)
    assert len(operands) == width // 16
    for i, a in enumerate(operands):
        b = [words(q[G, 16 * i + at], q[G, 16 * i + at + 1]) for at in (2 * C, 2 * C + 8)]
        sums = machine.mma(sums, a, b)
    for i, found in enumerate(sums):
        out[16 * WARP + G + 8 * (i // 2), 2 * C + i % 2] = found
    return out.reshape(4, 16, QUERIES)


def with_values(out: np.ndarray, weights: np.ndarray, values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """out [4, H, 8] and what `kv_tiles.load_values` and `mma` add; weights [4, 16, 8]."""
    width = values.shape[1]
    machine, total, weights = machine_with(values), out.copy(), weights.reshape(KV_TILE, QUERIES)
    held = [weights[16 * WARP + G + at, 2 * C + e] for at in (0, 8) for e in range(2)]  # as scores lie
    b = [machine.movmatrix(words(*held[i : i + 2])) for i in (0, 2)]
    operands = kv_tiles.load_values(machine, TILE_AT, width, machine.every(int(tokens)))
    assert len(operands) == width // 16
    for i, a in enumerate(operands):
        rows = [16 * i + G + 8 * half for half in (0, 1)]
        places = [(WARP, row, 2 * C + e) for row in rows for e in range(2)]
        sums = machine.mma([total[place] for place in places], a, b)
        for place, new in zip(places, sums, strict=True):
            total[place] = new
    return total


@shapes
def test_scores(width):
    """`K qᵀ` of each warp's 16 tokens."""
    rng = np.random.default_rng(width)
    keys, q = (rng.normal(size=(rows, width)).astype(BF16) for rows in (KV_TILE, QUERIES))
    exact = keys.astype(np.float64) @ q.astype(np.float64).T
    np.testing.assert_allclose(tile_scores(q, keys).reshape(KV_TILE, QUERIES), exact, atol=1e-4)


@shapes
@pytest.mark.parametrize("tokens", [-5, 1, 17, 64])
def test_values(width, tokens):
    """`Vᵀ Pᵀ` over the tile's first tokens; behind them V is NaN."""
    rng = np.random.default_rng(width)
    values = rng.normal(size=(KV_TILE, width)).astype(BF16)
    count = min(max(tokens, 0), KV_TILE)
    values[count:] = np.nan
    weights = np.where(np.arange(KV_TILE)[:, None] < count, rng.uniform(size=(KV_TILE, QUERIES)), 0).astype(BF16)
    weights, start = weights.reshape(4, 16, QUERIES), rng.normal(size=(4, width, QUERIES)).astype(np.float32)
    valid = np.where(np.arange(KV_TILE)[:, None] < count, values.astype(np.float64), 0).reshape(4, 16, width)
    exact = start + np.einsum("wth,wtq->whq", valid, weights.astype(np.float64))
    np.testing.assert_allclose(with_values(start, weights, values, tokens), exact, atol=1e-5)


@pytest.mark.parametrize("ctas", [1, 2, 4])
def test_tiles_of_each_cta(ctas):
    """Tile i belongs to split i mod 4 whatever the CTAs, and is computed once; CTA 0 expects the splits that come."""
    lengths = np.array([(0, 0), (1, 0), (0, 65), (64, 64), (130, 1), (200, 700), (64, 1500)])
    config, kv_heads, group = AttentionConfig(ctas, 2), 2, 7

    def work_of(_) -> dict:
        caches = dict.fromkeys(("prompt_k", "prompt_v", "v"), None)
        integers = dict(
            zip(("prompt_index", "prompt_lengths", "lengths"), (jnp.arange(7) % 3, *lengths.T), strict=True)
        )
        q = jnp.zeros((len(lengths) * kv_heads * group, 64))
        work = Work(Global(q=q, k=q, out=q, **caches, **{k: jnp.asarray(v) for k, v in integers.items()}),
                    config, kv_heads, group)  # fmt: skip

        def count(seen: jax.Array, split: jax.Array) -> jax.Array:
            return work.fold_tiles(split, lambda seen, tile: seen.at[split, tile].add(1), seen)

        names = "sent", "first_slot", "prompt_pair", "own_query", "first_query"
        seen = work.fold_splits(count, jnp.zeros((SPLITS, 40), jnp.int32))
        return {"seen": seen, **{name: getattr(work, name) for name in names}}

    for name in ("warpgroup", "cta", "pair"):
        work_of = jax.vmap(work_of, axis_name=name)
    found = jax.tree.map(np.asarray, jax.jit(work_of)(jnp.zeros((len(lengths) * kv_heads, ctas, 1))))
    for pair in range(len(lengths) * kv_heads):
        row, kv_head = divmod(pair, kv_heads)
        tiles = int(np.ceil(lengths[row] / KV_TILE).sum())
        split, tile = np.indices((SPLITS, 40))
        np.testing.assert_array_equal(found["seen"][pair].sum((0, 1)), (tile % SPLITS == split) & (tile < tiles))
        sent = int(found["seen"][pair, 1:].any((0, 1, 3)).sum())
        assert found["sent"][pair, 0, 0] == sent <= partial_slots(ctas) - found["first_slot"][pair, 0, 0]
        assert found["prompt_pair"][pair, 0, 0] == row % 3 * kv_heads + kv_head
        assert found["own_query"][pair, 0, 0] == pair * group
        first = found["first_query"][pair, 0, 0]  # eight rows that exist, the pair's among them
        assert 0 <= first <= pair * group and pair * group + group <= first + QUERIES <= len(lengths) * kv_heads * group


def test_merged_partials():
    """Attention over two sets of tokens from that over each, and with an empty set the same bits."""
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(QUERIES, 30)) * 20, rng.normal(size=(30, 64))

    def partial(tokens: slice) -> Partial:
        m = scores[:, tokens].max(axis=1)
        weights = np.exp2(scores[:, tokens] - m[:, None])
        return Partial(*(jnp.asarray(x, jnp.float32) for x in (m, weights.sum(1), values[tokens].T @ weights.T)))

    for found, wanted in zip(merge(partial(slice(0, 11)), partial(slice(11, 30))), partial(slice(0, 30)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    empty = Partial(jnp.full(QUERIES, M_INIT), jnp.zeros(QUERIES), jnp.zeros((64, QUERIES)))
    one = partial(slice(0, 30))
    for found in (merge(one, empty), merge(empty, one)):
        for ours, wanted in zip(found, one, strict=True):
            np.testing.assert_array_equal(ours, wanted)


class Storing(NumpyMachine):
    """With the guarded store of inline PTX: address of the output, offset, a query of its group, value."""

    def asm(self, text, out, base, offset, own, value, *, effects):
        compared, rounded, address, store = statements(text)
        assert (out, effects, rounded[1], store[1]) == ("", True, "cvt.rn.bf16.f32", "st.global.b16")
        compare = {"setp.lt.u32": np.less, "setp.le.u32": np.less_equal}[compared[1]]
        exists = compare(np.asarray(own).astype(np.uint32), int(compared[2][2]))
        self.store_global_bf16(base + offset * int(address[2][2]), value, exists if store[0] else True)


@pytest.mark.parametrize(("skip", "group"), [(0, 8), (2, 3), (7, 1)])
@shapes
def test_a_group_of_queries_is_stored_to_rows_of_its_own(width, skip, group, monkeypatch):
    """Thread by thread: in `MERGED` it has two queries of every 32nd number of the head dim."""
    y = np.random.default_rng(width).normal(size=(width, QUERIES)).astype(np.float32)
    memory = Memory(np.zeros((16, width), np.uint16))
    machine = Storing(128, memory=memory)
    same = lambda value: value  # noqa: E731
    stand_ins = {
        "PtxMachine": lambda: machine,
        "Ptr": same,
        "I32": same,
        "F32": same,
        "element": lambda pair, j: pair[j],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(warp_mma, name, stand_in)
    pointer = types.SimpleNamespace(memref_ptr=lambda out: np.int64(memory.begins[0]))
    monkeypatch.setattr(warp_mma, "mgpu", types.SimpleNamespace(utils=pointer))
    pairs = [[y[32 * i + 8 * WARP + G, 2 * C + j] for j in range(2)] for i in range(width // 32)]
    held = types.SimpleNamespace(shape=y.shape, registers=types.SimpleNamespace(flat=pairs))
    first, skipped = (types.SimpleNamespace(registers=np.array(value)) for value in (5, skip))
    warp_mma._emit_store(None, held, None, first, skipped, group=group)
    expected = np.zeros((16, width), BF16)
    expected[5 + skip : 5 + skip + group] = y.T[skip : skip + group].astype(BF16)
    np.testing.assert_array_equal(memory.array(0, BF16).reshape(16, width), expected)
    assert memory.writes.sum() == 2 * group * width
