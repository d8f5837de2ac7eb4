"""Decode attention for Hopper in Pallas Mosaic GPU: see `attention.decode_attention` for what it computes.

How the work is cut. A *pair* is one row and one key/value head: up to eight queries that read the same keys. The tokens
of a pair, prompt first, lie in tiles of 64, none of which mixes prompt and own tokens; tile i belongs to block i mod 4
of the pair's cluster of four blocks. So the order of every sum depends on the row's own lengths alone: neither the
batch nor the other rows can change a bit.

How a block works. A producer warpgroup streams its tiles into a ring of slots by TMA, keys and values of a tile in a
slot each. In the consumer warpgroup each warp has 16 of a tile's 64 keys and its own running maximum, sum and output,
so that the warps need not meet in the loop. The tensor cores multiply by `mma.sync` with the keys in the 16-row slot
and the queries in the slot of eight, which is what there is of them (see `fragments`).

How the parts come together. The warps of a block add their outputs through shared memory, each scaled to the common
maximum. Blocks 1 to 3 then send output, maximum and sum through distributed shared memory to block 0, which adds them
in order, divides, and writes the result.

What lies past the lengths is not loaded, but for the rest of the last tile: there scores are set to -inf and values to
0, so that it may hold anything.

Barriers, and why none can hang. Every wait is answered by arrivals that do not themselves wait for the waiter:
- `full[slot]` completes once for every use of the ring, when the producer's copy has come. `empty[slot]` completes once
  for every use: the consumer arrives after its last read. Both count the uses from the same two lengths, use i in slot
  i mod slots, and the producer waits on `empty` only from the second round on.
- `sent[part - 1]` completes at most once in a kernel, when the three stores of that block have arrived. Block 0 waits
  for exactly the blocks that have a tile, which send always; senders wait for nobody. Block 0 cannot leave before
  what was sent to it has come; all barriers are set up before any block of the cluster runs (Mosaic syncs it).
- `commit_smem` is, among the consumer's threads, a barrier of the warpgroup.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.decode_attention.fragments import (
    FRAGMENT,
    KEYS_OF_WARP,
    MERGED,
    PACKED_TRANSFORMS,
    QUERIES,
    SLOT,
    add_values,
    pack,
    packed_shape,
    scores_of,
    store_result,
    unpack,
)

TILE = 4 * KEYS_OF_WARP
PARTS = 4  # blocks that share a pair
SLOTS = 4  # of 64 × H bf16; two blocks fit a multiprocessor
LOG2_E = 1.4426950408889634
LEAST = -1e30  # where the running maximum starts: finite, so that nothing minus nothing is 0


# A jit of its own, although the callers are jitted: a program then lowers and compiles each shape once, not once for
# every layer.
@functools.partial(jax.jit, static_argnames=("scale", "parts", "slots"))
def decode_attention(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    prompt_index: jax.Array,
    prompt_lengths: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    scale: float,
    *,
    parts: int = PARTS,
    slots: int = SLOTS,
) -> jax.Array:
    """As `attention.decode_attention`: bf16, H 64 or 128, at most 8 query heads a key/value head, caches whose slots
    are a multiple of 8."""
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    body = functools.partial(
        _body, kv_heads=kv_heads, group=heads // kv_heads, scale=scale * LOG2_E, parts=parts, slots=slots
    )
    more = max(0, QUERIES - rows * heads)  # the kernel reads eight queries at a time
    q = jnp.pad(q.reshape(rows * heads, width), ((0, more), (0, 0)))
    ring = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        grid=(rows * kv_heads,),
        grid_names=("pair",),
        cluster=(parts,),
        cluster_names=("part",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "ring": plgpu.SMEM((slots, TILE, width), jnp.bfloat16, transforms=ring),
            "full": plgpu.Barrier(num_barriers=slots),
            "empty": plgpu.Barrier(num_barriers=slots),
            "tops": plgpu.SMEM((4, QUERIES), jnp.float32),
            "totals": plgpu.SMEM((4, QUERIES), jnp.float32),
            "outputs": plgpu.SMEM((4, width, QUERIES), jnp.float32),
            "others": plgpu.SMEM((max(1, parts - 1), *packed_shape(width)), jnp.float32, transforms=PACKED_TRANSFORMS),
            "sent": plgpu.Barrier(num_barriers=max(1, parts - 1)),
        },
        kernel_name=f"decode_attention_h{width}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
    )
    caches = [c.reshape(-1, *c.shape[2:]) for c in (prompt_k, prompt_v, k, v)]
    out = call(q, *caches, prompt_index, prompt_lengths, lengths)
    return out[: rows * heads].reshape(rows, heads, width)


def _body(
    q_g, prompt_k_g, prompt_v_g, k_g, v_g, index_g, prompt_lengths_g, lengths_g, out_g, *, ring, full, empty, tops,
    totals, outputs, others, sent, kv_heads, group, scale,
    parts, slots,
):  # fmt: skip
    warpgroup, pair, part = (lax.axis_index(name) for name in ("warpgroup", "pair", "part"))
    row = lax.div(pair, kv_heads)
    width = out_g.shape[1]
    of_prompt, own = prompt_lengths_g[row], lengths_g[row]
    prompt_tiles = pl.cdiv(of_prompt, TILE)
    tiles = prompt_tiles + pl.cdiv(own, TILE)
    mine = lax.div(tiles - part + parts - 1, parts)  # this block's tiles: part, part + parts, ...

    def produce():
        prompt_pair = index_g[row] * kv_heads + lax.rem(pair, kv_heads)

        def load(cache, pair, first, use):
            slot = lax.rem(use, slots)

            @pl.when(use >= slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(cache.at[pair, pl.ds(first, TILE)], ring.at[slot], full.at[slot])

        def one_tile(i, carry):
            tile = part + i * parts

            @pl.when(tile < prompt_tiles)
            def _():
                load(prompt_k_g, prompt_pair, tile * TILE, 2 * i)
                load(prompt_v_g, prompt_pair, tile * TILE, 2 * i + 1)

            @pl.when(tile >= prompt_tiles)
            def _():
                load(k_g, pair, (tile - prompt_tiles) * TILE, 2 * i)
                load(v_g, pair, (tile - prompt_tiles) * TILE, 2 * i + 1)

            return carry

        lax.fori_loop(0, mine, one_tile, None)

    # The eight queries from `first` on hold those of this pair, beginning at the `skip`th.
    wanted = row * (kv_heads * group) + lax.rem(pair, kv_heads) * group
    first = jnp.minimum(wanted, q_g.shape[0] - QUERIES)

    def consume():
        q = plgpu.load(q_g.at[pl.ds(first, QUERIES)], layout=SLOT, optimized=False)
        shape = (4, KEYS_OF_WARP, QUERIES)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=FRAGMENT) * KEYS_OF_WARP + plgpu.broadcasted_iota(
            jnp.int32, shape, 1, layout=FRAGMENT
        )

        def one_tile(i, carry):
            top, total, out = carry
            tile = part + i * parts
            left = jnp.where(tile < prompt_tiles, of_prompt - tile * TILE, own - (tile - prompt_tiles) * TILE)

            def slot_of(use):
                slot = lax.rem(use, slots)
                plgpu.barrier_wait(full.at[slot])
                return slot

            slot = slot_of(2 * i)
            scores = scores_of(q, ring.at[slot])
            plgpu.barrier_arrive(empty.at[slot])
            scores = jnp.where(key < left, scores * scale, -jnp.inf)
            higher = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - higher)
            weights = jnp.exp2(scores - _over_keys(higher, shape))
            total = total * _over_keys(shrink, shape) + weights
            slot = slot_of(2 * i + 1)
            out = add_values(out * _over_keys(shrink, out.shape), weights.astype(jnp.bfloat16), ring.at[slot], left)
            plgpu.barrier_arrive(empty.at[slot])
            return higher, total, out

        def filled(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        start = (
            filled(LEAST, (4, QUERIES), FRAGMENT.reduce(1)),
            filled(0.0, shape, FRAGMENT),
            filled(0.0, (4, width, QUERIES), FRAGMENT),
        )
        top, total, out = lax.fori_loop(0, mine, one_tile, start)
        top, total, out = _over_warps(top, total.sum(axis=1), out, tops, totals, outputs)

        @pl.when((part > 0) & (mine > 0))
        def _():
            plgpu.async_store_smem(
                pack(out, top, total), others.at[part - 1], sent.at[part - 1], cluster_idx=0, cluster_dim="part",
                optimized=False,
            )  # fmt: skip

        @pl.when(part == 0)
        def _():
            def add_one(i, carry):
                top, total, out = carry
                plgpu.barrier_wait(sent.at[i])
                its_out, its_top, its_total = unpack(plgpu.load(others.at[i], layout=MERGED, optimized=False))
                higher = jnp.maximum(top, its_top)
                keep, take = jnp.exp2(top - higher), jnp.exp2(its_top - higher)
                out = out * _over_rows(keep, width) + its_out * _over_rows(take, width)
                return higher, total * keep + its_total * take, out

            _, all_total, all_out = lax.fori_loop(0, jnp.minimum(tiles, parts) - 1, add_one, (top, total, out))
            divisor = jnp.where(all_total > 0, all_total, 1.0)
            store_result(all_out / _over_rows(divisor, width), out_g, first, wanted - first, group)

    @pl.when(warpgroup == 1)
    def _():
        produce()

    @pl.when(warpgroup == 0)
    def _():
        consume()


def _over_keys(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A warp's value for each query, [4, 8], over its keys or over the head dim."""
    return lax.broadcast_in_dim(value, shape, (0, 2))


def _over_rows(value: jax.Array, rows: int) -> jax.Array:
    return lax.broadcast_in_dim(value, (rows, QUERIES), (1,))


def _over_warps(top, total, out, tops, totals, outputs):
    """The block's maximum [8], sum [8] and output [H, 8] from those of its warps."""
    read = functools.partial(plgpu.load, optimized=False)
    tops[...] = top
    plgpu.commit_smem()
    each = [read(tops.at[warp], layout=FRAGMENT.reduce((0, 1))) for warp in range(4)]
    highest = functools.reduce(jnp.maximum, each)
    shrink = jnp.exp2(top - lax.broadcast_in_dim(highest, top.shape, (1,)))
    totals[...] = total * shrink
    outputs[...] = out * _over_keys(shrink, out.shape)
    plgpu.commit_smem()
    each = [read(tops.at[warp], layout=MERGED.reduce(0)) for warp in range(4)]
    total = sum(read(totals.at[warp], layout=MERGED.reduce(0)) for warp in range(4))
    out = sum(read(outputs.at[warp], layout=MERGED) for warp in range(4))
    return functools.reduce(jnp.maximum, each), total, out
