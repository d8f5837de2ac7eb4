"""What adapters add to a product of few tokens: t B, for t = x A that is given, or that the kernel has computed.

Bᵀ [16 features × 16 ranks] of each is multiplied with t by some warp of the first block; row g of the operand is
feature 2 g and row g + 8 feature 2 g + 1, so that one word of B holds both, and rank 4 q + (0, 1, 2, 3) stands at
columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9, so that a thread's words of t lie together. The instructions of one thread, as
all of `few_tokens`, which says where the barriers stand.
"""

from __future__ import annotations

import dataclasses

from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.lanes import add, both, div, either, less, mul, rem
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.split import PIECE_ROW_BYTES, ROWS, Layout, Split, Task
from qerl_kernels.nvfp4_matmul.sums import Place, Sums

# Words of x A in parts that a thread may hold during the loop. To add them up before it costs 0.5 us: a warp then waits
# for them while what it has asked for of the weight comes in (down of 7B, 8 tokens: tools/results/LOG.md).
MOST_HELD = 28


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a product.

    Attributes:
      task: of the kernel.
      split: of the kernel.
      layout: of the block's shared memory.
      place: of the thread.
      shared: where each array of shared memory begins.
      a_or_t: address of x A; of A where the split shrinks; None without adapters.
      b: address of each B.
    """

    task: Task
    split: Split
    layout: Layout
    place: Place
    shared: dict[str, ir.Value]
    a_or_t: ir.Value | None
    b: list[ir.Value]

    def fetch(self) -> list[tuple]:
        """This warp's jobs, each 16 ranks of a row: (whether there is one, its step, words of B, words of t if that is
        given). Job number i of all is row i % rows and step i // rows, and warp i % warps has it."""
        jobs, split = [], self.split
        for start in range(0, split.rows * self.task.steps, split.warps):
            number = add(self.place.warp, start)
            row, step = rem(number, split.rows), div(number, split.rows)
            exists = less(step, self.task.steps)
            feature = mul(add(self.place.first_row, row), ROWS)
            base, within, width, rank, column = self.at(feature)
            first = add(mul(step, 16), mul(self.place.q, 4))
            ok = both(both(exists, self.place.is_first), both(less(first, rank), less(feature, self.task.features)))
            at = mul(add(mul(first, width), add(within, mul(self.place.g, 2))), 2)
            b = [lanes.load(lanes.address(base, add(at, mul(width, 2 * i))), 1, ok)[0] for i in range(4)]
            t = [] if split.shrinks else [self._fetch_t(o, add(column, first), ok) for o in range(split.octets)]
            jobs.append((exists, step, b, t))
        if len(jobs) * split.octets * 4 * self.task.parts > MOST_HELD:
            return [(exists, step, b, list(map(self._summed, t))) for exists, step, b, t in jobs]
        return jobs

    def _fetch_t(self, octet: int, column: ir.Value, ok: ir.Value) -> list[ir.Value]:
        """Four ranks of this thread's token, from `column` on: two words, or four for each part."""
        token, task = add(self.place.g, 8 * octet), self.task
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

    def at(self, feature: ir.Value) -> tuple[ir.Value, ...]:
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

    def multiply(self, jobs: list[tuple]) -> None:
        """Bᵀ tᵀ of each job to this warp's shared memory behind its sums, [job][token][feature]."""
        for number, (exists, step, b, t) in enumerate(jobs):
            t = list(map(self._summed, t)) or self._kept(step)
            a = [lanes.pair(b[i], b[i + 1], high) for i in (0, 2) for high in (False, True)]
            for o in range(self.split.octets):
                found = lanes.multiply([lanes.fconst(0.0)] * 4, a, t[o])
                at = add(mul(add(mul(self.place.q, 2), 8 * o), PIECE_ROW_BYTES), mul(self.place.g, 8))
                at = add(add(self.place.memory, at), self.layout.sum_bytes + number * self.layout.piece_bytes)
                for e in range(2):
                    lanes.store_shared(at, [found[e], found[e + 2]], exists, byte=e * PIECE_ROW_BYTES)

    def added(self, token: ir.Value, group: ir.Value) -> list[list[ir.Value]]:
        """What the adapters add, before their scale, to the four features that this thread finishes: of each step."""
        split, found = self.split, []
        at = add(mul(lanes.smaller(token, split.tokens - 1), PIECE_ROW_BYTES), mul(rem(group, 4), 16))
        at = add(add(self.shared["ring_s"], at), self.layout.sum_bytes)
        for step in range(self.task.steps):
            number = add(div(group, 4), step * split.rows)
            warp, job = rem(number, split.warps), div(number, split.warps)
            piece = add(mul(warp, self.layout.warp_bytes), mul(job, self.layout.piece_bytes))
            found.append(lanes.load_shared(add(at, piece), 4))
        return found

    def keep(self, parts: Sums, wholes: list[list[ir.Value]], rank: ir.Value | None) -> None:
        """x A in bf16 to the block's shared memory, [token][rank], zeros where the adapter has no such rank."""
        found = parts.over_blocks(wholes)
        for (_, number, exists, _, group), (_, whole) in zip(parts.items(), found, strict=True):
            words = [lanes.to_bf16(whole[0], whole[1]), lanes.to_bf16(whole[2], whole[3])]
            if rank is not None:
                there = less(mul(group, 4), rank)
                words = [either(there, word, lanes.const(0)) for word in words]
            at = add(self.shared["t_s"], mul(number, 8))
            lanes.store_shared(at, [lanes.as_float(word) for word in words], exists)

    def _kept(self, step: ir.Value) -> list[list[ir.Value]]:
        """Words of x A as the operand of each octet wants them."""
        steps = self.layout.steps
        within = add(mul(lanes.smaller(step, steps - 1), 32), mul(self.place.q, 8))
        at = add(add(self.shared["t_s"], within), mul(self.place.g, 32 * steps))
        return [lanes.read_shared(at, 2, byte=8 * o * 32 * steps) for o in range(self.split.octets)]
