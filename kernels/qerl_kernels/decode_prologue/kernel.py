"""The fused kernels for Hopper: residual add + RMSNorm, or SiLU · up, or nothing, and then `x A` of all adapters.

    norm    s = x + delta;  r = sqrt(mean(s²) + eps);  y = w ⊙ s / r;  t = (w ⊙ s) A / r
    silu    y = silu(gate) · up;                                       t = y A
    plain   y = x;                                                     t = y A

How the work is cut. With few tokens everything here is latency, so that a kernel should wait for memory once: every
load is issued at the start, straight into the registers where the tensor cores want it, and nothing is staged in shared
memory. A cluster of `blocks` blocks takes `8 · groups` tokens and shares out the K features in chunks of 32, one warp a
chunk (`steps` chunks where there are more than warps). With very few tokens several clusters take the same tokens and
share out the columns of A (`shares`); each makes all of y for itself and stores a part of it. Or, where each token's y
needs nothing of the others' features and the product that follows adds up (`parts`), they share out the features: each
reads its part of x and of A and leaves its sums in fp32. What the features have in common crosses the blocks through
distributed shared memory: the sums of squares (every block gets all of them), and the sums of x A (each block gets and
adds up its share of them). A norm's two exchanges do not wait for each other: what is multiplied with A is w ⊙ s,
rounded to bf16 as y is, and r divides the sums.

Registers. Thread (g, c) = (lane / 4, lane % 4) of a warp holds eight features of its chunk of token g: 8 c ... 8 c + 7,
which in bf16 are 16 bytes; of a norm, whose x and s are fp32, 4 c + 16 h + (0, 1, 2, 3) for h = 0 and 1, so that what
four threads read or write at a time is whole sectors of 32 bytes. `mma.sync.m16n8k16` multiplies
Aᵀ [16 columns × 16 features] with yᵀ [16 features × 8 tokens]. Which features and columns a step takes together is ours
to choose. The features of step h are each thread's first or second four: then y is its operand as it lies. The columns
of row g are neighbours (`_run`, e.g. 4 g ... 4 g + 3 of each 32): then threads read whole sectors of A, and one byte
permutation of two features' words is an operand.

Determinism. Every sum has one order, which depends on K, the number of blocks and that of warps alone. So a token's
bits depend neither on the other tokens nor on how many there are (of sums in parts: on how many there are).

Barriers. What is sent to a block counts on a barrier of its own, `arrived`: one for the squares, one for the products,
each used once. A block waits for all that is sent to it and for nothing else, and all blocks send all they have before
they wait: none can hang, and none can leave before what is sent to it has come. (A barrier of the whole cluster would
also wait until every store to global memory is visible, which takes longer than the exchange.) Every thread sends and
waits, whatever its chunk or token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.decode_prologue.config import CLUSTERS_AT_ONCE, K_TILE, TOKEN_TILE, PrologueConfig, PrologueSpec
from qerl_kernels.lanes import add, both, div, less, mul, rem
from qerl_kernels.launch import launch
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK

LITTLE = 48  # columns of A of a cluster (tools/results/notes/decode-prologue.md)


def _run(columns: int) -> int:
    """Neighbouring columns that a thread reads at a time: its e-th is 8 · run · (e // run) + run · g + e % run."""
    return next(run for run in (8, 4, 2, 1) if columns // 8 % run == 0)


def outputs(spec: PrologueSpec, config: PrologueConfig) -> list[jax.ShapeDtypeStruct]:
    """Shapes of what `fused_prologue` returns."""
    tokens, features, columns = spec.tokens, spec.features, spec.columns
    out = [jax.ShapeDtypeStruct((tokens, features), jnp.float32)] if spec.residual else []
    if spec.kind != "plain":
        out.append(jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16))
    if columns and spec.partials:
        out.append(jax.ShapeDtypeStruct((config.k_splits, tokens, columns), jnp.float32))
    elif columns:
        out.append(jax.ShapeDtypeStruct((tokens, MAX_RANK * len(spec.ranks)), jnp.bfloat16))
    return out


def shared_bytes(spec: PrologueSpec, config: PrologueConfig) -> dict[str, int]:
    """Bytes of each array of a block's shared memory."""
    tokens, columns = TOKEN_TILE * config.token_tiles, spec.columns // config.column_splits
    sizes = {"arrived_s": 16}  # two barriers
    if spec.kind == "norm":
        sizes |= {"squares_s": 4 * config.warps * tokens, "all_squares_s": 4 * tokens * config.cluster}
    if columns:
        sizes |= {"products_s": 4 * config.warps * tokens * columns, "share_s": 4 * tokens * columns}
    return sizes


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames=("spec", "config"))
def fused_prologue(
    spec: PrologueSpec, config: PrologueConfig, inputs: Sequence[jax.Array], a: jax.Array | None
) -> tuple[jax.Array, ...]:
    """The equations of the module's docstring.

    Args:
      inputs: norm: x f32 [M, K], (delta bf16 [M, K],) w f32 [K]. silu: gate and up, bf16 [M, 2 K]. plain: x bf16.
      a: bf16 [K, C]; None without adapters.

    Returns:
      norm: (s f32 if `spec.residual`,) y; silu: y; then, with adapters, t [M, MAX_RANK · adapters]; bf16 all but s.
      With `spec.partials` t is f32 [config.k_splits, M, C].
    """
    return launch(
        lambda *given: _Program(spec, config, *given).emit(),
        [*inputs, *([] if a is None else [a])],
        tuple(outputs(spec, config)),
        name=f"decode_prologue_{spec.kind}" + ("_lora" if spec.columns else ""),
        clusters=config.clusters(spec.tokens),
        blocks=config.cluster,
        warps=config.warps,
        shared_bytes=shared_bytes(spec, config),
    )


class _Program:
    """Emits the instructions of one thread."""

    def __init__(
        self,
        spec: PrologueSpec,
        config: PrologueConfig,
        place: tuple[ir.Value, ...],
        pointers: list[ir.Value],
        shared: dict[str, ir.Value],
    ):
        """`place`: the cluster, the block in it, the thread in that. `pointers`: of the inputs, A and the outputs."""
        self.spec, self.config, self.shared = spec, config, shared
        group, self.part, self.thread = place
        self.a = self.t = self.delta = self.weight = self.sum = self.y = None
        self.x = pointers.pop(0)
        if spec.residual:
            self.delta = pointers.pop(0)
        if spec.kind == "norm":
            self.weight = pointers.pop(0)
        if spec.columns:
            self.a, self.t = pointers.pop(0), pointers.pop()
        if spec.residual:
            self.sum = pointers.pop(0)
        if spec.kind != "plain":
            self.y = pointers.pop(0)
        assert not pointers
        self.arrived = [add(self.shared["arrived_s"], 8 * i) for i in range(2)]
        self.threads = config.warps * 32
        lane = rem(self.thread, 32)
        self.warp, self.g, self.c = div(self.thread, 32), div(lane, 4), rem(lane, 4)
        # Features from a thread's first to the next thread's, and from its first to its fifth: see "Registers".
        self.beside, self.apart = (4, 16) if spec.kind == "norm" else (8, 4)
        self.chunks = spec.features // K_TILE
        self.chunks_of_block = -(-self.chunks // (config.cluster * config.k_splits))
        self.steps = -(-self.chunks_of_block // config.warps)
        self.columns = spec.columns // config.column_splits  # of this cluster, from `share · columns` on
        self.share, self.of_features = (
            rem(group, config.column_splits),
            rem(group, config.k_splits),
        )  # one of the two is 0
        self.first_token = mul(div(group, config.column_splits * config.k_splits), TOKEN_TILE * config.token_tiles)
        tokens = [add(add(self.first_token, TOKEN_TILE * i), self.g) for i in range(config.token_tiles)]
        self.token_ok = [less(token, spec.tokens) for token in tokens]
        self.tokens = [lanes.smaller(token, spec.tokens - 1) for token in tokens]

    def emit(self) -> None:
        norm = self.spec.kind == "norm"
        octets = TOKEN_TILE * self.config.token_tiles
        squares, products = self.arrived
        barriers = [(squares, 4 * octets * self.config.cluster)] if norm else []
        barriers += [(products, 4 * octets * self.columns)] if self.columns else []
        lanes.begin_exchange(barriers, self.thread)
        rows = [self._rows(s) for s in range(self.steps)] if norm else []
        fetched_a = [self._fetch_a(s) for s in range(self.config.prefetch)]
        # Last, because arithmetic begins with these; but a norm's weights are read twice.
        fetched = [self._fetch(s) for s in range(self.steps if norm else self.config.prefetch)]
        if self.columns and not self.spec.partials:
            self._zero_padding()
        lanes.all_began()
        # A norm adds up its squares before A has come, where that is little. (What is read before a branch and used
        # behind it is waited for all together; without the branch the assembler waits for x before it asks for much.)
        # And where clusters share multiprocessors, registers are worth more than early loads.
        little = norm and (self.config.token_tiles == 1 or self.columns <= LITTLE)
        crowded = self.config.clusters(self.spec.tokens) > CLUSTERS_AT_ONCE
        with contextlib.nullcontext() if little or crowded else self._later():
            self._compute(rows, fetched, fetched_a)

    def _compute(self, rows: list, fetched: list, fetched_a: list) -> None:
        """All that comes after the first loads."""
        norm = self.spec.kind == "norm"
        if norm:
            rows = [self._added(loaded) for loaded in rows]
            if self.sum is not None:
                for s, row in enumerate(rows):
                    self._store(self.sum, s, row, 4)
            self._send_squares(rows)
            if self.columns:
                with self._later():
                    self._products(rows, fetched, fetched_a)
        else:
            self._products(rows, fetched, fetched_a)
        if self.columns:
            self._send_products()
        if norm:
            lanes.wait_for(self.arrived[0])
            inverse = [self._inverse_rms(i, self.g) for i in range(self.config.token_tiles)]
            for s, (row, weights) in enumerate(zip(rows, fetched, strict=True)):
                self._store(self.y, s, self._weighted(row, weights, inverse), 2)
        if self.columns:
            self._finish()

    def _later(self) -> contextlib.AbstractContextManager[None]:
        """For every thread; but the assembler does not know that, so that what is emitted within stays behind what
        stands before. Else it takes words of A apart, and so waits for them, before the squares are sent; or it works
        on the first words of x before it asks for the last, and saves a register."""
        return lanes.only(less(lanes.block_of_cluster(), self.config.cluster))

    def _products(self, rows: list, fetched: list, fetched_a: list) -> None:
        """y of all steps (a norm's without its 1 / rms), stored but for a norm's; its products with A, left in shared
        memory."""
        kind, ahead, zero = self.spec.kind, self.config.prefetch, lanes.fconst(0.0)
        tiles = -(-self.columns // 16)
        sums = [[[zero] * 4 for _ in range(tiles)] for _ in range(self.config.token_tiles)]
        for s in range(self.steps):
            y = words = fetched[s]
            if kind == "norm":
                y = self._weighted(rows[s], words, [None] * self.config.token_tiles)
            elif kind == "silu":
                y = [[lanes.silu_bf16(gate, up) for gate, up in zip(row[:4], row[4:], strict=True)] for row in words]
                self._store(self.y, s, y, 2)
            self._multiply(sums, y, fetched_a[s])
            if s + ahead < self.steps:
                fetched += [] if kind == "norm" else [self._fetch(s + ahead)]
                fetched_a.append(self._fetch_a(s + ahead))
        if self.columns:
            self._leave(sums)

    def _weighted(self, rows: list, weights: list[ir.Value], factors: Sequence[ir.Value | None]) -> list:
        """Each octet's row times its factor (None: 1) and the weights, as words of bf16."""
        return [
            [lanes.weighted_bf16(row[i : i + 2], weights[i : i + 2], factor) for i in range(0, 8, 2)]
            for row, factor in zip(rows, factors, strict=True)
        ]

    # ---- what a thread reads and writes ----

    def _chunk(self, s: int) -> tuple[ir.Value, ir.Value]:
        """(first feature of this thread, whether there is one) in step s."""
        local = add(self.warp, s * self.config.warps)
        block = add(mul(self.of_features, self.config.cluster), self.part)
        chunk = add(mul(block, self.chunks_of_block), local)
        ok = both(less(local, self.chunks_of_block), less(chunk, self.chunks))
        return add(mul(chunk, K_TILE), mul(self.c, self.beside)), ok

    def _places(self, base: ir.Value, s: int, width: int, itemsize: int = 2) -> list[tuple[ir.Value, ir.Value]]:
        """(address, whether it counts) of each octet's token in an array of rows of `width` elements."""
        feature, ok = self._chunk(s)
        return [
            (lanes.address(base, mul(add(mul(token, width), feature), itemsize)), both(ok, token_ok))
            for token, token_ok in zip(self.tokens, self.token_ok, strict=True)
        ]

    def _rows(self, s: int) -> tuple[list, list | None]:
        """Words of x (eight for each octet) and of delta (four)."""
        width = self.spec.features
        x = [self._load(at, 4, ok) for at, ok in self._places(self.x, s, width, 4)]
        if self.delta is None:
            return x, None
        return x, [self._load(at, 2, ok) for at, ok in self._places(self.delta, s, width)]

    def _added(self, loaded: tuple[list, list | None]) -> list[list[ir.Value]]:
        """x + delta."""
        x, delta = loaded
        if delta is None:
            return x
        return [
            [value for i, word in enumerate(words) for value in lanes.add_halves(row[2 * i : 2 * i + 2], word)]
            for row, words in zip(x, delta, strict=True)
        ]

    def _load(self, at: ir.Value, itemsize: int, ok: ir.Value) -> list[ir.Value]:
        """Words of a norm's eight features of this thread; of four, as many as an item has bytes."""
        return [word for half in range(2) for word in lanes.load(at, itemsize, ok, half * self.apart * itemsize)]

    def _store(self, base: ir.Value, s: int, rows: list[list[ir.Value]], itemsize: int) -> None:
        turn = s % self.config.column_splits  # the clusters of the same tokens take turns
        mine = both(less(self.share, turn + 1), less(turn - 1, self.share))
        for (at, ok), row in zip(self._places(base, s, self.spec.features, itemsize), rows, strict=True):
            fours = [row[:itemsize], row[itemsize:]] if self.spec.kind == "norm" else [row]
            for half, words in enumerate(fours):
                lanes.store(at, words, both(ok, mine), half * self.apart * itemsize)

    def _fetch(self, s: int) -> list:
        """Norm: the weights of this thread's features; else: the words of x for each octet."""
        feature, ok = self._chunk(s)
        width = self.spec.features
        if self.spec.kind == "norm":
            return self._load(lanes.address(self.weight, mul(feature, 4)), 4, ok)
        if self.spec.kind == "silu":
            places = self._places(self.x, s, 2 * width)
            return [lanes.load(at, 4, ok) + lanes.load(at, 4, ok, 2 * width) for at, ok in places]
        return [lanes.load(at, 4, ok) for at, ok in self._places(self.x, s, width)]

    def _fetch_a(self, s: int) -> list[list[ir.Value]]:
        """Words of A for each of this thread's features."""
        feature, ok = self._chunk(s)
        return [self._a_row(feature, ok, j) for j in range(8)] if self.columns else []

    def _a_row(self, feature: ir.Value, ok: ir.Value, j: int) -> list[ir.Value]:
        """This thread's eighth of the cluster's columns in A's row of its j-th feature, two a word."""
        stride, run = self.spec.columns, _run(self.columns)
        first = add(mul(self.share, self.columns), mul(self.g, run))
        at = lanes.address(self.a, mul(add(mul(feature, stride), first), 2))
        row = j // 4 * self.apart + j % 4
        starts = [2 * (row * stride + i) for i in range(0, self.columns, 8 * run)]
        if run > 1:
            return [word for start in starts for word in lanes.load(at, run // 2, ok, start)]
        halves = [lanes.load_half(at, ok, start) for start in starts] + [lanes.const(0)]
        return [lanes.pair(low, high, high=False) for low, high in zip(halves[::2], halves[1::2], strict=True)]

    # ---- what it computes ----

    def _send_squares(self, rows: list[list[list[ir.Value]]]) -> None:
        """The sum of this block's squares of each token, to every block."""
        octets, blocks = TOKEN_TILE * self.config.token_tiles, self.config.cluster
        own, everyone = self.shared["squares_s"], self.shared["all_squares_s"]
        first = less(self.c, 1)
        for i in range(self.config.token_tiles):
            square = lanes.fconst(0.0)
            for row in rows:
                for value in row[i]:
                    square = lanes.add_square(square, value)
            square = lanes.over_quad(square)
            at = add(own, mul(add(mul(self.warp, octets), self.g), 4))
            lanes.store_shared(at, [square], first, byte=4 * TOKEN_TILE * i)
        lanes.block_barrier()
        for start in range(0, blocks * octets, self.threads):
            index = add(self.thread, start)
            block, token = div(index, octets), rem(index, octets)
            at = add(own, mul(token, 4))
            whole = lanes.total([lanes.load_shared(at, byte=4 * octets * w)[0] for w in range(self.config.warps)])
            place = add(everyone, mul(add(mul(token, blocks), self.part), 4))
            lanes.send(place, block, [whole], self.arrived[0], less(index, blocks * octets))

    def _inverse_rms(self, octet: int | ir.Value, token: ir.Value) -> ir.Value:
        """1 / rms of an octet's token, from the sums of squares of all blocks."""
        blocks = self.config.cluster
        at = add(self.shared["all_squares_s"], mul(add(mul(octet, TOKEN_TILE), token), 4 * blocks))
        of_blocks = [value for b in range(0, blocks, 4) for value in lanes.load_shared(at, 4, 4 * b)]
        return lanes.inverse_rms(lanes.total(of_blocks), self.spec.features, self.spec.eps)

    def _multiply(self, sums: list[list[list[ir.Value]]], y: list[list[ir.Value]], a: list[list[ir.Value]]) -> None:
        """sums += Aᵀ yᵀ of one chunk. Word `tile` of a row of A holds the columns of rows g and g + 8 of that tile."""
        for half in (0, 4):
            for tile in range(-(-self.columns // 16)):
                r0, r1, r2, r3 = (a[half + j][tile] for j in range(4))
                operand = [
                    lanes.pair(r0, r1, False), lanes.pair(r0, r1, True), lanes.pair(r2, r3, False),
                    lanes.pair(r2, r3, True),
                ]  # fmt: skip
                for octet, row in zip(sums, y, strict=True):
                    octet[tile] = lanes.multiply(octet[tile], operand, row[half // 2 : half // 2 + 2])

    def _leave(self, sums: list[list[list[ir.Value]]]) -> None:
        """This warp's sums in shared memory: (octet, e, g, token)."""
        columns, size = self.columns, TOKEN_TILE * self.config.token_tiles * self.columns
        at = add(self.shared["products_s"], mul(add(mul(self.warp, size), add(mul(self.g, 8), mul(self.c, 2))), 4))
        for i, tiles in enumerate(sums):
            for e in range(columns // 8):
                pair = tiles[e // 2][2 * (e % 2) :][:2]
                lanes.store_shared(at, pair, byte=4 * (i * TOKEN_TILE * columns + e * 64))

    def _send_products(self) -> None:
        """Each block's share of the sums over this block's warps, to it."""
        config, size = self.config, TOKEN_TILE * self.config.token_tiles * self.columns
        share = size // config.cluster
        lanes.block_barrier()
        for start in range(0, size // 4, self.threads):
            index = mul(add(self.thread, start), 4)
            at = add(self.shared["products_s"], mul(lanes.smaller(index, size - 4), 4))
            of_warps = [lanes.load_shared(at, 4, byte=4 * size * w) for w in range(config.warps)]
            whole = [lanes.total(values) for values in zip(*of_warps, strict=True)]
            place = add(self.shared["share_s"], mul(add(mul(self.part, share), rem(index, share)), 4))
            lanes.send(place, div(index, share), whole, self.arrived[1], less(index, size))

    def _finish(self) -> None:
        """This block's share of t: what all blocks sent, added up, and stored."""
        columns, run, config, spec = self.columns, _run(self.columns), self.config, self.spec
        share, jobs = TOKEN_TILE * config.token_tiles * columns // config.cluster, []
        for start in range(0, share, self.threads):
            local = lanes.smaller(add(self.thread, start), share - 1)
            index = add(mul(self.part, share), local)
            octet, within = div(index, TOKEN_TILE * columns), rem(index, TOKEN_TILE * columns)
            e, g, of_octet = div(within, 64), rem(div(within, 8), 8), rem(within, 8)
            column = add(add(mul(div(e, run), 8 * run), mul(g, run)), rem(e, run))
            column = add(mul(self.share, columns), column)
            token = add(add(self.first_token, mul(octet, TOKEN_TILE)), of_octet)
            ok = both(less(add(self.thread, start), share), less(token, spec.tokens))
            if spec.partials:
                place = add(mul(add(mul(self.of_features, spec.tokens), token), spec.columns), column)
                to = lanes.address(self.t, mul(place, 4))
            else:
                place = add(mul(token, MAX_RANK * len(spec.ranks)), self._slot(column))
                to = lanes.address(self.t, mul(place, 2))
            factor = self._inverse_rms(octet, of_octet) if spec.kind == "norm" else None
            jobs.append((add(self.shared["share_s"], mul(local, 4)), factor, to, ok))
        lanes.wait_for(self.arrived[1])
        for at, factor, to, ok in jobs:
            whole = lanes.total([lanes.load_shared(at, byte=4 * share * b)[0] for b in range(config.cluster)])
            if factor is not None:
                whole = lanes.fmul(whole, factor)
            if spec.partials:
                lanes.store(to, [lanes.as_word(whole)], ok)
            else:
                lanes.store_bf16(to, whole, ok)

    def _slot(self, column: ir.Value) -> ir.Value:
        """The column of t of a column of A."""
        end, place = 0, column
        for rank in self.spec.ranks[:-1]:
            end += rank
            past = add(lanes.const(1), mul(less(column, end), -1))
            place = add(place, mul(past, MAX_RANK - rank))
        return place

    def _zero_padding(self) -> None:
        """Zeros in t past each adapter's rank, eight columns at a time, shared out over the first cluster of these
        tokens."""
        pieces = MAX_RANK // 8 * len(self.spec.ranks)
        count = TOKEN_TILE * self.config.token_tiles * pieces
        zero = [lanes.const(0)] * 4
        for start in range(0, count // self.config.cluster, self.threads):
            local = add(self.thread, start)
            item = add(mul(local, self.config.cluster), self.part)
            token, piece = add(self.first_token, div(item, pieces)), rem(item, pieces)
            ok = both(less(local, count // self.config.cluster), less(token, self.spec.tokens))
            ok = both(ok, less(self.share, 1))
            adapter, within = div(piece, MAX_RANK // 8), rem(piece, MAX_RANK // 8)
            rank = lanes.const(0)
            for i, size in enumerate(self.spec.ranks):
                rank = add(rank, mul(both(less(adapter, i + 1), less(i - 1, adapter)), size // 8))
            ok = both(ok, less(add(rank, -1), within))
            at = lanes.address(self.t, mul(add(mul(token, MAX_RANK * len(self.spec.ranks)), mul(piece, 8)), 2))
            lanes.store(at, zero, ok)
