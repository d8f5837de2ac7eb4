"""Decode attention for Hopper in Pallas Mosaic GPU: see `attention.decode_attention` for what it computes.

How the sums are ordered. A *pair* is one row and one key/value head: up to eight queries that read the same keys. The
tokens of a pair, prompt first, lie in tiles of 64, none of which mixes prompt and own tokens; tile i belongs to part
i mod 4, and the parts are added up in order. So the order of every sum depends on the row's own lengths alone: neither
the batch nor the other rows can change a bit. Who computes the parts is another matter: four blocks of a cluster, two
or one, as there are few pairs or many.

How a block works. A producer warpgroup streams its tiles into a ring of slots by TMA, keys and values of a tile in a
slot each. In the consumer warpgroup each warp has 16 of a tile's 64 keys and its own running maximum, sum and output,
so that the warps need not meet in the loop. The tensor cores multiply by `mma.sync` with the keys in the 16-row slot
and the queries in the slot of eight, which is what there is of them (see `fragments`). At the end of a part the warps
add their outputs through shared memory, each scaled to the common maximum. Block 0 of a cluster gets the parts of the
others through distributed shared memory, divides, and writes the result.

What lies past the lengths is not loaded, but for the rest of the last tile: there scores are set to -inf and values to
0, so that it may hold anything. A prompt is read from memory once for the rows that follow one another in the batch
and share it; the L2 serves the others.

Barriers, and why none can hang. Every wait is answered by arrivals that do not themselves wait for the waiter:
- `full[slot]` completes once for every use of the ring, when the producer's copy has come. `empty[slot]` completes once
  for every use: the consumer arrives after its last read, by `release`, whose fence orders the reads before the copy
  engine's next write. Both make the same uses in the same order, use i in slot i mod slots, and the producer waits on
  `empty` only from the second round on.
- `mail` completes once, when all bytes that the other blocks send to block 0 have come. Block 0 expects the bytes of
  exactly the parts that have a tile and are not its own; the block of such a part sends always. `mail` is set up
  before any block sends: every thread of the cluster arrives on the hardware's cluster barrier once, block 0 after
  the set-up, and waits for it once, the consumers before their first tile. Block 0 cannot leave before what was sent
  to it has come.
- `meet` is a barrier of the consumer's four warps.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.decode_attention.exchange import (
    STAT,
    cluster_arrive,
    cluster_wait,
    keep,
    mail_bytes,
    meet,
    open_mail,
    receive,
    release,
    send,
    wait_for_mail,
)
from qerl_kernels.decode_attention.fragments import (
    FRAGMENT,
    KEYS_OF_WARP,
    MERGED,
    QUERIES,
    add_values,
    load_queries,
    ring_transforms,
    scores_of,
    store_result,
)
from qerl_kernels.dispatch import SMS

TILE = 4 * KEYS_OF_WARP
PARTS = 4
SMEM_BYTES = 113 * 1024  # of a block: two fit a multiprocessor
LOG2_E = 1.4426950408889634
LEAST = -1e30  # where the running maximum starts: finite, so that nothing minus nothing is 0


def blocks_for(pairs: int, sms: int) -> int:
    """Blocks that share a pair: more than one only as long as that keeps idle multiprocessors busy."""
    return 4 if 4 * pairs <= sms else 2 if pairs <= sms else 1


def slots_for(width: int, blocks: int, itemsize: int = 2) -> int:
    """Slots of the ring that fit beside the sums; itemsize: bytes of a number in the caches.

    Not more where a block could have a multiprocessor to itself: clusters of four, one block on each multiprocessor, do
    not all fit on the chip at once.
    """
    sums = 4 * QUERIES * width * 4 + _boxes(blocks) * mail_bytes(width)
    small = 6 * 1024  # tops, totals and mail, a KiB each, Mosaic's own scratch, and the barriers
    return (SMEM_BYTES - sums - small) // (TILE * width * itemsize)


def _boxes(blocks: int) -> int:
    """Places in block 0 for a part: one for what it has added up itself, if it has several, and one for each sent."""
    return PARTS - PARTS // blocks + (blocks < PARTS)


# A jit of its own, although the callers are jitted: a program then lowers and compiles each shape once, not once for
# every layer.
@functools.partial(jax.jit, static_argnames=("scale", "sms", "blocks", "slots"))
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
    sms: int = SMS,
    blocks: int | None = None,
    slots: int | None = None,
) -> jax.Array:
    """As `attention.decode_attention`: bf16, caches in bf16 or e4m3 with a multiple of 8 slots, H 64 or 128, at most 8
    query heads a key/value head.

    Args:
      sms: multiprocessors of the GPU.
      blocks: blocks that share a pair (1, 2 or 4); None for `blocks_for`. Changes no bit.
      slots: of the ring; None for `slots_for`. Changes no bit.
    """
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    blocks = blocks or blocks_for(rows * kv_heads, sms)
    slots = slots or slots_for(width, blocks, k.dtype.itemsize)
    more = max(0, QUERIES - rows * heads)  # the kernel reads eight queries at a time
    q = jnp.pad(q.reshape(rows * heads, width), ((0, more), (0, 0)))
    call = plgpu.kernel(
        functools.partial(
            _body, kv_heads=kv_heads, group=heads // kv_heads, scale=scale * LOG2_E, blocks=blocks, slots=slots
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        grid=(rows * kv_heads,),
        grid_names=("pair",),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "ring": plgpu.SMEM((slots, TILE, width), k.dtype, transforms=ring_transforms(width, k.dtype)),
            "full": plgpu.Barrier(num_barriers=slots),
            "empty": plgpu.Barrier(num_barriers=slots),
            "tops": plgpu.SMEM((4, QUERIES), jnp.float32),
            "totals": plgpu.SMEM((4, QUERIES), jnp.float32),
            "outputs": plgpu.SMEM((4, width, QUERIES), jnp.float32),
            "boxes": plgpu.SMEM((_boxes(blocks), mail_bytes(width) // 4), jnp.float32),
            "mail": plgpu.SMEM((2,), jnp.uint32),
        },
        kernel_name=f"decode_attention_h{width}" + ("_fp8" if k.dtype == jnp.float8_e4m3fn else ""),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
    )
    caches = [c.reshape(-1, *c.shape[2:]) for c in (prompt_k, prompt_v, k, v)]
    out = call(q, *caches, prompt_index, prompt_lengths, lengths)
    return out[: rows * heads].reshape(rows, heads, width)


def _body(
    q_g, prompt_k_g, prompt_v_g, k_g, v_g, index_g, prompt_lengths_g, lengths_g, out_g, *, ring, full, empty, tops,
    totals, outputs, boxes, mail, kv_heads, group, scale, blocks, slots,
):  # fmt: skip
    warpgroup, pair, block = (lax.axis_index(name) for name in ("warpgroup", "pair", "block"))
    row = lax.div(pair, kv_heads)
    width, fp8 = out_g.shape[1], k_g.dtype == jnp.float8_e4m3fn
    of_prompt, own, prompt = prompt_lengths_g[row], lengths_g[row], index_g[row]  # together: one latency
    prompt_pair = prompt * kv_heads + lax.rem(pair, kv_heads)
    prompt_tiles = pl.cdiv(of_prompt, TILE)
    tiles = prompt_tiles + pl.cdiv(own, TILE)
    parts = PARTS // blocks  # of this block, from `block * parts` on
    sent = jnp.clip(tiles - parts, 0, PARTS - parts)  # parts that have a tile and are not block 0's
    first_sent = _boxes(blocks) - (PARTS - parts)  # box of the first of them

    def over_tiles(part, one_tile, init):
        """Folds one_tile(carry, tile) over the tiles of a part."""
        count = lax.div(tiles - part + PARTS - 1, PARTS)
        return lax.fori_loop(0, count, lambda i, carry: one_tile(carry, part + i * PARTS), init)

    def over_parts(one_part, init):
        return lax.fori_loop(0, parts, lambda i, carry: one_part(carry, block * parts + i), init)

    def produce():
        def load(cache, pair, first, use):
            slot = lax.rem(use, slots)

            @pl.when(use >= slots)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(cache.at[pair, pl.ds(first, TILE)], ring.at[slot], full.at[slot])

        def one_tile(use, tile):
            @pl.when(tile < prompt_tiles)
            def _():
                load(prompt_k_g, prompt_pair, tile * TILE, use)
                load(prompt_v_g, prompt_pair, tile * TILE, use + 1)

            @pl.when(tile >= prompt_tiles)
            def _():
                load(k_g, pair, (tile - prompt_tiles) * TILE, use)
                load(v_g, pair, (tile - prompt_tiles) * TILE, use + 1)

            return use + 2

        over_parts(lambda use, part: over_tiles(part, one_tile, use), jnp.int32(0))
        if blocks > 1:
            cluster_wait()

    # The eight queries from `first` on hold those of this pair, beginning at the `skip`th.
    wanted = row * (kv_heads * group) + lax.rem(pair, kv_heads) * group
    first = jnp.minimum(wanted, q_g.shape[0] - QUERIES)

    def consume():
        q = load_queries(q_g.at[pl.ds(first, QUERIES)], fp8)
        shape = (4, KEYS_OF_WARP, QUERIES)
        warp, key = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=FRAGMENT) for axis in (0, 1))
        key = warp * KEYS_OF_WARP + key
        if blocks > 1:
            cluster_wait()  # while the first tile is on its way

        def slot_of(use):
            slot = lax.rem(use, slots)
            plgpu.barrier_wait(full.at[slot])
            return slot

        def one_tile(carry, tile):
            use, top, total, out = carry
            left = jnp.where(tile < prompt_tiles, of_prompt - tile * TILE, own - (tile - prompt_tiles) * TILE)
            slot = slot_of(use)
            scores = scores_of(q, ring.at[slot])
            release(empty.at[slot])
            scores = jnp.where(key < left, scores * scale, -jnp.inf)
            higher = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - higher)
            weights = jnp.exp2(scores - _over_keys(higher, shape))
            total = total * _over_keys(shrink, shape) + weights
            slot = slot_of(use + 1)
            out = add_values(out * _over_keys(shrink, out.shape), weights, ring.at[slot], left)
            release(empty.at[slot])
            return use + 2, higher, total, out

        def one_part(use, part):
            start = (
                _filled(LEAST, (4, QUERIES), FRAGMENT.reduce(1)),
                _filled(0.0, shape, FRAGMENT),
                _filled(0.0, (4, width, QUERIES), FRAGMENT),
            )
            use, top, total, out = over_tiles(part, one_tile, (use, *start))
            this = _over_warps(top, total.sum(axis=1), out, tops, totals, outputs)
            if blocks > 1:

                @pl.when((block > 0) & (part < tiles))
                def _():
                    send(*this, boxes.at[first_sent + part - parts], mail)

            return use, this

        def add_one_part(use, part):
            use, this = one_part(use, part)
            keep(*_merged(receive(kept, width), this), kept)  # not in registers, of which there are none to spare
            return use

        if parts == 1:
            _, result = one_part(jnp.int32(0), block)
        else:
            kept = boxes.at[0]
            nothing = (
                _filled(LEAST, (QUERIES,), STAT),
                _filled(0.0, (QUERIES,), STAT),
                _filled(0.0, (width, QUERIES), MERGED),
            )
            keep(*nothing, kept)
            over_parts(add_one_part, jnp.int32(0))
            result = receive(kept, width)

        @pl.when(block == 0)
        def _():
            _, total, out = with_mail(result) if blocks > 1 else result
            divisor = jnp.where(total > 0, total, 1.0)
            store_result(out / _over_rows(divisor, width), out_g, first, wanted - first, group, fp8)

    def with_mail(result):
        wait_for_mail(mail)
        add = lambda i, so_far: _merged(so_far, receive(boxes.at[first_sent + i], width))  # noqa: E731
        return lax.fori_loop(0, sent, add, tuple(result))

    if blocks > 1:
        open_mail(mail, jnp.where((block == 0) & (warpgroup == 0), sent * mail_bytes(width), -1))
        cluster_arrive()

    @pl.when(warpgroup == 1)
    def _():
        produce()

    @pl.when(warpgroup == 0)
    def _():
        consume()


def _filled(value: float, shape: tuple[int, ...], layout: plgpu.Layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _over_keys(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A warp's value for each query, [4, 8], over its keys or over the head dim."""
    return lax.broadcast_in_dim(value, shape, (0, 2))


def _over_rows(value: jax.Array, rows: int) -> jax.Array:
    return lax.broadcast_in_dim(value, (rows, QUERIES), (1,))


def _over_warps(top, total, out, tops, totals, outputs):
    """A part's maximum [8], sum [8] and output [H, 8] from those of its four warps."""
    read = functools.partial(plgpu.load, optimized=False)
    tops[...] = top
    meet()
    each = [read(tops.at[warp], layout=FRAGMENT.reduce((0, 1))) for warp in range(4)]
    highest = functools.reduce(jnp.maximum, each)
    shrink = jnp.exp2(top - lax.broadcast_in_dim(highest, top.shape, (1,)))
    totals[...] = total * shrink
    outputs[...] = out * _over_keys(shrink, out.shape)
    meet()
    each = [read(tops.at[warp], layout=MERGED.reduce(0)) for warp in range(4)]
    total = sum(read(totals.at[warp], layout=MERGED.reduce(0)) for warp in range(4))
    out = sum(read(outputs.at[warp], layout=MERGED) for warp in range(4))
    meet()  # the next part may write
    return functools.reduce(jnp.maximum, each), total, out


def _merged(so_far, more):
    """Maximum, sum and output over two sets of keys. With an empty set, exactly those over the other."""
    (top, total, out), (its_top, its_total, its_out) = so_far, more
    higher = jnp.maximum(top, its_top)
    keep, take = jnp.exp2(top - higher), jnp.exp2(its_top - higher)
    out = out * _over_rows(keep, out.shape[0]) + its_out * _over_rows(take, out.shape[0])
    return higher, total * keep + its_total * take, out
