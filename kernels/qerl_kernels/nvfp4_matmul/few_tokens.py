"""The NVFP4 matrix product for Hopper with up to 32 tokens, where what a kernel pays once counts as much as its bytes.

    y[m, n] = multiplier[n] · Σ_k x[m, k] · w[n, k]  (+ bias[n])  (+ scale · Σ_r t[m, r] · b[r, n])

t = x A is given, whole or as sums over parts of k, or with `Split.shrinks` computed here: a launch less where nothing
else precedes the product.

`mosaic_gpu` streams a weight through a ring that a producer fills by TMA; before its first product stand the fetch of
tensor maps, the barriers' set-up and a hand-over, after its last two exchanges of sums and a store through shared
memory. Here no warp waits for another before its last product.

How the work is cut. A warp takes 16 · `rows` output features and a run of units of 64 along the contraction, which it
shares with nobody: so it also brings its own part of x, and there is nothing to hand over. The `warps` of a block and
the `cluster` blocks of a cluster have the same features and lie one after another along the contraction. A unit of a
warp is, in its slot of shared memory,

    x        8 · octets token rows of 128 bytes; 16-byte chunk c of row r lies at c ^ (r % 8)
    A        (that shrinks) 64 rows of 16, 32 or 64 ranks, those of the block's adapter
    words    512 bytes for each 16 features, as `packing` has them: 16 bytes for each lane
    scales   64 bytes for each 16 features: 8 bytes for lanes 4 g ... 4 g + 3

all brought by `cp.async`, `depth` units ahead, one group of copies each (one is always ended, be it empty, so that
"all but the last depth - 1" is the present unit). Copies, not loads to registers: the depth costs no register, the loop
is not unrolled, and all operands are waited for together. With four or eight times 16 features what a warp reads
of the weight is one contiguous run. The lane reads its words and scales, makes A (see `fragments`), and multiplies with
`mma.sync.m16n8k16`, x coming by `ldmatrix`.

The end. Each warp writes its sums over its own slots as [token][feature], and the block meets. A thread then takes four
features of a token: it adds up the warps, and in a cluster the blocks but the first send it to the first
(`lanes.send`), which adds those up too, scales, and stores eight bytes. Orders are fixed, so bits do not change
from run to run. Adapters: Bᵀ [16 features × 16 ranks] of each is multiplied with t by some warp of the first block;
row g of the operand is feature 2 g and row g + 8 feature 2 g + 1, so that one word of B holds both, and rank
4 q + (0, 1, 2, 3) stands at columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9, so that a thread's words of t lie together. What
this needs from memory (B, t, multiplier, bias) is asked for before the loop.

x A. A warp multiplies Aᵀ [16 ranks × 16 of k], which `ldmatrix.trans` makes of A as it lies, with the x that it has in
registers anyway. The 16-byte chunks of a row of A are swizzled so that the eight rows that one matrix takes lie in
different banks: rows of 32, 64 and 128 bytes have their chunk c at c ^ (r / 4 % 2), c ^ (r / 2 % 4) and c ^ (r % 8).
Each warp leaves its part of t behind its sums, and t goes the way of the sums: over the warps, to the first block, over
the blocks. There it is rounded to bf16 once, as everywhere else, and lies in shared memory of its own, ranks that the
adapter does not have as zeros (what a slot has there nobody wrote). After a barrier the warps multiply it with B, over
what they left before; after another one the sums are finished. All clusters whose features have the same adapter
compute the same t: to share it would take a barrier of the whole GPU.

Why nothing tears or hangs. A slot is written by copies of its warp and read by that warp alone: a lane waits for its
own copies, `bar.warp.sync` makes those of the others visible, and a second one stands between the last read and the
copies that fill the slot anew; after the loop no copy is under way (all groups that hold any have been waited for).
One barrier of the block stands between the sums' writes and reads. Between blocks there is one barrier in the first
block's shared memory, set up before the loop and completed once, by the bytes of all others, each of which sends the
same number and waits for nobody (but for that set-up, which every block announces before it waits for anything). Every
thread that reads what came has waited for that barrier itself. Where the kernel shrinks, two more barriers of the block
follow, which all threads of all blocks pass: t is written before the first, by the thread that added it up, and read
after it; products with B are written after the first, over parts of t whose last reads stand before it, and read after
the second. The sums of the block itself are in registers from before the first on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, both, div, either, less, mul, rem
from qerl_kernels.nvfp4_matmul.api import PackedNvfp4
from qerl_kernels.nvfp4_matmul.fragments import operands
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.split import PIECE_ROW_BYTES, ROWS, Layout, Split, can_fuse, fits

# Words of x A in parts that a thread may hold during the loop. To add them up before it costs 0.5 us: a warp then waits
# for them while what it has asked for of the weight comes in (down of 7B, 8 tokens: tools/results/LOG.md).
MOST_HELD = 24


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames=("split", "scale"))
def matmul(
    x: jax.Array,
    weight: PackedNvfp4,
    split: Split,
    *,
    bias: jax.Array | None = None,
    shrunk: jax.Array | None = None,
    a: jax.Array | None = None,
    expand: Sequence[jax.Array] = (),
    scale: float = 1.0,
) -> jax.Array:
    """The equation of the module's docstring: x bf16 [m, k] -> bf16 [m, n], m up to `split.tokens`.

    Args:
      x: activations.
      weight: the packed weight.
      split: how to cut the work.
      bias: [n], any float dtype.
      shrunk: `x A` of the adapters side by side, bf16 [m, 64 · adapters], each padded to a rank of 64 with zeros; one
        adapter alone may keep its rank. Or sums of which it is the sum, f32 [parts, m, sum of ranks]. Where the split
        shrinks, in its place:
      a: A of the adapters side by side, bf16 [k, sum of ranks].
      expand: B of each adapter, bf16 [rank, features]; together they cover the n features in order.
      scale: of the adapters.

    Raises:
      ValueError: the split fits neither the GPU nor these shapes, or an array has another shape or dtype than stated.
    """
    _check(x, weight, split, bias, shrunk, a, expand)
    n, k = weight.shape
    padded = weight.multiplier.shape[0]
    x = jnp.pad(x, ((0, 0), (0, -k % TILE)))
    a_or_t = jnp.pad(a, ((0, -k % TILE), (0, 0))) if split.shrinks else shrunk
    if bias is not None:
        bias = bias if bias.dtype in (jnp.bfloat16, jnp.float32) else bias.astype(jnp.float32)
        bias = jnp.pad(bias, (0, padded - n))
    task = _Task(
        tokens=x.shape[0], features=n, units=x.shape[1] // TILE, scale=scale,
        bias=None if bias is None else bias.dtype.itemsize,
        adapters=tuple(b.shape for b in expand), columns=a_or_t.shape[-1] if expand else 0,
        parts=len(a_or_t) if expand and a_or_t.ndim == 3 else 0,
    )  # fmt: skip
    inputs = [x, weight.words, weight.scales, weight.multiplier]
    inputs += ([] if bias is None else [bias]) + ([a_or_t, *expand] if expand else [])
    out = jax.ShapeDtypeStruct((x.shape[0], padded), jnp.bfloat16)
    return _call(task, split, inputs, out)[:, :n]


def _check(x, weight, split, bias, shrunk, a, expand) -> None:
    """Refuses what the kernel, which sees addresses alone, would read as something else."""
    (n, k), m, shapes = weight.shape, x.shape[0], tuple(b.shape for b in expand)
    ranks = [rank for rank, _ in shapes]
    if x.shape != (m, k) or m > split.tokens or x.dtype != jnp.bfloat16:
        raise ValueError(f"matmul: x is {_named(x)}, the weight {n} x {k}, {split}")
    if not fits(split, n, k, max(ranks, default=0)):
        raise ValueError(f"matmul: {split} does not fit a multiprocessor or {n} x {k} features, adapters {shapes}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"matmul: the bias is {_named(bias)}, the weight {n} x {k}")
    if expand and not can_fuse(n, shapes, split.features if split.shrinks else ROWS):
        raise ValueError(f"matmul: adapters of shapes {shapes} do not fit {n} features and {split}")
    if any(b.dtype != jnp.bfloat16 for b in expand):
        raise ValueError(f"matmul: B are {list(map(_named, expand))}, all must be bfloat16")
    given, unused = (a, shrunk) if split.shrinks else (shrunk, a)
    if not expand:
        good = given is None
    elif split.shrinks:
        good = given is not None and given.shape == (k, sum(ranks)) and given.dtype == jnp.bfloat16
    elif given is not None and given.ndim == 3:
        good = given.shape == (max(1, len(given)), m, sum(ranks)) and given.dtype == jnp.float32
    else:
        wide = {(m, columns) for columns in (TILE * len(ranks), *(ranks if len(ranks) == 1 else ()))}
        good = given is not None and given.shape in wide and given.dtype == jnp.bfloat16
    if not good or unused is not None:
        raise ValueError(
            f"matmul: x A is {_named(shrunk)}, A is {_named(a)}; x {_named(x)}, adapters of shapes {shapes}, {split}"
        )


def _named(array: jax.Array | None) -> str:
    return "not given" if array is None else f"{array.dtype}{list(array.shape)}"


@dataclasses.dataclass(frozen=True)
class _Task:
    """What is multiplied: rows of x, features and units of the weight, bytes of a bias, (rank, features) of each
    adapter, the columns of `shrunk` or of A, and the parts of `shrunk` (0: it is whole)."""

    tokens: int
    features: int
    units: int
    scale: float
    bias: int | None
    adapters: tuple[tuple[int, int], ...]
    columns: int
    parts: int = 0

    @property
    def rank(self) -> int:
        """The largest of the adapters."""
        return max((rank for rank, _ in self.adapters), default=0)

    @property
    def steps(self) -> int:
        """Products of 16 ranks that the adapters take."""
        return -(-self.rank // ROWS)


def _call(task: _Task, split: Split, inputs: Sequence[jax.Array], out: jax.ShapeDtypeStruct) -> jax.Array:
    sizes = Layout(split, task.rank).arrays()
    scratch = {name: plgpu.SMEM((size // 4,), jnp.uint32) for name, size in sizes.items()}

    def body(*refs, **scratch):
        block = lax.axis_index("block")
        operands_ = (*refs, *scratch.values())
        types = (plgpu.Layout.WG_SPLAT(()),) + (plgpu.RefType(),) * len(operands_)

        def program(ctx, block, *all_refs):
            del ctx
            pointers = [mgpu.utils.memref_ptr(ref) for ref in all_refs[: len(refs)]]
            shared = {name: lanes.shared_base(ref) for name, ref in zip(scratch, all_refs[len(refs) :], strict=True)}
            part = lanes.block_of_cluster() if split.cluster > 1 else lanes.const(0)
            place = _Place(block.registers.item(), part, mgpu.utils.thread_idx(), mgpu.utils.warp_idx())
            _Program(task, split, place, pointers, shared).emit()

        plgpu.inline_mgpu(arg_types=types)(program)(block, *operands_)

    clusters = {"cluster": (split.cluster,), "cluster_names": ("part",)} if split.cluster > 1 else {}
    call = plgpu.kernel(
        body,
        out_type=out,
        grid=(out.shape[1] // split.features,),
        grid_names=("block",),
        **clusters,
        num_threads=split.warps // 4,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=f"nvfp4_few_m{split.tokens}{'_shrinks' if split.shrinks else ''}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return call(*inputs)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a thread is: its cluster, its block in it, its number and its warp's in the block."""

    block: ir.Value
    part: ir.Value
    thread: ir.Value
    warp: ir.Value


@dataclasses.dataclass(frozen=True)
class _Left:
    """fp32 [tokens][4 · groups] as each warp leaves it: from which byte on, bytes of a token, and the number of its
    first four in what a block sends."""

    at: int
    row_bytes: int
    groups: int
    first: int


class _Program:
    """Emits the instructions of one thread."""

    def __init__(self, task: _Task, split: Split, place: _Place, pointers: list[ir.Value], shared: dict):
        self.task, self.split, self.shared, self.layout = task, split, shared, Layout(split, task.rank)
        self.x, self.words, self.scales, self.multiplier = pointers[:4]
        self.bias = None if task.bias is None else pointers[4]
        self.a_or_t, self.b = (
            (pointers[-2 - len(task.adapters)], pointers[-1 - len(task.adapters) : -1]) if task.steps else (None, [])
        )
        self.y = pointers[-1]
        self.part, self.thread, self.warp = place.part, place.thread, place.warp
        self.octets = split.tokens // 8
        self.first_row = mul(place.block, split.rows)  # in operands of 16 features
        self.is_first = less(self.part, 1) if split.cluster > 1 else lanes.const(1)
        self.lane = rem(self.thread, 32)
        self.g, self.q = div(self.lane, 4), rem(self.lane, 4)
        self.ring = add(self.shared["ring_s"], mul(self.warp, self.layout.warp_bytes))
        self.sums = _Left(0, self.layout.row_bytes, 4 * split.rows, 0)
        self.parts = _Left(
            self.layout.sum_bytes, self.layout.part_row_bytes, 4 * self.layout.steps, split.tokens * 4 * split.rows
        )

    def emit(self) -> None:
        split = self.split
        if split.cluster > 1:  # first: its fence might wait for copies under way
            size = (split.cluster - 1) * self.layout.items * 16
            lanes.begin_exchange([(self.shared["arrived_s"], size)], self.thread)
        first, count = self._units()
        self._lane_offsets()
        at = self._sources(first)
        most = math.ceil(math.ceil(self.task.units / split.cluster) / split.warps)
        ahead = min(split.depth, most)
        for d in range(ahead):
            self._request(add(self.ring, d * self.layout.slot_bytes), at, less(d, count))
            lanes.end_group()
            at = self._next(at)
        terms = self._terms()
        jobs = self._fetch_adapters()
        sums = self._loop(count, ahead, at if most > ahead else None)
        lanes.wait_groups(0)
        lanes.warp_barrier()
        self._leave(self.sums, sums[: split.rows])
        self._leave(self.parts, sums[split.rows :])
        if not split.shrinks:
            self._multiply_adapters(jobs)
        lanes.block_barrier()
        if split.cluster > 1:
            lanes.all_began()
        self._finish(terms, jobs)

    # ---- the loop ----

    def _units(self) -> tuple[ir.Value, ir.Value]:
        """(first unit, number of units) of this warp: shared out evenly over the blocks, a block's over its warps."""
        units, split = self.task.units, self.split
        each, more = divmod(units, split.cluster)
        begin = add(mul(self.part, each), lanes.smaller(self.part, more))
        of_block = add(lanes.const(each), less(self.part, more))
        each, more = div(of_block, split.warps), rem(of_block, split.warps)
        first = add(begin, add(mul(self.warp, each), lanes.smaller(self.warp, more)))
        return first, add(each, less(self.warp, more))

    def _lane_offsets(self) -> None:
        """Where in a slot this lane writes and reads."""
        row, chunk = div(self.lane, 8), rem(self.lane, 8)
        # rows 0-3 of an octet, 8 lanes each; the second copy has rows 4-7, whose chunks lie 64 bytes away
        self.to_x = add(mul(row, 128), mul(lanes.xor(chunk, row), 16))
        self.to_rest = mul(self.lane, 16)
        # lane 8 j + r gives row r and chunk j, then chunk j + 4
        self.from_x = add(mul(chunk, 128), mul(lanes.xor(row, chunk), 16))
        self.from_scales = mul(self.g, 8)
        self.x_exists = {}  # whether the token is there, for the copies of four rows where it may not be
        for i in range(2 * self.octets):
            if 4 * i < self.task.tokens < 4 * i + 4:
                self.x_exists[i] = less(add(row, 4 * i), self.task.tokens)
        if self.split.shrinks:
            self._lane_offsets_of_a()

    def _lane_offsets_of_a(self) -> None:
        """The same for A; `chunks` of 16 bytes make a row."""
        layout, chunks = self.layout, self.layout.columns // 8
        swizzled = lambda row, chunk: mul(lanes.xor(chunk, rem(div(row, 8 // chunks), chunks)), 16)  # noqa: E731
        row, self.a_chunk = div(self.lane, chunks), rem(self.lane, chunks)
        self.to_a = add(add(mul(row, 2 * layout.columns), swizzled(row, self.a_chunk)), layout.a_at)
        # lane 8 j + r gives row r of the matrix of chunk j % 2 and of the upper or lower eight of 16 rows
        matrix, row = div(self.lane, 8), rem(self.lane, 8)
        rows = add(mul(add(mul(div(matrix, 2), 8), row), 2 * layout.columns), layout.a_at)
        self.from_a = [add(rows, swizzled(row, add(rem(matrix, 2), 2 * i))) for i in range(layout.steps)]
        *_, rank, self.a_column = self._adapter_of(mul(self.first_row, ROWS))
        self.a_rank = rank if any(r < ROWS * layout.steps for r, _ in self.task.adapters) else None
        exact = all(r == layout.columns for r, _ in self.task.adapters)
        self.a_exists = None if exact else less(mul(self.a_chunk, 8), rank)

    def _sources(self, first: ir.Value) -> list[ir.Value]:
        """Addresses of what this lane copies of a unit: words, scales, x and, where it is needed, A."""
        units, rows = self.task.units, self.split.rows
        tile, quarter = div(self.first_row, 4), rem(self.first_row, 4)
        unit = add(mul(tile, units), first)
        words = lanes.address(self.words, add(mul(unit, 2048), add(mul(quarter, 512), mul(self.lane, 16))))
        scales = add(mul(unit, 256), add(mul(quarter, 64), mul(self.lane, 16)))
        if rows == 8:  # lanes 16-31 have the second tile
            scales = add(scales, mul(div(self.lane, 16), (units - 1) * 256))
        x = add(mul(div(self.lane, 8), units * 128), add(mul(first, 128), mul(rem(self.lane, 8), 16)))
        at = [words, lanes.address(self.scales, scales), lanes.address(self.x, x)]
        if self.split.shrinks:
            row = add(mul(first, TILE), div(self.lane, self.layout.columns // 8))
            column = add(self.a_column, mul(self.a_chunk, 8))
            at.append(lanes.address(self.a_or_t, mul(add(mul(row, self.task.columns), column), 2)))
        return at

    def _next(self, at: list[ir.Value]) -> list[ir.Value]:
        """The addresses one unit on."""
        steps = (2048, 256, 128, TILE * 2 * self.task.columns)
        return [lanes.address(a, lanes.const(step)) for a, step in zip(at, steps[: len(at)], strict=True)]

    def _request(self, slot: ir.Value, at: list[ir.Value], flag: ir.Value) -> None:
        """Starts the copies of a unit where `flag` is 1."""
        words, scales, x, *a = at
        rows, units, words_at = self.split.rows, self.task.units, self.layout.words_at
        rest = add(slot, self.to_rest)
        of_tile = [(r // 4) * units * 2048 + r % 4 * 512 for r in range(rows)]
        lanes.copy(rest, words, [(words_at + 512 * r, there) for r, there in enumerate(of_tile)], flag)
        some = flag if rows == 8 else both(flag, less(self.lane, 4 * rows))
        lanes.copy(rest, scales, [(words_at + 512 * rows, 0)], some)
        low = add(slot, self.to_x)
        high = lanes.xor(low, 64)
        for i in range(math.ceil(self.task.tokens / 4)):  # a token that is not there spoils no other
            exists = both(flag, self.x_exists[i]) if i in self.x_exists else flag
            lanes.copy((low, high)[i % 2], x, [(512 * i, 4 * i * units * 128)], exists)
        if a:
            self._request_a(slot, *a, flag)

    def _request_a(self, slot: ir.Value, a: ir.Value, flag: ir.Value) -> None:
        """Starts the copies of a unit's rows of A; those of ranks that there are."""
        columns, width = self.layout.columns, self.task.columns
        low, rows = add(slot, self.to_a), 32 * 8 // columns  # rows that the lanes copy at a time
        places = [(r * 2 * columns, r * 2 * width) for r in range(0, TILE, rows)]
        exists = flag if self.a_exists is None else both(flag, self.a_exists)
        if columns == TILE:  # four rows of eight chunks: rows 4-7 have theirs 64 bytes away
            lanes.copy(low, a, places[::2], exists)
            lanes.copy(lanes.xor(low, 64), a, places[1::2], exists)
        else:
            lanes.copy(low, a, places, exists)

    def _loop(self, count: ir.Value, ahead: int, at: list[ir.Value] | None) -> list[list[list[ir.Value]]]:
        """Sums of this warp's units, [row][octet] of four, behind the rows' those of x A, [16 ranks][octet]. `at`:
        addresses of unit `ahead`, None where there is none."""
        split, zero, at = self.split, lanes.fconst(0.0), at or []
        carried = 4 * (split.rows + self.layout.steps) * self.octets
        start = [self.ring, *at, *[zero] * carried]
        last = add(self.ring, (ahead - 1) * self.layout.slot_bytes)

        def unit(i: ir.Value, carry: list[ir.Value]) -> list[ir.Value]:
            slot, at_, flat = carry[0], carry[1 : 1 + len(at)], carry[1 + len(at) :]
            lanes.wait_groups(ahead - 1)
            lanes.warp_barrier()
            sums = self._by_row(flat)
            x = self._read_x(slot)
            parts = [self._shrink(part, x, slot, i) for i, part in enumerate(sums[split.rows :])]
            sums = [self._multiply(row, x, *self._read(slot, r)) for r, row in enumerate(sums[: split.rows])]
            if at:
                lanes.warp_barrier()
                self._request(slot, at_, less(add(i, ahead), count))
                at_ = self._next(at_)
            lanes.end_group()
            after = either(less(slot, last), add(slot, self.layout.slot_bytes), self.ring)
            return [after, *at_, *(value for row in sums + parts for four in row for value in four)]

        return self._by_row(lanes.repeat(count, start, unit)[-carried:])

    def _by_row(self, flat: list[ir.Value]) -> list[list[list[ir.Value]]]:
        fours = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        return [fours[i : i + self.octets] for i in range(0, len(fours), self.octets)]

    def _read_x(self, slot: ir.Value) -> list[list[ir.Value]]:
        """x of a unit from its slot: eight words an octet."""
        low = add(slot, self.from_x)
        high = lanes.xor(low, 64)
        return [lanes.read_matrices(low, 1024 * o) + lanes.read_matrices(high, 1024 * o) for o in range(self.octets)]

    def _read(self, slot: ir.Value, row: int) -> tuple[list[ir.Value], list[ir.Value]]:
        """Four words and two words of scales of a row from a unit's slot."""
        words_at = self.layout.words_at
        scales_at = words_at + 512 * self.split.rows
        words = lanes.read_shared(add(slot, self.to_rest), 4, words_at + 512 * row)
        return words, lanes.read_shared(add(slot, self.from_scales), 2, scales_at + 64 * row)

    def _multiply(self, sums: list, x: list, words: list[ir.Value], scales: list[ir.Value]) -> list[list[ir.Value]]:
        """The sums of a row, four for each octet, plus those of a unit."""
        for step, a in enumerate(operands(words, scales)):
            sums = self._plus(sums, a, x, step)
        return sums

    def _shrink(self, part: list, x: list, slot: ir.Value, number: int) -> list[list[ir.Value]]:
        """The sums of 16 ranks, four for each octet, plus those of a unit."""
        at = add(slot, self.from_a[number])
        for step in range(TILE // 16):
            a = lanes.read_matrices(at, step * 16 * 2 * self.layout.columns, transposed=True)
            part = self._plus(part, a, x, step)
        return part

    def _plus(self, sums: list, a: list[ir.Value], x: list, step: int) -> list[list[ir.Value]]:
        return [lanes.multiply(four, a, x[o][2 * step : 2 * step + 2]) for o, four in enumerate(sums)]

    # ---- what is added ----

    def _item(self, start: int) -> tuple[ir.Value, ir.Value]:
        """(token, group of four features) of what this thread finishes."""
        index = add(self.thread, start)
        return div(index, 4 * self.split.rows), rem(index, 4 * self.split.rows)

    def _feature(self) -> ir.Value:
        """First of the four features that this thread finishes, whatever the token."""
        return add(mul(self.first_row, ROWS), mul(self._item(0)[1], 4))

    def _terms(self) -> tuple[list[ir.Value], list[ir.Value] | None]:
        """Words of the multiplier and of the bias for this thread's features."""
        feature = self._feature()
        multiplier = lanes.load(lanes.address(self.multiplier, mul(feature, 4)), 4, self.is_first)
        if self.bias is None:
            return multiplier, None
        size = self.task.bias
        return multiplier, lanes.load(lanes.address(self.bias, mul(feature, size)), size, self.is_first)

    def _fetch_adapters(self) -> list[tuple]:
        """This warp's jobs, each 16 ranks of a row: (whether there is one, its step, words of B, words of t if that is
        given). Job number i of all is row i % rows and step i // rows, and warp i % warps has it."""
        jobs, split = [], self.split
        for start in range(0, split.rows * self.task.steps, split.warps):
            number = add(self.warp, start)
            row, step = rem(number, split.rows), div(number, split.rows)
            exists = less(step, self.task.steps)
            feature = mul(add(self.first_row, row), ROWS)
            base, within, width, rank, column = self._adapter_of(feature)
            first = add(mul(step, 16), mul(self.q, 4))
            ok = both(both(exists, self.is_first), both(less(first, rank), less(feature, self.task.features)))
            at = mul(add(mul(first, width), add(within, mul(self.g, 2))), 2)
            b = [lanes.load(lanes.address(base, add(at, mul(width, 2 * i))), 1, ok)[0] for i in range(4)]
            t = [] if split.shrinks else [self._fetch_t(o, add(column, first), ok) for o in range(self.octets)]
            jobs.append((exists, step, b, t))
        if len(jobs) * self.octets * 4 * self.task.parts > MOST_HELD:
            return [(exists, step, b, list(map(self._summed, t))) for exists, step, b, t in jobs]
        return jobs

    def _fetch_t(self, octet: int, column: ir.Value, ok: ir.Value) -> list[ir.Value]:
        """Four ranks of this thread's token, from `column` on: two words, or four for each part."""
        token, task = add(self.g, 8 * octet), self.task
        ok = both(ok, less(token, task.tokens))
        place = add(mul(token, task.columns), column)
        if not task.parts:
            return lanes.load(lanes.address(self.a_or_t, mul(place, 2)), 2, ok)
        at, size = lanes.address(self.a_or_t, mul(place, 4)), 4 * task.tokens * task.columns
        return [word for part in range(task.parts) for word in lanes.load(at, 4, ok, byte=part * size)]

    def _summed(self, words: list[ir.Value]) -> list[ir.Value]:
        """Two words from the four of each part; from two words themselves."""
        if len(words) == 2:
            return words
        sums = [lanes.total([lanes.as_float(word) for word in words[i::4]]) for i in range(4)]
        return [lanes.to_bf16(sums[0], sums[1]), lanes.to_bf16(sums[2], sums[3])]

    def _adapter_of(self, feature: ir.Value) -> tuple[ir.Value, ...]:
        """(B, feature within it, its features, its rank, its first column of t or A) of the adapter at `feature`."""
        found, begin = None, 0
        ranks = [rank for rank, _ in self.task.adapters]
        for i, ((rank, width), base) in enumerate(zip(self.task.adapters, self.b, strict=True)):
            column = sum(ranks[:i]) if self.split.shrinks or self.task.parts else TILE * i
            this = [base, *(lanes.const(value) for value in (begin, width, rank, column))]
            here = less(begin - 1, feature)
            found = this if found is None else [either(here, *both_) for both_ in zip(this, found, strict=True)]
            begin += width
        base, begin, width, rank, column = found
        return base, add(feature, mul(begin, -1)), width, rank, column

    def _multiply_adapters(self, jobs: list[tuple]) -> None:
        """Bᵀ tᵀ of each job to this warp's shared memory behind its sums, [job][token][feature]."""
        for number, (exists, step, b, t) in enumerate(jobs):
            t = list(map(self._summed, t)) or self._kept(step)
            a = [lanes.pair(b[i], b[i + 1], high) for i in (0, 2) for high in (False, True)]
            for o in range(self.octets):
                found = lanes.multiply([lanes.fconst(0.0)] * 4, a, t[o])
                at = add(mul(add(mul(self.q, 2), 8 * o), PIECE_ROW_BYTES), mul(self.g, 8))
                at = add(add(self.ring, at), self.layout.sum_bytes + number * self.layout.piece_bytes)
                for e in range(2):
                    lanes.store_shared(at, [found[e], found[e + 2]], exists, byte=e * PIECE_ROW_BYTES)

    def _adapted(self, start: int) -> list[list[ir.Value]]:
        """What the adapters add, before their scale, to the four features that this thread finishes: of each step."""
        split, found = self.split, []
        token, group = self._item(start)
        at = add(mul(lanes.smaller(token, split.tokens - 1), PIECE_ROW_BYTES), mul(rem(group, 4), 16))
        at = add(add(self.shared["ring_s"], at), self.layout.sum_bytes)
        for step in range(self.task.steps):
            number = add(div(group, 4), step * split.rows)
            warp, job = rem(number, split.warps), div(number, split.warps)
            piece = add(mul(warp, self.layout.warp_bytes), mul(job, self.layout.piece_bytes))
            found.append(lanes.load_shared(add(at, piece), 4))
        return found

    # ---- the end ----

    def _leave(self, left: _Left, sums: list[list[list[ir.Value]]]) -> None:
        """This warp's sums over its slots, [token][feature or rank], after the last copy and the last read of them."""
        at = add(self.ring, add(mul(self.q, 2 * left.row_bytes), mul(self.g, 4)))
        for r, row in enumerate(sums):
            for o, four in enumerate(row):
                for i, value in enumerate(four):  # feature g + 8 h, token 2 q + e
                    h, e = divmod(i, 2)
                    byte = left.at + (8 * o + e) * left.row_bytes + 4 * (ROWS * r + 8 * h)
                    lanes.store_shared(at, [value], byte=byte)

    def _finish(self, terms: tuple, jobs: list[tuple]) -> None:
        kinds = [self.sums, self.parts] if self.split.shrinks else [self.sums]
        wholes = [self._over_warps(left) for left in kinds]
        if self.split.cluster > 1:
            with lanes.only(less(0, self.part)):
                for left, whole in zip(kinds, wholes, strict=True):
                    self._send(left, whole)
            with lanes.only(self.is_first):
                lanes.wait_for(self.shared["arrived_s"])
        if self.split.shrinks:
            with self._of_first():
                self._keep(wholes[1])
            lanes.block_barrier()
            with self._of_first():
                self._multiply_adapters(jobs)
            lanes.block_barrier()
        with self._of_first():
            for start, whole in self._over_blocks(self.sums, wholes[0]):
                self._store(start, whole, terms)

    def _of_first(self) -> contextlib.AbstractContextManager[None]:
        """What is emitted within is the first block's."""
        return lanes.only(self.is_first) if self.split.cluster > 1 else contextlib.nullcontext()

    def _items(self, left: _Left) -> Iterator[tuple[int, ir.Value, ir.Value, ir.Value, ir.Value]]:
        """Which fours this thread adds up: (first of all threads', number, whether there is one, token, group)."""
        count = self.split.tokens * left.groups
        for start in range(0, count, 32 * self.split.warps):
            number = add(self.thread, start)
            yield start, number, less(number, count), div(number, left.groups), rem(number, left.groups)

    def _over_warps(self, left: _Left) -> list[list[ir.Value]]:
        """Each of this thread's fours, of all warps of the block; eight warps at a time, because more would take too
        many registers."""
        found = []
        for _, _, _, token, group in self._items(left):
            at = add(mul(lanes.smaller(token, self.split.tokens - 1), left.row_bytes), mul(group, 16))
            at, sums = add(self.shared["ring_s"], at), []
            for begin in range(0, self.split.warps, 8):
                some = range(begin, min(begin + 8, self.split.warps))
                fours = [lanes.load_shared(at, 4, byte=left.at + self.layout.warp_bytes * w) for w in some]
                sums.append([lanes.total(values) for values in zip(*fours, strict=True)])
            found.append([lanes.total(values) for values in zip(*sums, strict=True)])
        return found

    def _send(self, left: _Left, wholes: list[list[ir.Value]]) -> None:
        """To the first block of the cluster."""
        for (_, number, exists, _, _), whole in zip(self._items(left), wholes, strict=True):
            place = add(mul(add(self.part, -1), self.layout.items), add(number, left.first))
            at = add(self.shared["box_s"], mul(place, 16))
            lanes.send(at, lanes.const(0), whole, self.shared["arrived_s"], exists)

    def _over_blocks(self, left: _Left, wholes: list[list[ir.Value]]) -> Iterator[tuple[int, list[ir.Value]]]:
        """(first of all threads', this thread's four of all blocks), in the first one and after it has waited."""
        last = self.split.tokens * left.groups - 1
        for (start, number, *_), whole in zip(self._items(left), wholes, strict=True):
            if self.split.cluster > 1:
                at = add(self.shared["box_s"], mul(add(lanes.smaller(number, last), left.first), 16))
                blocks = range(self.split.cluster - 1)
                others = [lanes.load_shared(at, 4, byte=16 * self.layout.items * i) for i in blocks]
                whole = [lanes.total(values) for values in zip(whole, *others, strict=True)]
            yield start, whole

    def _keep(self, wholes: list[list[ir.Value]]) -> None:
        """x A in bf16 to the block's shared memory, [token][rank], zeros where the adapter has no such rank."""
        found = self._over_blocks(self.parts, wholes)
        for (_, number, exists, _, group), (_, whole) in zip(self._items(self.parts), found, strict=True):
            words = [lanes.to_bf16(whole[0], whole[1]), lanes.to_bf16(whole[2], whole[3])]
            if self.a_rank is not None:
                there = less(mul(group, 4), self.a_rank)
                words = [either(there, word, lanes.const(0)) for word in words]
            at = add(self.shared["t_s"], mul(number, 8))
            lanes.store_shared(at, [lanes.as_float(word) for word in words], exists)

    def _kept(self, step: ir.Value) -> list[list[ir.Value]]:
        """Words of x A as the operand of each octet wants them."""
        steps = self.layout.steps
        within = add(mul(lanes.smaller(step, steps - 1), 32), mul(self.q, 8))
        at = add(add(self.shared["t_s"], within), mul(self.g, 32 * steps))
        return [lanes.read_shared(at, 2, byte=8 * o * 32 * steps) for o in range(self.octets)]

    def _store(self, start: int, whole: list[ir.Value], terms: tuple) -> None:
        """Four features of a token: · multiplier (+ bias) (+ adapters), as bf16."""
        multiplier, bias = terms
        token, exists = self._item(start)[0], less(add(self.thread, start), self.split.tokens * 4 * self.split.rows)
        values = [lanes.fmul(value, lanes.as_float(word)) for value, word in zip(whole, multiplier, strict=True)]
        if bias is not None:
            wide = self.task.bias == 4
            added = [lanes.as_float(bias[i]) if wide else lanes.half_of(bias[i // 2], i % 2 == 1) for i in range(4)]
            values = [lanes.fadd(value, more) for value, more in zip(values, added, strict=True)]
        if self.task.steps:
            scale, steps = lanes.fconst(self.task.scale), self._adapted(start)
            values = [lanes.fma(scale, lanes.total(more), v) for v, *more in zip(values, *steps, strict=True)]
        words = [lanes.to_bf16(values[0], values[1]), lanes.to_bf16(values[2], values[3])]
        row = -(-self.task.features // TILE) * TILE
        place = lanes.address(self.y, mul(add(mul(token, row), self._feature()), 2))
        lanes.store(place, words, both(exists, less(token, self.task.tokens)))
