"""The NVFP4 matrix product for Hopper with up to 32 tokens, where what a kernel pays once counts as much as its bytes.

    y[m, n] = multiplier[n] · Σ_k x[m, k] · w[n, k]  (+ bias[n])  (+ scale · Σ_r t[m, r] · b[r, n])

`mosaic_gpu` streams a weight through a ring that a producer fills by TMA; before its first product stand the fetch of
tensor maps, the barriers' set-up and a hand-over, after its last two exchanges of sums and a store through shared
memory. Here no warp waits for another before its last product.

How the work is cut. A warp takes 16 · `rows` output features and a run of units of 64 along the contraction, which it
shares with nobody: so it also brings its own part of x, and there is nothing to hand over. The `warps` of a block and
the `cluster` blocks of a cluster have the same features and lie one after another along the contraction. A unit of a
warp is, in its slot of shared memory,

    x        8 · octets token rows of 128 bytes; 16-byte chunk c of row r lies at c ^ (r % 8)
    words    512 bytes for each 16 features, as `packing` has them: 16 bytes for each lane
    scales   64 bytes for each 16 features: 8 bytes for lanes 4 g ... 4 g + 3

all brought by `cp.async`, `depth` units ahead, one group of copies each (one is always ended, be it empty, so that
"all but the last depth - 1" is the present unit). Copies, not loads to registers: the depth costs no register, the loop
is not unrolled, and all three operands are waited for together. With four or eight times 16 features what a warp reads
of the weight is one contiguous run. The lane reads its words and scales, makes A (see `fragments`), and multiplies with
`mma.sync.m16n8k16`, x coming by `ldmatrix`.

The end. Each warp writes its sums over its own slots as [token][feature], and the block meets. A thread then takes four
features of a token: it adds up the warps, and in a cluster the blocks but the first send it to the first
(`lanes.send`), which adds those up too, scales, and stores eight bytes. Orders are fixed, so bits do not change
from run to run. Adapters: Bᵀ [16 features × 16 ranks] of each is multiplied with t by some warp of the first block;
row g of the operand is feature 2 g and row g + 8 feature 2 g + 1, so that one word of B holds both, and rank
4 q + (0, 1, 2, 3) stands at columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9, so that a thread's words of t lie together. What
this needs from memory (B, t, multiplier, bias) is asked for before the loop.

Why nothing tears or hangs. A slot is written by copies of its warp and read by that warp alone: a lane waits for its
own copies, `bar.warp.sync` makes those of the others visible, and a second one stands between the last read and the
copies that fill the slot anew; after the loop no copy is under way (all groups that hold any have been waited for).
One barrier of the block stands between the sums' writes and reads. Between blocks there is one barrier in the first
block's shared memory, set up before the loop and completed once, by the bytes of all others, each of which sends the
same number and waits for nobody (but for that set-up, which every block announces before it waits for anything).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, both, div, either, less, mul, rem
from qerl_kernels.nvfp4_matmul.api import PackedNvfp4
from qerl_kernels.nvfp4_matmul.fragments import operands
from qerl_kernels.nvfp4_matmul.packing import TILE

SMEM_BYTES = 227 * 1024
MOST_TOKENS = 32
_ROWS = 16  # features of one operand
_PIECE_ROW_BYTES = 4 * (_ROWS + 4)  # a token in an adapter's product


@dataclasses.dataclass(frozen=True)
class Split:
    """How the work is cut; found by `tools/tune_matmul.py`.

    Attributes:
      tokens: rows of x that there may be (8, 16, 24 or 32).
      rows: operands of 16 features in a block (1, 2, 4 or 8).
      warps: of a block, which share the contraction (a multiple of 4).
      cluster: blocks that share the contraction (1 to 8).
      depth: units of 64 along the contraction that a warp has under way.
    """

    tokens: int
    rows: int = 4
    warps: int = 8
    cluster: int = 1
    depth: int = 4

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a unit; a multiple of 128, so that rows of x begin where banks do."""
        return -(-(self.tokens * 128 + self.rows * 576) // 128) * 128

    @property
    def sum_bytes(self) -> int:
        """[tokens][features] in fp32; four more in a row spread the tokens over the banks."""
        return self.tokens * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """One token in `sum_bytes`."""
        return 4 * (_ROWS * self.rows + 4)

    @property
    def piece_bytes(self) -> int:
        """An adapter's product of 16 ranks for 16 features: [tokens][features] in fp32, spread likewise."""
        return self.tokens * _PIECE_ROW_BYTES

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp: its slots, and later its sums and its part of the adapters' products."""
        pieces = -(-self.rows * TILE // _ROWS // self.warps)
        return max(self.depth * self.slot_bytes, -(-(self.sum_bytes + pieces * self.piece_bytes) // 128) * 128)

    def smem_bytes(self) -> int:
        """Shared memory of a block, with adapters or without; each array a whole number of KiB."""
        kib = lambda size: -(-size // 1024) * 1024  # noqa: E731
        box = (self.cluster - 1) * self.tokens * self.rows * _ROWS * 4
        return kib(self.warps * self.warp_bytes) + kib(box) + 1024


def fits(split: Split, n: int, k: int) -> bool:
    """Whether a multiprocessor can hold a block of `split`, and the weight [n, k] divides into such blocks."""
    return (
        split.tokens in (8, 16, 24, 32)
        and split.rows in (1, 2, 4, 8)
        and split.warps % 4 == 0
        and 4 <= split.warps <= 32
        and 1 <= split.cluster <= 8
        and split.smem_bytes() <= SMEM_BYTES
        and split.depth >= 1
        and math.ceil(n / TILE) * 4 % split.rows == 0
        and math.ceil(k / TILE) >= split.cluster
        and split.rows * split.tokens <= 192  # above, sums and adapters of several octets spill
        # sums, x, two rows' words and scales; the rest for addresses and what one operand takes
        and split.rows * split.tokens // 2 + split.tokens + 64 <= min(255, 65536 // (32 * split.warps))
    )


def fitted(split: Split, n: int) -> Split:
    """`split`, or with as few operands in a block as divide the n features."""
    return split if math.ceil(n / TILE) * 4 % split.rows == 0 else dataclasses.replace(split, rows=4)


def can_fuse(n: int, shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether adapters with B of these shapes can be added within the kernel: their ranks are multiples of 8 up to 64,
    they cover all n features, and none begins within 16 of them."""
    ends = np.cumsum([features for _, features in shapes])
    return (
        bool(len(ends))
        and ends[-1] == n
        and all(rank % 8 == 0 and rank <= TILE for rank, _ in shapes)
        and all(end % _ROWS == 0 for end in ends)
    )


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames=("split", "scale"))
def matmul(
    x: jax.Array,
    weight: PackedNvfp4,
    split: Split,
    *,
    bias: jax.Array | None = None,
    shrunk: jax.Array | None = None,
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
        adapter alone may keep its rank.
      expand: B of each adapter, bf16 [rank, features]; together they cover the n features in order.
      scale: of the adapters.
    """
    n, k = weight.shape
    if x.shape != (x.shape[0], k) or x.shape[0] > split.tokens:
        raise ValueError(f"matmul: x is {x.shape}, the weight {n} x {k}, {split}")
    if not fits(split, n, k):
        raise ValueError(f"matmul: {split} does not fit a multiprocessor or {n} x {k} features")
    if expand and not can_fuse(n, [b.shape for b in expand]):
        raise ValueError(f"matmul: adapters of shapes {[b.shape for b in expand]} do not fit {n} features")
    padded = weight.multiplier.shape[0]
    x = jnp.pad(x, ((0, 0), (0, -k % TILE)))
    if bias is not None:
        bias = bias if bias.dtype in (jnp.bfloat16, jnp.float32) else bias.astype(jnp.float32)
        bias = jnp.pad(bias, (0, padded - n))
    task = _Task(
        tokens=x.shape[0], features=n, units=x.shape[1] // TILE, scale=scale,
        bias=None if bias is None else bias.dtype.itemsize,
        adapters=tuple(b.shape for b in expand), slots=shrunk.shape[1] if expand else 0,
    )  # fmt: skip
    inputs = [x, weight.words, weight.scales, weight.multiplier]
    inputs += ([] if bias is None else [bias]) + ([shrunk, *expand] if expand else [])
    out = jax.ShapeDtypeStruct((x.shape[0], padded), jnp.bfloat16)
    return _call(task, split, inputs, out)[:, :n]


@dataclasses.dataclass(frozen=True)
class _Task:
    """What is multiplied: rows of x, features and units of the weight, bytes of a bias, (rank, features) of each
    adapter and the columns of `shrunk`."""

    tokens: int
    features: int
    units: int
    scale: float
    bias: int | None
    adapters: tuple[tuple[int, int], ...]
    slots: int

    @property
    def steps(self) -> int:
        """Products of 16 ranks that the adapters take."""
        return -(-max((rank for rank, _ in self.adapters), default=0) // 16)


def _call(task: _Task, split: Split, inputs: Sequence[jax.Array], out: jax.ShapeDtypeStruct) -> jax.Array:
    scratch = {"ring_s": plgpu.SMEM((split.warps * split.warp_bytes // 4,), jnp.uint32)}
    if split.cluster > 1:
        box = (split.cluster - 1) * split.tokens * split.rows * _ROWS
        scratch |= {"box_s": plgpu.SMEM((box,), jnp.float32), "arrived_s": plgpu.SMEM((4,), jnp.uint32)}

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
        grid=(out.shape[1] // (_ROWS * split.rows),),
        grid_names=("block",),
        **clusters,
        num_threads=split.warps // 4,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=f"nvfp4_few_m{split.tokens}",
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


class _Program:
    """Emits the instructions of one thread."""

    def __init__(self, task: _Task, split: Split, place: _Place, pointers: list[ir.Value], shared: dict):
        self.task, self.split, self.shared = task, split, shared
        self.x, self.words, self.scales, self.multiplier = pointers[:4]
        self.bias = None if task.bias is None else pointers[4]
        self.t, self.b = (
            (pointers[-2 - len(task.adapters)], pointers[-1 - len(task.adapters) : -1]) if task.steps else (None, [])
        )
        self.y = pointers[-1]
        self.part, self.thread, self.warp = place.part, place.thread, place.warp
        self.octets = split.tokens // 8
        self.first_row = mul(place.block, split.rows)  # in operands of 16 features
        self.is_first = less(self.part, 1) if split.cluster > 1 else lanes.const(1)
        self.lane = rem(self.thread, 32)
        self.g, self.q = div(self.lane, 4), rem(self.lane, 4)
        self.ring = add(self.shared["ring_s"], mul(self.warp, split.warp_bytes))

    def emit(self) -> None:
        split = self.split
        if split.cluster > 1:  # first: its fence might wait for copies under way
            size = split.tokens * split.rows * _ROWS * 4
            lanes.begin_exchange([(self.shared["arrived_s"], (split.cluster - 1) * size)], self.thread)
        first, count = self._units()
        self._lane_offsets()
        at = self._sources(first)
        most = math.ceil(math.ceil(self.task.units / split.cluster) / split.warps)
        ahead = min(split.depth, most)
        for d in range(ahead):
            self._request(add(self.ring, d * split.slot_bytes), at, less(d, count))
            lanes.end_group()
            at = self._next(at)
        terms = self._terms()
        jobs = self._fetch_adapters()
        sums = self._loop(count, ahead, at if most > ahead else None)
        self._leave(sums)
        self._multiply_adapters(jobs)
        lanes.block_barrier()
        if split.cluster > 1:
            lanes.all_began()
        self._finish(terms)

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

    def _sources(self, first: ir.Value) -> list[ir.Value]:
        """Addresses of what this lane copies of a unit: words, scales, x."""
        units, rows = self.task.units, self.split.rows
        tile, quarter = div(self.first_row, 4), rem(self.first_row, 4)
        unit = add(mul(tile, units), first)
        words = lanes.address(self.words, add(mul(unit, 2048), add(mul(quarter, 512), mul(self.lane, 16))))
        scales = add(mul(unit, 256), add(mul(quarter, 64), mul(self.lane, 16)))
        if rows == 8:  # lanes 16-31 have the second tile
            scales = add(scales, mul(div(self.lane, 16), (units - 1) * 256))
        x = add(mul(div(self.lane, 8), units * 128), add(mul(first, 128), mul(rem(self.lane, 8), 16)))
        return [words, lanes.address(self.scales, scales), lanes.address(self.x, x)]

    def _next(self, at: list[ir.Value]) -> list[ir.Value]:
        """The addresses one unit on."""
        return [lanes.address(a, lanes.const(step)) for a, step in zip(at, (2048, 256, 128), strict=True)]

    def _request(self, slot: ir.Value, at: list[ir.Value], flag: ir.Value) -> None:
        """Starts the copies of a unit where `flag` is 1."""
        words, scales, x = at
        rows, units, x_bytes = self.split.rows, self.task.units, self.split.tokens * 128
        rest = add(slot, self.to_rest)
        of_tile = [(r // 4) * units * 2048 + r % 4 * 512 for r in range(rows)]
        lanes.copy(rest, words, [(x_bytes + 512 * r, there) for r, there in enumerate(of_tile)], flag)
        some = flag if rows == 8 else both(flag, less(self.lane, 4 * rows))
        lanes.copy(rest, scales, [(x_bytes + 512 * rows, 0)], some)
        low = add(slot, self.to_x)
        high = lanes.xor(low, 64)
        for i in range(math.ceil(self.task.tokens / 4)):  # a token that is not there spoils no other
            exists = both(flag, self.x_exists[i]) if i in self.x_exists else flag
            lanes.copy((low, high)[i % 2], x, [(512 * i, 4 * i * units * 128)], exists)

    def _loop(self, count: ir.Value, ahead: int, at: list[ir.Value] | None) -> list[list[list[ir.Value]]]:
        """Sums of this warp's units, [row][octet] of four. `at`: addresses of unit `ahead`, None where there is
        none."""
        split, zero = self.split, lanes.fconst(0.0)
        start = [self.ring, *(at or []), *[zero] * (4 * split.rows * self.octets)]
        last = add(self.ring, (ahead - 1) * split.slot_bytes)

        def unit(i: ir.Value, carry: list[ir.Value]) -> list[ir.Value]:
            slot, *rest = carry
            at_, flat = (rest[:3], rest[3:]) if at else ([], rest)
            lanes.wait_groups(ahead - 1)
            lanes.warp_barrier()
            sums = self._by_row(flat)
            x = self._read_x(slot)
            sums = [self._multiply(row, x, *self._read(slot, r)) for r, row in enumerate(sums)]
            if at:
                lanes.warp_barrier()
                self._request(slot, at_, less(add(i, ahead), count))
                at_ = self._next(at_)
            lanes.end_group()
            after = either(less(slot, last), add(slot, split.slot_bytes), self.ring)
            return [after, *at_, *(value for row in sums for four in row for value in four)]

        flat = lanes.repeat(count, start, unit)[-4 * split.rows * self.octets :]
        return self._by_row(flat)

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
        words_at = self.split.tokens * 128
        scales_at = words_at + 512 * self.split.rows
        words = lanes.read_shared(add(slot, self.to_rest), 4, words_at + 512 * row)
        return words, lanes.read_shared(add(slot, self.from_scales), 2, scales_at + 64 * row)

    def _multiply(self, sums: list, x: list, words: list[ir.Value], scales: list[ir.Value]) -> list[list[ir.Value]]:
        """The sums of a row, four for each octet, plus those of a unit."""
        for step, a in enumerate(operands(words, scales)):
            sums = [lanes.multiply(four, a, x[o][2 * step : 2 * step + 2]) for o, four in enumerate(sums)]
        return sums

    # ---- what is added ----

    def _item(self, start: int) -> tuple[ir.Value, ir.Value]:
        """(token, group of four features) of what this thread finishes."""
        index = add(self.thread, start)
        return div(index, 4 * self.split.rows), rem(index, 4 * self.split.rows)

    def _feature(self) -> ir.Value:
        """First of the four features that this thread finishes, whatever the token."""
        return add(mul(self.first_row, _ROWS), mul(self._item(0)[1], 4))

    def _terms(self) -> tuple[list[ir.Value], list[ir.Value] | None]:
        """Words of the multiplier and of the bias for this thread's features."""
        feature = self._feature()
        multiplier = lanes.load(lanes.address(self.multiplier, mul(feature, 4)), 4, self.is_first)
        if self.bias is None:
            return multiplier, None
        size = self.task.bias
        return multiplier, lanes.load(lanes.address(self.bias, mul(feature, size)), size, self.is_first)

    def _fetch_adapters(self) -> list[tuple]:
        """This warp's jobs, each 16 ranks of a row: (whether there is one, words of B, words of t). Job number i of all
        is row i % rows and step i // rows, and warp i % warps has it."""
        jobs, split = [], self.split
        for start in range(0, split.rows * self.task.steps, split.warps):
            number = add(self.warp, start)
            row, step = rem(number, split.rows), div(number, split.rows)
            exists = less(step, self.task.steps)
            feature = mul(add(self.first_row, row), _ROWS)
            base, within, width, rank, column = self._adapter_of(feature)
            first = add(mul(step, 16), mul(self.q, 4))
            ok = both(both(exists, self.is_first), both(less(first, rank), less(feature, self.task.features)))
            at = mul(add(mul(first, width), add(within, mul(self.g, 2))), 2)
            b = [lanes.load(lanes.address(base, add(at, mul(width, 2 * i))), 1, ok)[0] for i in range(4)]
            t = []
            for o in range(self.octets):
                token = add(self.g, 8 * o)
                place = mul(add(mul(token, self.task.slots), add(column, first)), 2)
                t.append(lanes.load(lanes.address(self.t, place), 2, both(ok, less(token, self.task.tokens))))
            jobs.append((exists, b, t))
        return jobs

    def _adapter_of(self, feature: ir.Value) -> tuple[ir.Value, ...]:
        """(B, feature within it, its features, its rank, its first column of t) of the adapter at `feature`."""
        found, begin = None, 0
        for i, ((rank, width), base) in enumerate(zip(self.task.adapters, self.b, strict=True)):
            this = [base, *(lanes.const(value) for value in (begin, width, rank, TILE * i))]
            here = less(begin - 1, feature)
            found = this if found is None else [either(here, *both_) for both_ in zip(this, found, strict=True)]
            begin += width
        base, begin, width, rank, column = found
        return base, add(feature, mul(begin, -1)), width, rank, column

    def _multiply_adapters(self, jobs: list[tuple]) -> None:
        """Bᵀ tᵀ of each job to this warp's shared memory behind its sums, [job][token][feature]."""
        for number, (exists, b, t) in enumerate(jobs):
            a = [lanes.pair(b[i], b[i + 1], high) for i in (0, 2) for high in (False, True)]
            for o in range(self.octets):
                found = lanes.multiply([lanes.fconst(0.0)] * 4, a, t[o])
                at = add(mul(add(mul(self.q, 2), 8 * o), _PIECE_ROW_BYTES), mul(self.g, 8))
                at = add(add(self.ring, at), self.split.sum_bytes + number * self.split.piece_bytes)
                for e in range(2):
                    lanes.store_shared(at, [found[e], found[e + 2]], exists, byte=e * _PIECE_ROW_BYTES)

    def _adapted(self, start: int) -> list[list[ir.Value]]:
        """What the adapters add, before their scale, to the four features that this thread finishes: of each step."""
        split, found = self.split, []
        token, group = self._item(start)
        at = add(mul(lanes.smaller(token, split.tokens - 1), _PIECE_ROW_BYTES), mul(rem(group, 4), 16))
        at = add(add(self.shared["ring_s"], at), split.sum_bytes)
        for step in range(self.task.steps):
            number = add(div(group, 4), step * split.rows)
            warp, job = rem(number, split.warps), div(number, split.warps)
            piece = add(mul(warp, split.warp_bytes), mul(job, split.piece_bytes))
            found.append(lanes.load_shared(add(at, piece), 4))
        return found

    # ---- the end ----

    def _leave(self, sums: list[list[list[ir.Value]]]) -> None:
        """This warp's sums over its slots, [token][feature]."""
        lanes.wait_groups(0)
        lanes.warp_barrier()
        at = add(self.ring, add(mul(self.q, 2 * self.split.row_bytes), mul(self.g, 4)))
        for r, row in enumerate(sums):
            for o, four in enumerate(row):
                for i, value in enumerate(four):  # feature g + 8 h, token 2 q + e
                    h, e = divmod(i, 2)
                    byte = (8 * o + e) * self.split.row_bytes + 4 * (_ROWS * r + 8 * h)
                    lanes.store_shared(at, [value], byte=byte)

    def _finish(self, terms: tuple) -> None:
        split = self.split
        items = split.tokens * 4 * split.rows
        found = []
        for start in range(0, items, 32 * split.warps):
            token, group = self._item(start)
            exists = less(add(self.thread, start), items)
            at = add(mul(lanes.smaller(token, split.tokens - 1), split.row_bytes), mul(group, 16))
            mine = add(self.shared["ring_s"], at)
            found.append((start, token, exists, self._over_warps(mine)))
        if split.cluster == 1:
            for start, token, exists, whole in found:
                self._store(start, token, exists, whole, terms)
            return
        box = self.shared["box_s"]
        with lanes.only(less(0, self.part)):
            for start, _, exists, whole in found:
                place = add(mul(add(self.part, -1), items), add(self.thread, start))
                lanes.send(add(box, mul(place, 16)), lanes.const(0), whole, self.shared["arrived_s"], exists)
        with lanes.only(self.is_first):
            lanes.wait_for(self.shared["arrived_s"])
            for start, token, exists, whole in found:
                place = add(box, mul(lanes.smaller(add(self.thread, start), items - 1), 16))
                others = [lanes.load_shared(place, 4, byte=16 * items * i) for i in range(split.cluster - 1)]
                whole = [lanes.total(values) for values in zip(whole, *others, strict=True)]
                self._store(start, token, exists, whole, terms)

    def _over_warps(self, at: ir.Value) -> list[ir.Value]:
        """The sums of all warps at this place, eight at a time: more would take too many registers."""
        split, sums = self.split, []
        for begin in range(0, split.warps, 8):
            some = range(begin, min(begin + 8, split.warps))
            found = [lanes.load_shared(at, 4, byte=split.warp_bytes * w) for w in some]
            sums.append([lanes.total(values) for values in zip(*found, strict=True)])
        return [lanes.total(values) for values in zip(*sums, strict=True)]

    def _store(self, start: int, token: ir.Value, exists: ir.Value, whole: list[ir.Value], terms: tuple) -> None:
        """Four features of a token: · multiplier (+ bias) (+ adapters), as bf16."""
        multiplier, bias = terms
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
