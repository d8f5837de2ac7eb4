"""The LoRA term `scale · (x A) B` of the skinny GEMM.

`x A` given, whole or as split-K partials: Bᵀ [16 features, 16 ranks] is multiplied with it by some warp of the
cluster's first CTA. Row g of the operand is feature 2 g and row g + 8 feature 2 g + 1, so that one word of B holds
both; rank 4 q + (0, 1, 2, 3) stands at columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9, so that a thread's words of `x A` are
neighbours (`load_jobs`, `multiply_jobs`, `read_jobs`).

`x A` computed here: every warp has a share of it and multiplies all of the CTA's Bᵀ with its share. Features and ranks
are in order, because the result goes into the warp's sums; `ldmatrix.trans` reads B from shared memory in that order,
and `movmatrix` transposes `x A` (`fetch_b`, `add_to`).

`kernel` says where the barriers stand.
"""

from __future__ import annotations

import dataclasses

from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.skinny.config import LORA_ROW_BYTES, SharedLayout, SkinnyConfig, SkinnyProblem
from qerl_kernels.nvfp4_matmul.skinny.thread import Thread
from qerl_kernels.ptx.arithmetic import as_float, fma, pack_bf16, pack_halves
from qerl_kernels.ptx.values import F32, I32, Ptr, tree_sum

# Words of split-K partials that a thread may hold during the mainloop; and the same where all have registers for it: no
# more CTAs than SMs, of up to 8 warps. Adding them up before the mainloop costs 0.5 us: a warp then waits for them, and
# they come behind the weight it has asked for (down of 7B, M = 8 and 16: tools/results/notes/skinny.md).
MAX_HELD, MAX_HELD_ALONE = 28, 64


@dataclasses.dataclass(frozen=True)
class LoraTerm:
    """One thread's part of the LoRA term.

    Attributes:
      problem: the GEMM.
      config: the kernel's config.
      layout: layout of shared memory.
      thread: the thread's coordinates.
      shared: address of each array in shared memory.
      lora_x: address of `x A`, or of A where the kernel computes `x A`; None without adapters.
      b: address of each B.
      sms: SMs of the GPU.
    """

    problem: SkinnyProblem
    config: SkinnyConfig
    layout: SharedLayout
    thread: Thread
    shared: dict[str, I32]
    lora_x: Ptr | None
    b: list[Ptr]
    sms: int

    # ---- x A given ----

    def load_jobs(self) -> list[tuple]:
        """This warp's jobs, each 16 ranks of an m16 tile: (whether it exists, words of B, words of `x A`). Job i of the
        CTA is m16 tile i % m16_tiles and rank tile i // m16_tiles; warp i % warps has it."""
        jobs, config, thread, machine = [], self.config, self.thread, self.thread.machine
        for start in range(0, config.m16_tiles * self.problem.rank_tiles, config.warps):
            number = thread.warp + start
            tile, rank_tile = number % config.m16_tiles, number // config.m16_tiles
            exists = rank_tile < self.problem.rank_tiles
            feature = (thread.first_tile + tile) * MMA_ROWS
            base, within, width, rank, column = self.adapter_at(feature)
            first = rank_tile * 16 + thread.q * 4
            flag = (exists & thread.is_first) & ((first < rank) & (feature < self.problem.n))
            at = (first * width + (within + thread.g * 2)) * 2
            b = [machine.load_global(base + (at + width * (2 * i)), 1, flag)[0] for i in range(4)]
            jobs.append((exists, b, [self._load_lora_x(n8, column + first, flag) for n8 in range(config.n8_tiles)]))
        ctas = config.clusters(self.problem.n) * config.cluster * config.blocks(self.problem.m)
        max_words = MAX_HELD_ALONE if ctas <= self.sms and config.warps <= 8 else MAX_HELD
        if len(jobs) * config.n8_tiles * 4 * self.problem.partials > max_words:
            return [(exists, b, list(map(self._summed, lora_x))) for exists, b, lora_x in jobs]
        return jobs

    def multiply_jobs(self, jobs: list[tuple]) -> None:
        """Bᵀ (x A)ᵀ of each job to this warp's shared memory behind its sums, [job][row][feature]."""
        thread, machine = self.thread, self.thread.machine
        for number, (exists, b, lora_x) in enumerate(jobs):
            lora_x = list(map(self._summed, lora_x))
            a = [pack_halves(machine, b[i], b[i + 1], high) for i in (0, 2) for high in (False, True)]
            for n8 in range(self.config.n8_tiles):
                products = machine.mma([machine.f32(0.0)] * 4, a, lora_x[n8])
                at = (thread.q * 2 + 8 * n8) * LORA_ROW_BYTES + thread.g * 8
                at = (thread.memory + at) + (self.layout.sum_bytes + number * self.layout.lora_bytes)
                for e in range(2):
                    machine.store_shared(at, [products[e], products[e + 2]], exists, byte=e * LORA_ROW_BYTES)

    def read_jobs(self, row: I32, vector: I32) -> list[list[F32]]:
        """The term, before its scale, of the four features that this thread finishes: one vector for each rank tile."""
        config, machine, vectors = self.config, self.thread.machine, []
        at = machine.minimum(row, config.tile_m - 1) * LORA_ROW_BYTES + (vector % 4) * 16
        at = (self.shared["warps_s"] + at) + self.layout.sum_bytes
        for rank_tile in range(self.problem.rank_tiles):
            number = vector // 4 + rank_tile * config.m16_tiles
            warp, job = number % config.warps, number // config.warps
            offset = warp * self.layout.warp_bytes + job * self.layout.lora_bytes
            vectors.append(machine.load_shared(at + offset, 4))
        return vectors

    def _load_lora_x(self, n8: int, column: I32, flag: I32) -> list[I32]:
        """Four ranks of this thread's row from `column` on: two words, or four for each partial."""
        row, problem, machine = self.thread.g + 8 * n8, self.problem, self.thread.machine
        flag = flag & (row < self.thread.rows)
        place = (self.thread.block * self.config.tile_m + row) * problem.lora_columns + column
        if not problem.partials:
            return machine.load_global(self.lora_x + place * 2, 2, flag)
        at, size = self.lora_x + place * 4, 4 * problem.m * problem.lora_columns
        return [word for i in range(problem.partials) for word in machine.load_global(at, 4, flag, byte=i * size)]

    def _summed(self, words: list[I32]) -> list[I32]:
        """Two words of bf16 from the four fp32 of each partial; two words stay as they are."""
        if len(words) == 2:
            return words
        machine = self.thread.machine
        sums = [tree_sum([as_float(machine, word) for word in words[i::4]]) for i in range(4)]
        return [pack_bf16(machine, sums[0], sums[1]), pack_bf16(machine, sums[2], sums[3])]

    # ---- x A computed here ----

    def fetch_b(self) -> None:
        """Starts the copies of B for the CTA's features to shared memory, [rank][feature], with zeros for missing ranks
        and features."""
        layout, thread, machine, chunks = self.layout, self.thread, self.thread.machine, 2 * self.config.m16_tiles
        count = MMA_ROWS * layout.rank_tiles * chunks
        base, within, width, rank, _ = self.adapter_at(thread.first_tile * MMA_ROWS)
        for start in range(0, count, 32 * self.config.warps):
            number = thread.index + start
            row, chunk = number // chunks, number % chunks
            feature = thread.first_tile * MMA_ROWS + chunk * 8
            exists = (row < rank) & (feature < self.problem.n)
            at = (self.shared["b_s"] + row * layout.b_row_bytes) + chunk * 16
            source = row * width + (within + chunk * 8)
            is_chunk = number < count
            machine.cp_async(at, base + source * 2, [(0, 0)], is_chunk & exists)
            machine.store_shared(at, [machine.f32(0.0)] * 4, is_chunk & ~exists)

    def add_to(
        self, sums: list[list[list[F32]]], lora_x: list[list[list[F32]]], multiplier: list[list[F32]], rank: I32 | None
    ) -> list[list[list[F32]]]:
        """multiplier · sums + scale · Bᵀ (x A)ᵀ.

        Args:
          sums: the warp's sums, [m16 tile][n8 tile] of four.
          lora_x: the warp's share of `x A`, [rank tile][n8 tile] of four, rounded to bf16 here.
          multiplier: two for each m16 tile.
          rank: the adapter's rank where `lora_x` has garbage beyond it.
        """
        thread, machine = self.thread, self.thread.machine
        lora_x = [[self._lora_x_fragment(four, i, rank) for four in fours] for i, fours in enumerate(lora_x)]
        scale, zero = machine.f32(self.problem.scale), machine.f32(0.0)
        matrix, row = thread.lane // 8, thread.lane % 8  # ranks 8 (matrix / 2), features 8 (matrix % 2)
        at = ((matrix // 2) * 8 + row) * self.layout.b_row_bytes
        at = self.shared["b_s"] + (at + (matrix % 2) * 16)
        out = []
        for tile, (fours, factors) in enumerate(zip(sums, multiplier, strict=True)):
            places = [MMA_ROWS * i * self.layout.b_row_bytes + 2 * MMA_ROWS * tile for i in range(len(lora_x))]
            b = [machine.ldmatrix(at, byte, transposed=True) for byte in places]
            out.append([])
            for n8, four in enumerate(fours):
                more = [zero] * 4
                for a_fragment, x_fragments in zip(b, lora_x, strict=True):
                    more = machine.mma(more, a_fragment, x_fragments[n8])
                scaled = [value * factors[i // 2] for i, value in enumerate(four)]
                out[-1].append([fma(machine, scale, m, value) for m, value in zip(more, scaled, strict=True)])
        return out

    def _lora_x_fragment(self, four: list[F32], rank_tile: int, rank: I32 | None) -> list[I32]:
        """Sums of 16 ranks (g and g + 8, of rows 2 q and 2 q + 1) as a B fragment of `mma` (of row g)."""
        machine = self.thread.machine
        words = [pack_bf16(machine, four[0], four[1]), pack_bf16(machine, four[2], four[3])]
        if rank is not None:
            exists = [self.thread.g + (MMA_ROWS * rank_tile + 8 * h) < rank for h in range(2)]
            words = [machine.select(flag, word, 0) for flag, word in zip(exists, words, strict=True)]
        return list(map(machine.movmatrix, words))

    def adapter_at(self, feature: I32) -> tuple[Ptr, I32, I32, I32, I32]:
        """The adapter at `feature`: (B, feature within it, its features, its rank, its first column of `x A` or A)."""
        machine, chosen, begin = self.thread.machine, None, 0
        ranks = [rank for rank, _ in self.problem.adapters]
        for i, ((rank, width), base) in enumerate(zip(self.problem.adapters, self.b, strict=True)):
            is_packed = self.config.computes_lora_x or self.problem.partials
            column = sum(ranks[:i]) if is_packed else TILE * i
            this = [base, *(machine.i32(value) for value in (begin, width, rank, column))]
            if chosen is not None:
                is_here = feature >= begin
                this = [machine.select(is_here, *pair) for pair in zip(this, chosen, strict=True)]
            chosen, begin = this, begin + width
        base, begin, width, rank, column = chosen
        return base, feature - begin, width, rank, column
