"""What adapters add to a product of few tokens: t B, for t = x A that is given, or of which each warp has its part.

Given: Bᵀ [16 features × 16 ranks] is multiplied with t by some warp of the first block; row g of the operand is feature
2 g and row g + 8 feature 2 g + 1, so that one word of B holds both, and rank 4 q + (0, 1, 2, 3) stands at columns 2 q,
2 q + 1, 2 q + 8, 2 q + 9, so that a thread's words of t lie together (`fetch`, `multiply`, `added`).

A part of it: every warp multiplies all of the block's Bᵀ with its own part. Features and ranks are in order, because
the products go into the warp's sums; `ldmatrix.trans` reads B from shared memory so, and `movmatrix` turns t around
(`request`, `added_to`).

The instructions of one thread, as all of `few_tokens`, which says where the barriers stand.
"""

from __future__ import annotations

import dataclasses

from jaxlib.mlir import ir

from qerl_kernels import lanes
from qerl_kernels.dispatch import SMS
from qerl_kernels.lanes import add, both, div, either, less, mul, rem
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.split import PIECE_ROW_BYTES, Layout, Split, Task
from qerl_kernels.nvfp4_matmul.sums import Place

# Words of x A in parts that a thread may hold during the loop; and where that leaves registers for all: no more blocks
# than multiprocessors, of up to 8 warps. To add them up before it costs 0.5 us: a warp then waits for them, which come
# behind what it has asked for of the weight (down of 7B, 8 and 16 tokens: tools/results/LOG.md).
MOST_HELD, MOST_HELD_ALONE = 28, 64


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
        """This warp's jobs, each 16 ranks of a row: (whether there is one, words of B, words of t). Job number i of all
        is row i % rows and step i // rows, and warp i % warps has it."""
        jobs, split = [], self.split
        for start in range(0, split.rows * self.task.steps, split.warps):
            number = add(self.place.warp, start)
            row, step = rem(number, split.rows), div(number, split.rows)
            exists = less(step, self.task.steps)
            feature = mul(add(self.place.first_row, row), MMA_ROWS)
            base, within, width, rank, column = self.at(feature)
            first = add(mul(step, 16), mul(self.place.q, 4))
            ok = both(both(exists, self.place.is_first), both(less(first, rank), less(feature, self.task.features)))
            at = mul(add(mul(first, width), add(within, mul(self.place.g, 2))), 2)
            b = [lanes.load(lanes.address(base, add(at, mul(width, 2 * i))), 1, ok)[0] for i in range(4)]
            jobs.append((exists, b, [self._fetch_t(o, add(column, first), ok) for o in range(split.octets)]))
        blocks = split.clusters(self.task.features) * split.cluster
        most = MOST_HELD_ALONE if blocks <= SMS and split.warps <= 8 else MOST_HELD
        if len(jobs) * split.octets * 4 * self.task.parts > most:
            return [(exists, b, list(map(self._summed, t))) for exists, b, t in jobs]
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
        for number, (exists, b, t) in enumerate(jobs):
            t = list(map(self._summed, t))
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

    def request(self) -> None:
        """Starts the copies of the block's features of B to shared memory, [rank][feature]; zeros where there is no
        such rank or feature."""
        layout, chunks = self.layout, 2 * self.split.rows
        count = MMA_ROWS * layout.steps * chunks
        base, within, width, rank, _ = self.at(mul(self.place.first_row, MMA_ROWS))
        for start in range(0, count, 32 * self.split.warps):
            number = add(self.place.thread, start)
            row, chunk = div(number, chunks), rem(number, chunks)
            feature = add(mul(self.place.first_row, MMA_ROWS), mul(chunk, 8))
            exists = both(less(row, rank), less(feature, self.task.features))
            at = add(add(self.shared["b_s"], mul(row, layout.b_row_bytes)), mul(chunk, 16))
            source = add(mul(row, width), add(within, mul(chunk, 8)))
            mine = less(number, count)
            lanes.copy(at, lanes.address(base, mul(source, 2)), [(0, 0)], both(mine, exists))
            lanes.store_shared(at, [lanes.fconst(0.0)] * 4, both(mine, less(exists, 1)))

    def added_to(
        self, sums: list[list[list[ir.Value]]], parts: list[list[list[ir.Value]]], multiplier: list[list[ir.Value]],
        rank: ir.Value | None,
    ) -> list[list[list[ir.Value]]]:  # fmt: skip
        """multiplier · sums + scale · Bᵀ tᵀ, where t is the warp's own part of x A, `parts`, rounded to bf16.

        `rank`: of the adapter, where the parts have more, whose values mean nothing.
        """
        t = [[self._operand(four, step, rank) for four in part] for step, part in enumerate(parts)]
        scale, zero = lanes.fconst(self.task.scale), lanes.fconst(0.0)
        matrix, row = div(self.place.lane, 8), rem(self.place.lane, 8)  # ranks 8 (matrix / 2), features 8 (matrix % 2)
        at = mul(add(mul(div(matrix, 2), 8), row), self.layout.b_row_bytes)
        at = add(self.shared["b_s"], add(at, mul(rem(matrix, 2), 16)))
        found = []
        for r, (fours, of_row) in enumerate(zip(sums, multiplier, strict=True)):
            places = [MMA_ROWS * step * self.layout.b_row_bytes + 2 * MMA_ROWS * r for step in range(len(t))]
            b = [lanes.read_matrices(at, byte, transposed=True) for byte in places]
            found.append([])
            for octet, four in enumerate(fours):
                more = [zero] * 4
                for each, of_step in zip(b, t, strict=True):
                    more = lanes.multiply(more, each, of_step[octet])
                own = [lanes.fmul(value, of_row[i // 2]) for i, value in enumerate(four)]
                found[-1].append([lanes.fma(scale, m, value) for m, value in zip(more, own, strict=True)])
        return found

    def _operand(self, four: list[ir.Value], step: int, rank: ir.Value | None) -> list[ir.Value]:
        """Sums of 16 ranks (g and g + 8, of tokens 2 q and 2 q + 1) as what Bᵀ is multiplied with (of token g)."""
        words = [lanes.to_bf16(four[0], four[1]), lanes.to_bf16(four[2], four[3])]
        if rank is not None:
            there = [less(add(self.place.g, MMA_ROWS * step + 8 * h), rank) for h in range(2)]
            words = [either(ok, word, lanes.const(0)) for ok, word in zip(there, words, strict=True)]
        return list(map(lanes.transposed, words))
