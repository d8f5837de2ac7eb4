"""The NVFP4 matrix product for Hopper with up to 32 tokens, where what a kernel pays once counts as much as its bytes.

    y[m, n] = multiplier[n] · Σ_k x[m, k] · w[n, k]  (+ bias[n])  (+ scale · Σ_r t[m, r] · b[r, n])

t = x A is given, whole or as sums over parts of k, or with `Split.shrinks` computed here: a launch less where nothing
else precedes the product.

`mosaic_gpu` streams a weight through a ring that a producer fills by TMA; before its first product stand the fetch of
tensor maps, the barriers' set-up and a hand-over, after its last two exchanges of sums and a store through shared
memory. Here no warp waits for another before its last product.

How the work is cut. A warp takes 16 · `rows` output features and a run of units of 64 along the contraction, which it
shares with nobody: so it also brings its own part of x, and there is nothing to hand over. The `warps` of a block and
the `cluster` blocks of a cluster have the same features and lie one after another along the contraction. A warp copies
its units to a ring of slots (`ring`), makes operands of the weight (`fragments`), and multiplies with
`mma.sync.m16n8k16`.

The end. Each warp writes its sums over its own slots as [token][feature], and the block meets. A thread then takes four
features of a token: it adds up the warps, and in a cluster the blocks but the first send it to the first, which adds
those up too (`sums`), scales, and stores eight bytes. The adapters' products t B are made by the first block
(`adapters`), behind the sums of its warps. What this needs from memory (B, t, multiplier, bias) is asked for before the
loop.

x A. A warp multiplies Aᵀ [16 ranks × 16 of k] with the x that it has in registers anyway. So it has its own part of t,
as it has its own part of every sum, and y is linear in both: it rounds its part to bf16 and adds what B makes of it to
its sums, and nothing but these crosses the block and the cluster. (To add up t first, as where it is given, took two
more barriers and an exchange before the last product.) B lies in shared memory, brought behind the first units by the
whole block, ranks and features that there are not as zeros. All clusters whose features have the same adapter compute
the same t: to share it would take a barrier of the whole GPU.

Why nothing tears or hangs. A slot is written by copies of its warp and read by that warp alone: a lane waits for its
own copies, `bar.warp.sync` makes those of the others visible, and a second one stands between the last read and the
copies that fill the slot anew; after the loop no copy is under way (all groups that hold any have been waited for).
One barrier of the block stands between the sums' writes and reads. Between blocks there is one barrier in the first
block's shared memory, set up before the loop and completed once, by the bytes of all others, each of which sends the
same number and waits for nobody (but for that set-up, which every block announces before it waits for anything). Every
thread that reads what came has waited for that barrier itself. Where the kernel shrinks, one more barrier of the block
stands between the loop and the sums: every thread has then waited for its own copies of B.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.lanes import add, both, div, either, less, mul, rem
from qerl_kernels.launch import launch
from qerl_kernels.nvfp4_matmul.adapters import Adapters
from qerl_kernels.nvfp4_matmul.dequant import operands
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS, can_fuse, describe, is_lora_x
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.ring import Ring
from qerl_kernels.nvfp4_matmul.split import Layout, Split, Task, fits
from qerl_kernels.nvfp4_matmul.sums import Place, Sums


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
    task = Task(
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
        raise ValueError(f"matmul: x is {describe(x)}, the weight {n} x {k}, {split}")
    if not fits(split, n, k, max(ranks, default=0)):
        raise ValueError(f"matmul: {split} does not fit a multiprocessor or {n} x {k} features, adapters {shapes}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"matmul: the bias is {describe(bias)}, the weight {n} x {k}")
    if expand and not can_fuse(n, shapes, split.features if split.shrinks else MMA_ROWS):
        raise ValueError(f"matmul: adapters of shapes {shapes} do not fit {n} features and {split}")
    if any(b.dtype != jnp.bfloat16 for b in expand):
        raise ValueError(f"matmul: B are {list(map(describe, expand))}, all must be bfloat16")
    if expand and split.shrinks:
        good = shrunk is None and a is not None and a.shape == (k, sum(ranks)) and a.dtype == jnp.bfloat16
    else:
        good = a is None and is_lora_x(shrunk, m, ranks)
    if not good:
        raise ValueError(
            f"matmul: x A is {describe(shrunk)}, A is {describe(a)}; x {describe(x)}, "
            f"adapters of shapes {shapes}, {split}"
        )


def _call(task: Task, split: Split, inputs: Sequence[jax.Array], out: jax.ShapeDtypeStruct) -> jax.Array:
    def emit(place, pointers, shared):
        _Program(task, split, (*place, mgpu.utils.warp_idx()), pointers, shared).emit()

    return launch(
        emit,
        inputs,
        out,
        name=f"nvfp4_few_m{split.tokens}{'_shrinks' if split.shrinks else ''}",
        clusters=split.clusters(task.features),
        blocks=split.cluster,
        warps=split.warps,
        shared_bytes=Layout(split, task.rank).arrays(),
    )


class _Program:
    """Emits the instructions of one thread."""

    def __init__(
        self,
        task: Task,
        split: Split,
        place: tuple[ir.Value, ...],
        pointers: list[ir.Value],
        shared: dict[str, ir.Value],
    ):
        """`place`: the cluster, the block in it, the thread and the warp in that. `pointers`: of the inputs and y."""
        self.task, self.split, self.shared, self.layout = task, split, shared, Layout(split, task.rank)
        x, words, scales, self.multiplier, *rest = pointers
        self.bias = None if task.bias is None else rest.pop(0)
        self.y = rest.pop()
        cluster, part, thread, warp = place
        first_row = mul(cluster, split.rows)
        is_first = less(part, 1) if split.cluster > 1 else lanes.const(1)
        lane = rem(thread, 32)
        g, q = div(lane, 4), rem(lane, 4)
        memory = add(shared["ring_s"], mul(warp, self.layout.warp_bytes))
        self.place = Place(part, is_first, first_row, thread, warp, lane, g, q, memory)
        common = (split, self.layout, self.place, shared)
        self.sums = Sums(*common)
        a_or_t, *b = rest or [None]
        self.adapters = Adapters(task, *common, a_or_t, b)
        self.ring = Ring(self.place, self.adapters, words, scales, x)

    def emit(self) -> None:
        split = self.split
        if split.cluster > 1:  # first: its fence might wait for copies under way
            size = (split.cluster - 1) * self.layout.items * 16
            lanes.begin_exchange([(self.shared["arrived_s"], size)], self.place.thread)
        first, count = self._units()
        at = self.ring.sources(first)
        most = math.ceil(math.ceil(self.task.units / split.cluster) / split.warps)
        ahead = min(split.depth, most)
        for d in range(ahead):
            self.ring.request(add(self.place.memory, d * self.layout.slot_bytes), at, less(d, count))
            if split.shrinks and d == ahead - 1:
                self.adapters.request()  # in the last group: the first unit is waited for first
            lanes.end_group()
            at = self.ring.advanced(at)
        terms = self._terms()
        if split.shrinks:
            multiplier = self._multiplier()
        else:
            jobs = self.adapters.fetch()
        sums = self._loop(count, ahead, at if most > ahead else None)
        lanes.wait_groups(0)
        lanes.warp_barrier()
        if split.shrinks:
            lanes.block_barrier()
            parts = sums[split.rows :]
            self.sums.leave(self.adapters.added_to(sums[: split.rows], parts, multiplier, self.ring.rank))
        else:
            self.sums.leave(sums)
            self.adapters.multiply(jobs)
        lanes.block_barrier()
        if split.cluster > 1:
            lanes.all_began()
        self._finish(terms)

    # ---- the loop ----

    def _units(self) -> tuple[ir.Value, ir.Value]:
        """(first unit, number of units) of this warp: shared out evenly over the blocks, a block's over its warps."""
        units, split = self.task.units, self.split
        each, more = divmod(units, split.cluster)
        part, warp = self.place.part, self.place.warp
        begin = add(mul(part, each), lanes.smaller(part, more))
        of_block = add(lanes.const(each), less(part, more))
        each, more = div(of_block, split.warps), rem(of_block, split.warps)
        first = add(begin, add(mul(warp, each), lanes.smaller(warp, more)))
        return first, add(each, less(warp, more))

    def _loop(self, count: ir.Value, ahead: int, at: list[ir.Value] | None) -> list[list[list[ir.Value]]]:
        """Sums of this warp's units, [row][octet] of four, behind the rows' those of x A, [16 ranks][octet]. `at`:
        addresses of unit `ahead`, None where there is none."""
        split, zero, at = self.split, lanes.fconst(0.0), at or []
        ring, memory = self.ring, self.place.memory
        carried = 4 * (split.rows + self.layout.steps) * split.octets
        start = [memory, *at, *[zero] * carried]
        last = add(memory, (ahead - 1) * self.layout.slot_bytes)

        def unit(i: ir.Value, carry: list[ir.Value]) -> list[ir.Value]:
            slot, at_, flat = carry[0], carry[1 : 1 + len(at)], carry[1 + len(at) :]
            lanes.wait_groups(ahead - 1)
            lanes.warp_barrier()
            sums = self._by_row(flat)
            x = ring.x_of(slot)
            parts = [self._shrink(part, x, slot, i) for i, part in enumerate(sums[split.rows :])]
            sums = [self._multiply(row, x, *ring.weight_of(slot, r)) for r, row in enumerate(sums[: split.rows])]
            if at:
                lanes.warp_barrier()
                ring.request(slot, at_, less(add(i, ahead), count))
                at_ = ring.advanced(at_)
            lanes.end_group()
            after = either(less(slot, last), add(slot, self.layout.slot_bytes), memory)
            return [after, *at_, *(value for row in sums + parts for four in row for value in four)]

        return self._by_row(lanes.repeat(count, start, unit)[-carried:])

    def _by_row(self, flat: list[ir.Value]) -> list[list[list[ir.Value]]]:
        fours = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        octets = self.split.octets
        return [fours[i : i + octets] for i in range(0, len(fours), octets)]

    def _multiply(self, sums: list, x: list, words: list[ir.Value], scales: list[ir.Value]) -> list[list[ir.Value]]:
        """The sums of a row, four for each octet, plus those of a unit."""
        for step, a in enumerate(operands(words, scales)):
            sums = self._plus(sums, a, x, step)
        return sums

    def _shrink(self, part: list, x: list, slot: ir.Value, number: int) -> list[list[ir.Value]]:
        """The sums of 16 ranks, four for each octet, plus those of a unit."""
        for step, a in enumerate(self.ring.a_of(slot, number)):
            part = self._plus(part, a, x, step)
        return part

    def _plus(self, sums: list, a: list[ir.Value], x: list, step: int) -> list[list[ir.Value]]:
        return [lanes.multiply(four, a, x[o][2 * step : 2 * step + 2]) for o, four in enumerate(sums)]

    # ---- the end ----

    def _feature(self) -> ir.Value:
        """First of the four features that this thread finishes, whatever the token."""
        return add(mul(self.place.first_row, MMA_ROWS), mul(self.sums.item(0)[1], 4))

    def _multiplier(self) -> list[list[ir.Value]]:
        """The multiplier of features g and g + 8 of each row."""
        at = lanes.address(self.multiplier, mul(add(mul(self.place.first_row, MMA_ROWS), self.place.g), 4))
        places = [[4 * (MMA_ROWS * r + 8 * h) for h in range(2)] for r in range(self.split.rows)]
        load = lambda byte: lanes.as_float(lanes.load(at, 1, lanes.const(1), byte)[0])  # noqa: E731
        return [list(map(load, row)) for row in places]

    def _terms(self) -> tuple[list[ir.Value] | None, list[ir.Value] | None]:
        """Words of the multiplier, where the sums do not have it in them, and of the bias for this thread's
        features."""
        feature, multiplier = self._feature(), None
        if not self.split.shrinks:
            multiplier = lanes.load(lanes.address(self.multiplier, mul(feature, 4)), 4, self.place.is_first)
        if self.bias is None:
            return multiplier, None
        size = self.task.bias
        return multiplier, lanes.load(lanes.address(self.bias, mul(feature, size)), size, self.place.is_first)

    def _finish(self, terms: tuple) -> None:
        wholes = self.sums.over_warps()
        clustered = self.split.cluster > 1
        if clustered:
            with lanes.only(less(0, self.place.part)):
                self.sums.send(wholes)
            with lanes.only(self.place.is_first):
                lanes.wait_for(self.shared["arrived_s"])
        with lanes.only(self.place.is_first) if clustered else contextlib.nullcontext():
            for start, whole in self.sums.over_blocks(wholes):
                self._store(start, whole, terms)

    def _store(self, start: int, whole: list[ir.Value], terms: tuple) -> None:
        """Four features of a token: · multiplier (+ bias) (+ adapters), as bf16."""
        multiplier, bias = terms
        token, _ = self.sums.item(start)
        exists = less(add(self.place.thread, start), self.split.tokens * self.sums.groups)
        values = whole
        if multiplier is not None:
            values = [lanes.fmul(value, lanes.as_float(word)) for value, word in zip(whole, multiplier, strict=True)]
        if bias is not None:
            wide = self.task.bias == 4
            added = [lanes.as_float(bias[i]) if wide else lanes.half_of(bias[i // 2], i % 2 == 1) for i in range(4)]
            values = [lanes.fadd(value, more) for value, more in zip(values, added, strict=True)]
        if self.task.steps and not self.split.shrinks:
            scale, steps = lanes.fconst(self.task.scale), self.adapters.added(*self.sums.item(start))
            values = [lanes.fma(scale, lanes.total(more), v) for v, *more in zip(values, *steps, strict=True)]
        words = [lanes.to_bf16(values[0], values[1]), lanes.to_bf16(values[2], values[3])]
        row = -(-self.task.features // TILE) * TILE
        place = lanes.address(self.y, mul(add(mul(token, row), self._feature()), 2))
        lanes.store(place, words, both(exists, less(token, self.task.tokens)))
