"""The NVFP4 matrix product for Hopper in Pallas Mosaic GPU: one kernel for decode, prefill, training forward and
backward dx.

    forward    y[m, n]  = multiplier[n] · Σ_k x[m, k]  · w[n, k]  (+ bias[n])  (+ scale · Σ_r t[m, r] · b[r, n])
    transposed dx[m, k] = multiplier    · Σ_n dy[m, n] · w[n, k]               (one multiplier for all rows)

How a tile of the result is made. The tensor cores multiply A (64 features × 16) from registers with B (16 × tokens)
from shared memory; the weight is A, so that few tokens waste little of the machine. A block (CTA) has `rows × slices`
consumer warpgroups and one producer warpgroup. Consumer (r, q) owns 64 output features of the tile's `64 · rows` and
every `slices`-th part of the contraction. The producer streams words, scales and activations into a ring of `stages`
slots by TMA; consumers turn words into bf16 registers (see `packing`), multiply, and free the slot.

How tiles are shared out. The grid is as large as the machine and each cluster of blocks walks over its tiles. Laid end
to end, the steps of a cluster's tiles are cut into `cluster` equal runs, one for each block, so that all blocks finish
together even where the tiles do not divide evenly; a run may begin or end within a tile. The block that has a tile's
first step owns it: those that continue the tile send it their sums through distributed shared memory, and it adds them
in a fixed order, scales and stores. So the result is deterministic.

What TMA does at the borders: loads past the end of an array are zero-filled, stores past it are dropped. Hence no
padding of x or y for up to 8 tokens or a multiple of 8; other numbers of tokens, and features that are no multiple of
64 (which no projection of a model has), are padded around the kernel.

Barriers, and why none can hang. Every wait is answered by arrivals that do not themselves wait for the waiter:
- `full[slot]` completes once for every pass of the ring: the producer's 2 + slices copies arrive on it. `empty[slot]`
  completes once a pass: every consumer arrives after its last read (after the wait for `wgmma`, or a fence, see
  `order_reads`). Producer and consumers of a block make the same passes in the same order, and the producer waits on
  `empty` only from the second round on.
- With `ahead` a consumer waits for `full` of one pass while it still holds the slot of the pass before, and no other
  (the pass before that it has freed). There are two slots or more, so the producer fills the one waited for without
  needing the one held.
- `sums[r]` completes once for every segment (a tile or a part of one): the slices - 1 consumers that share feature
  rows arrive with their sums. They reuse their place only after `taken[r]`, on which the reader arrives for every
  segment but the last.
- `remote[r, d]` completes at most once in a kernel: a run can end within at most one tile, so a block owns at most one
  tile that others continue, and each of those sends once, when it has done its first segment. Owner and senders
  count the same `Cuts`, where blocks without work have no place, so that the owner waits exactly for those who send;
  senders wait for nobody. An owner cannot leave before its senders' data has come.
- With adapters, an owned tile has one more use of the ring, which all consumers wait for and free. B has one place:
  the producer refills it after `expanded`, on which each of the `rows` readers arrives for every owned tile but the
  last.
- `summed` completes at most once in a kernel, where `x A` is given in parts and the block owns a tile: warps 1 to 3 of
  the producer arrive when their sums are in shared memory (`parts`), and wait for nobody. Consumers wait for it once,
  before they store the first tile that the block owns. In such a kernel warp 0 makes the passes alone and arrives for
  its whole warpgroup. Else all four warps arrive on `full`, which would wait for the sums, and wait on `empty`, of
  which a warp that comes late could miss a phase and wait for one that never ends. `setmaxnreg` needs the whole
  warpgroup and stands before the warps part; behind it the producer meets at no barrier of a warpgroup, and none of its
  warps is needed once its own work is done.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.dispatch import MULTIPROCESSORS, SMEM_BYTES
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul.cuts import Cuts, Plan
from qerl_kernels.nvfp4_matmul.fragments import (
    SCALES,
    WORDS,
    dequantize,
    load_transposed,
    order_reads,
    store_transposed,
    swizzled,
    warp_multiply,
)
from qerl_kernels.nvfp4_matmul.lora_input import describe, is_lora_x
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.parts import add_up
from qerl_kernels.nvfp4_matmul.tile import Tile, can_fuse, clusters_at_once, register_split


# A jit of its own, although the callers are jitted: a program then lowers and compiles each shape once, not once for
# every layer (0.27 s + 0.3 s a call otherwise: minutes for the hundreds of products of a training step).
@functools.partial(jax.jit, static_argnames=("tile", "transposed", "scale", "sms"))
def matmul(
    x: jax.Array,
    weight: PackedNvfp4,
    tile: Tile,
    *,
    transposed: bool = False,
    bias: jax.Array | None = None,
    shrunk: jax.Array | None = None,
    expand: Sequence[jax.Array] = (),
    scale: float = 1.0,
    sms: int = MULTIPROCESSORS,
) -> jax.Array:
    """The equation of the module's docstring: x bf16 [m, k] -> bf16 [m, n] (transposed: [m, n] -> [m, k]).

    Args:
      x: activations.
      weight: the packed weight.
      tile: how to cut the work.
      transposed: multiply with W and not with Wᵀ.
      bias: [n], any float dtype.
      shrunk: `x A` of the adapters side by side, bf16 [m, 64 · adapters], each padded to a rank of 64 with zeros; one
        adapter alone may keep its rank. Or, of one adapter and for up to `tile.tokens` tokens, sums of which it is the
        sum, f32 [parts, m, rank].
      expand: B of each adapter, bf16 [rank, features]; together they cover the n features in order.
      scale: of the adapters.
      sms: multiprocessors of the GPU.

    Raises:
      ValueError: the tile fits neither the GPU nor these shapes, or `x A` has another shape or dtype than stated.
    """
    n, k = weight.shape
    features, contraction = (k, n) if transposed else (n, k)
    tokens = x.shape[0]
    if x.shape != (tokens, contraction):
        raise ValueError(f"matmul: x is {x.shape}, the weight {n} x {k}, transposed={transposed}")
    if transposed and (bias is not None or expand):
        raise ValueError("matmul: the product with W has neither bias nor adapters")
    in_parts = bool(expand) and shrunk is not None and shrunk.ndim == 3
    smem = tile.smem_bytes(bool(expand), in_parts)
    if smem > SMEM_BYTES:
        raise ValueError(f"matmul: {tile} needs {smem} bytes of shared memory, a block has {SMEM_BYTES}")
    if tile.ahead and (tile.stages < 2 or tile.warp_mma):  # one slot: its consumer would wait for itself
        raise ValueError(f"matmul: {tile} works ahead, which takes wgmma and two slots")
    if expand and not can_fuse(tile, n, [b.shape for b in expand]):
        raise ValueError(f"matmul: adapters of shapes {[b.shape for b in expand]} do not fit {tile} and {n} features")
    ranks = [b.shape[0] for b in expand]
    if not is_lora_x(shrunk, tokens, ranks) or (in_parts and (len(ranks) > 1 or tokens > tile.tokens)):
        raise ValueError(f"matmul: x A is {describe(shrunk)}; {tokens} tokens, adapters of ranks {ranks}, {tile}")
    more_tokens = -tokens % 8 if tokens > 8 else 0
    x = jnp.pad(x, ((0, more_tokens), (0, -contraction % TILE)))
    if expand and not in_parts:
        shrunk = jnp.pad(shrunk, ((0, more_tokens), (0, 0)))
    if bias is not None:
        bias = jnp.pad(bias, (0, weight.multiplier.shape[0] - n))
    padded_features = -(-features // TILE) * TILE
    out = _call(x, weight, bias, shrunk, tuple(expand), scale, tile, transposed, padded_features, sms)
    return out[:tokens, :features]


def _call(x, weight, bias, shrunk, expand, scale, tile, transposed, features, sms):
    tokens, contraction = x.shape
    token_tiles = -(-tokens // tile.tokens)
    feature_tiles = -(-features // (TILE * tile.rows))
    units = tile.slices * tile.depth
    tiles = token_tiles * feature_tiles
    in_parts = bool(expand) and shrunk.ndim == 3
    options = _Options(transposed, bias is not None, tuple(b.shape[1] for b in expand), scale, in_parts)
    plan = Plan(
        token_tiles=token_tiles,
        feature_tiles=feature_tiles,
        steps=-(-contraction // (TILE * units * tile.turn)) * tile.turn,
        groups=min(tiles, clusters_at_once(tile, sms)),
    )
    words = weight.words.reshape(*weight.words.shape[:2], 16, 32) if transposed else weight.words  # the same bytes
    weight_block = (units, tile.rows) if transposed else (tile.rows, units)
    sums = (TILE, tile.tokens)
    scratch = {
        "words_s": plgpu.SMEM(
            (tile.stages, *weight_block, *words.shape[2:]), jnp.uint32, transforms=swizzled(32, 4) if transposed else ()
        ),
        "scales_s": plgpu.SMEM((tile.stages, *weight_block, 64), jnp.uint32),
        "x_s": plgpu.SMEM(
            (tile.stages, tile.slices, tile.tokens, tile.depth * TILE), jnp.bfloat16, transforms=swizzled(TILE, 2)
        ),
        "out_s": plgpu.SMEM((tile.rows, tile.tokens, TILE), jnp.bfloat16, transforms=swizzled(TILE, 2)),
        "full": plgpu.Barrier(num_arrivals=options.arrivals(tile), num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=tile.consumers, num_barriers=tile.stages),
    }
    if tile.slices > 1:
        scratch |= {
            "local_s": plgpu.SMEM(
                (tile.rows, tile.slices - 1, *sums), jnp.float32, transforms=swizzled(tile.tokens, 4)
            ),
            "sums": plgpu.Barrier(num_arrivals=tile.slices - 1, num_barriers=tile.rows),
            "taken": plgpu.Barrier(num_barriers=tile.rows),
        }
    if tile.cluster > 1:
        scratch |= {
            "remote_s": plgpu.SMEM(
                (tile.rows, tile.cluster - 1, *sums), jnp.float32, transforms=swizzled(tile.tokens, 4)
            ),
            "remote": plgpu.Barrier(num_barriers=tile.rows * (tile.cluster - 1)),
        }
    if expand:
        scratch |= {
            "expand_s": plgpu.SMEM((tile.rows, TILE, TILE), jnp.bfloat16, transforms=swizzled(TILE, 2)),
            "expanded": plgpu.Barrier(num_arrivals=tile.rows),
        }
    if options.in_parts:
        scratch |= {
            "shrunk_s": plgpu.SMEM((tile.tokens, TILE), jnp.bfloat16, transforms=swizzled(TILE, 2)),
            "summed": plgpu.Barrier(num_arrivals=3),
        }
    call = plgpu.kernel(
        functools.partial(_body, tile=tile, plan=plan, options=options),
        out_type=jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        grid=(plan.groups,),
        grid_names=("group",),
        cluster=(tile.cluster,),
        cluster_names=("part",),
        num_threads=tile.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=f"nvfp4_{'dx' if transposed else 'matmul'}_m{tile.tokens}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    extra = (() if bias is None else (bias,)) + (((shrunk, *expand)) if expand else ())
    return call(x, words, weight.scales, weight.multiplier, *extra)


@dataclasses.dataclass(frozen=True)
class _Options:
    """Which terms the product has; `expand`: the features of each adapter; `in_parts`: how its `x A` comes."""

    transposed: bool
    has_bias: bool
    expand: tuple[int, ...]
    scale: float
    in_parts: bool

    def copies(self, tile: Tile) -> int:
        """An adapter's: B of each row of consumers, and `x A` where it comes whole."""
        return (tile.rows + (not self.in_parts)) if self.expand else 0

    def arrivals(self, tile: Tile) -> int:
        """Those that complete `full`: a pass has 2 + slices copies, an adapter `copies`; the one with fewer arrives the
        rest by hand."""
        return max(2 + tile.slices, self.copies(tile))


def _body(
    x_g, words_g, scales_g, multiplier_g, *rest, words_s, scales_s, x_s, out_s, full, empty, local_s=None, sums=None,
    taken=None, remote_s=None, remote=None, expand_s=None, expanded=None, shrunk_s=None, summed=None, tile, plan,
    options,
):  # fmt: skip
    *rest, out_g = rest
    bias_g = rest[:1] if options.has_bias else []
    shrunk_g, *expand_g = rest[len(bias_g) :] or (None,)
    transposed = options.transposed
    warpgroup = lax.axis_index("warpgroup")
    group = lax.axis_index("group")
    part = lax.axis_index("part")
    units = tile.slices * tile.depth
    registers = register_split(tile, options.in_parts)
    cuts = Cuts(plan.tiles_of(group) * plan.steps, plan.steps, tile.cluster, tile.turn)
    cut = cuts.begin

    # A segment is what this block does of one tile: passes low : high of tile i. It owns the tile if it has the first.
    begin, end = cut(part), cut(part + 1)
    first_tile = lax.div(begin, plan.steps)
    segments = jnp.where(end > begin, lax.div(end - 1, plan.steps) - first_tile + 1, 0)
    starts_within = (begin > first_tile * plan.steps).astype(jnp.int32)  # then segment 0 is of another's tile

    def segment(s):
        i = first_tile + s
        return i, jnp.maximum(begin, i * plan.steps), jnp.minimum(end, (i + 1) * plan.steps)

    def owned_before(s):
        return jnp.maximum(s - starts_within, 0)

    def ring(s, at):
        """Which use of the ring pass `at` of segment s is; with adapters every owned tile has one use more, at its
        end."""
        return at - begin + (owned_before(s) if expand_g else 0)

    def produce():
        if registers:
            plgpu.set_max_registers(registers[0], action="decrease")
        if options.in_parts:
            plgpu.warp_map(produce_and_sum)
        else:
            copy_all()

    def produce_and_sum(warp):
        """Warp 0 copies, the others add up `x A` where this block owns a tile."""

        @pl.when(warp == 0)
        def _():
            copy_all()

        @pl.when((warp > 0) & (owned_before(segments) > 0))
        def _():
            add_up(shrunk_g, shrunk_s, registers[0] if registers else None)
            plgpu.barrier_arrive(summed)

    def copy_all():
        def free_slot(use):
            slot = lax.rem(use, tile.stages)

            @pl.when(use >= tile.stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            return slot

        def one_segment(s, carry):
            i, low, high = segment(s)
            m, f = plan.origin(group, i)
            tokens = pl.ds(m * tile.tokens, tile.tokens)

            def one_pass(at, carry):
                unit = (at - i * plan.steps) * units
                slot = free_slot(ring(s, at))
                along_k, along_f = pl.ds(unit, units), pl.ds(f * tile.rows, tile.rows)
                where = (along_k, along_f) if transposed else (along_f, along_k)
                plgpu.copy_gmem_to_smem(words_g.at[where], words_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(scales_g.at[where], scales_s.at[slot], full.at[slot])
                for q in range(tile.slices):
                    columns = pl.ds((unit + q * tile.depth) * TILE, tile.depth * TILE)
                    plgpu.copy_gmem_to_smem(x_g.at[tokens, columns], x_s.at[slot, q], full.at[slot])
                for _ in range(options.arrivals(tile) - 2 - tile.slices):
                    plgpu.barrier_arrive(full.at[slot])
                return carry

            lax.fori_loop(low, high, one_pass, None)
            if expand_g:

                @pl.when(low == i * plan.steps)
                def _():
                    load_adapter(s, high, tokens, f)

            return carry

        def load_adapter(s, high, tokens, f):
            """One more use of the ring: x A, if it comes whole, into the place of x, and B beside it (zero-filled past
            its rank)."""

            @pl.when(owned_before(s) > 0)
            def _():
                plgpu.barrier_wait(expanded)

            slot = free_slot(ring(s, high))
            offset = 0
            for number, (features, b_g) in enumerate(zip(options.expand, expand_g, strict=True)):
                first = f * tile.rows * TILE

                @pl.when((first >= offset) & (first < offset + features))
                def _(number=number, b_g=b_g, offset=offset, first=first):
                    if not options.in_parts:
                        columns = pl.ds(number * TILE + 0 * slot, tile.depth * TILE)  # a traced start may pass the end
                        plgpu.copy_gmem_to_smem(shrunk_g.at[tokens, columns], x_s.at[slot, 0], full.at[slot])
                    for r in range(tile.rows):
                        where = pl.ds(0 * slot, TILE), pl.ds(first - offset + r * TILE, TILE)
                        plgpu.copy_gmem_to_smem(b_g.at[where], expand_s.at[r], full.at[slot])

                offset += features
            for _ in range(options.arrivals(tile) - options.copies(tile)):
                plgpu.barrier_arrive(full.at[slot])

        lax.fori_loop(0, segments, one_segment, None)

    def consume():
        if registers:
            plgpu.set_max_registers(registers[1], action="increase")
        q, r = lax.div(warpgroup, tile.rows), lax.rem(warpgroup, tile.rows)

        def load(slot, d):
            unit = q * tile.depth + d
            if transposed:
                return load_transposed(words_s.at[slot, unit, r], scales_s.at[slot, unit, r])
            words = plgpu.load(words_s.at[slot, r, unit], layout=WORDS, optimized=False)
            scales = plgpu.load(scales_s.at[slot, r, unit], layout=SCALES, optimized=False)
            return words, scales

        def weights(slot, d):
            return dequantize(*load(slot, d), transposed)

        def tokens_of(slot, d):
            return x_s.at[slot, q, :, pl.ds(d * TILE, TILE)].T

        def filled(s, at):
            """The slot of pass `at`, once its data is there; to be asked once for each pass."""
            slot = lax.rem(ring(s, at), tile.stages)
            plgpu.barrier_wait(full.at[slot])
            return slot

        def over_passes(s, init, one_slot):
            _, low, high = segment(s)

            def one_pass(at, carry):
                slot = filled(s, at)
                carry = one_slot(slot, carry)
                if tile.warp_mma:
                    order_reads()
                plgpu.barrier_arrive(empty.at[slot])
                return carry

            return lax.fori_loop(low, high, one_pass, init)

        def multiply(s):
            """Sum of this consumer over its segment, [64, tokens] fp32."""

            def by_warpgroup(acc):
                def one_slot(slot, carry):
                    for d in range(tile.depth):
                        plgpu.wgmma(acc, weights(slot, d), tokens_of(slot, d))
                    plgpu.wgmma_wait(0)
                    return carry

                over_passes(s, None, one_slot)
                return acc[...]

            def by_warpgroup_ahead(acc):
                """Two operands take turns: one is made while the tensor cores read the other."""
                _, low, high = segment(s)

                def unit(at, d, slot, before, a, last=False):
                    """Multiplies with `a`, the operand of unit d in `slot` (pass `at`), and makes the next one."""
                    ends = d == tile.depth - 1

                    def following():
                        after = filled(s, at + 1) if ends else slot
                        return after, load(after, 0 if ends else d + 1)

                    if tile.ahead == 1 and not last:
                        after, packed = following()
                    plgpu.wgmma(acc, a, tokens_of(slot, d))
                    if tile.ahead == 2:
                        plgpu.wgmma_wait(0 if last else 1)  # the unit before is done
                        if d == 0:

                            @pl.when(before >= 0)
                            def _():
                                plgpu.barrier_arrive(empty.at[before])

                        if not last:
                            after, packed = following()
                    if not last:
                        a = dequantize(*packed, transposed)
                    if tile.ahead == 1:
                        plgpu.wgmma_wait(0)
                    if (tile.ahead == 1 and ends) or last:
                        plgpu.barrier_arrive(empty.at[slot])
                    return (slot, before, a) if last else (after, slot if ends else before, a)

                def turn(t, carry, last=False):
                    for p, d in itertools.product(range(tile.turn), range(tile.depth)):
                        final = last and (p, d) == (tile.turn - 1, tile.depth - 1)
                        carry = unit(t * tile.turn + p, d, *carry, last=final)
                    return carry

                slot = filled(s, low)
                carry = slot, jnp.int32(-1), weights(slot, 0)
                end = lax.div(high, tile.turn) - 1
                carry = lax.fori_loop(lax.div(low, tile.turn), end, turn, carry)
                turn(end, carry, last=True)
                return acc[...]

            def by_warp(slot, total):
                for d in range(tile.depth):
                    total = warp_multiply(total, weights(slot, d), x_s.at[slot, q], d, tile.depth)
                return total

            if tile.warp_mma:
                zero = plgpu.layout_cast(jnp.zeros((TILE, tile.tokens), jnp.float32), plgpu.Layout.WGMMA)
                return over_passes(s, zero, by_warp)
            by_wgmma = by_warpgroup_ahead if tile.ahead else by_warpgroup
            return pl.run_scoped(by_wgmma, plgpu.ACC((TILE, tile.tokens), jnp.float32))

        def row_terms(i):
            """Multiplier and bias of this consumer's rows in the cluster's i-th tile; read before the sum, which hides
            their latency."""
            _, f = plan.origin(group, i)
            # A tile's last rows may lie past the weight; what is stored there is dropped, but the reads must stay
            # inside.
            first = jnp.minimum((f * tile.rows + r) * TILE, multiplier_g.shape[0] - TILE)
            rows = pl.ds(0 if transposed else first, TILE)
            refs = (multiplier_g, *bias_g)
            return [plgpu.load(ref.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) for ref in refs]

        def add_adapter(total, slot):
            """total + scale · (x A) B, accumulated upon the sum."""

            def multiply(acc):
                x_a = shrunk_s if options.in_parts else x_s.at[slot, 0, :, pl.ds(0, TILE)]
                plgpu.wgmma(acc, expand_s.at[r].T, x_a.T)
                plgpu.wgmma_wait(0)

            # the sum enters and leaves divided by the scale: one fp32 rounding
            if options.scale == 1.0:
                return pl.run_state(multiply)(plgpu.ACC.init(total))
            return pl.run_state(multiply)(plgpu.ACC.init(total * (1.0 / options.scale))) * options.scale

        def store(total, s, terms):
            """total · multiplier (+ bias) (+ adapter) as bf16 to its place in y."""
            i, _, high = segment(s)
            m, f = plan.origin(group, i)
            total = total * lax.broadcast_in_dim(terms[0], total.shape, (0,))
            if options.has_bias:
                total = total + lax.broadcast_in_dim(terms[1].astype(jnp.float32), total.shape, (0,))
            if expand_g:
                slot = lax.rem(ring(s, high), tile.stages)
                plgpu.barrier_wait(full.at[slot])
                if options.in_parts:

                    @pl.when(owned_before(s) == 0)
                    def _():
                        plgpu.barrier_wait(summed)

                total = add_adapter(total, slot)
                plgpu.barrier_arrive(empty.at[slot])

                @pl.when(s < segments - 1)
                def _():
                    plgpu.barrier_arrive(expanded)

            y = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store of the tile before has left the buffer
            if transposed:
                store_transposed(out_s.at[r], y)
            else:
                out_s.at[r].T[...] = y
            plgpu.commit_smem()
            first = (f * tile.rows + r) * TILE

            # TMA would drop a store past the end by itself, but not where y is one tile wide: Mosaic leaves an axis of
            # size one and its index out of the copy, and the store would land on the tile before.
            @pl.when(first < out_g.shape[1])
            def _():
                where = pl.ds(m * tile.tokens, tile.tokens), pl.ds(first, TILE)
                plgpu.copy_smem_to_gmem(out_s.at[r], out_g.at[where])

        def added(total, ref):
            return total + plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

        def finish(total, s, terms):
            """The sum over this block's slices is complete: send it to the tile's owner, or own the tile."""
            i, _, _ = segment(s)
            if tile.cluster == 1:
                store(total, s, terms)
                return
            owner = cuts.owner(i)

            @pl.when(owner != part)
            def _():
                place = cuts.senders_before(i, part)
                plgpu.async_store_smem(
                    total, remote_s.at[r, place], remote.at[r * (tile.cluster - 1) + place],
                    cluster_idx=owner, cluster_dim="part", optimized=False,
                )  # fmt: skip

            @pl.when(owner == part)
            def _():
                def add_one(place, total):
                    plgpu.barrier_wait(remote.at[r * (tile.cluster - 1) + place])
                    return added(total, remote_s.at[r, place])

                store(lax.fori_loop(0, cuts.senders_before(i, tile.cluster), add_one, total), s, terms)

        def one_segment(s, carry):
            i, low, high = segment(s)
            terms = row_terms(i)
            total = multiply(s)
            if tile.slices == 1:
                finish(total, s, terms)
                return carry

            @pl.when(q > 0)
            def _():
                @pl.when(s > 0)
                def _():
                    plgpu.barrier_wait(taken.at[r])

                local_s.at[r, q - 1][...] = total
                plgpu.barrier_arrive(sums.at[r])
                if expand_g:

                    @pl.when(low == i * plan.steps)
                    def _():  # the adapter's slot is freed by all consumers
                        slot = lax.rem(ring(s, high), tile.stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.barrier_arrive(empty.at[slot])

            @pl.when(q == 0)
            def _():
                plgpu.barrier_wait(sums.at[r])
                whole = total
                for place in range(tile.slices - 1):
                    whole = added(whole, local_s.at[r, place])

                @pl.when(s < segments - 1)
                def _():
                    plgpu.barrier_arrive(taken.at[r])

                finish(whole, s, terms)

            return carry

        lax.fori_loop(0, segments, one_segment, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == tile.consumers)
    def _():
        produce()

    @pl.when(warpgroup < tile.consumers)
    def _():
        consume()
