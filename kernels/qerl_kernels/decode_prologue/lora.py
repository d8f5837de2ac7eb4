"""LoRA's `x A` of a cluster's tokens: loads of A, `mma`, the reduction over warps and CTAs, the store of lora_x.

`mma.m16n8k16` multiplies Aᵀ [16 columns × 16 features] with yᵀ [16 features × 8 tokens]. The kernel is free to choose
which features and columns share an `mma`. Features: the thread's first or second four, so that y is an operand as it
lies in registers. Columns: those of row g are neighbours (`_run`, e.g. 4 g ... 4 g + 3 of each 32), so that threads
read whole sectors of A, and one byte permutation of two features' words makes an operand.

In a cluster each CTA gets by `st.async` its share of the sums of all CTAs, adds them up and stores that share of
lora_x.
"""

from __future__ import annotations

from qerl_kernels.decode_prologue.config import TOKEN_TILE
from qerl_kernels.decode_prologue.rms_norm import RmsNorm
from qerl_kernels.decode_prologue.thread import Thread, Words
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK
from qerl_kernels.ptx import arithmetic
from qerl_kernels.ptx.values import F32, I32, Flag, tree_sum

Accumulators = list[list[list[F32]]]  # accumulators of an `mma`, for each tile of 16 columns, for each tile of tokens


def _run(columns: int) -> int:
    """Neighbouring columns that a thread reads at a time: its e-th is 8 · run · (e // run) + run · g + e % run."""
    return next(run for run in (8, 4, 2, 1) if columns // 8 % run == 0)


class LoraProjection:
    """The part of a thread's instructions that computes lora_x."""

    def __init__(self, thread: Thread):
        self.thread, self.machine = thread, thread.machine
        self.columns, self.run = thread.columns, _run(thread.columns)
        self.sum_count = TOKEN_TILE * thread.config.token_tiles * thread.columns  # fp32 sums of a cluster

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that every CTA gets: its share of the sums from each CTA."""
        return 4 * self.sum_count

    def load_a(self, k_tile: int) -> list[Words]:
        """Words of A for each of this thread's eight features."""
        feature, exists = self.thread.features(k_tile)
        return [self._load_row(feature, exists, j) for j in range(8)]

    def _load_row(self, feature: I32, exists: Flag, j: int) -> Words:
        """This thread's eighth of the cluster's columns in A's row of its j-th feature, two a word."""
        thread, machine, run = self.thread, self.machine, self.run
        stride = thread.spec.columns
        first = thread.column_split * self.columns + thread.g * run
        at = thread.a + (feature * stride + first) * 2
        row = j // 4 * thread.half_stride + j % 4
        starts = [2 * (row * stride + i) for i in range(0, self.columns, 8 * run)]
        if run > 1:
            return [word for start in starts for word in machine.load_global(at, run // 2, exists, start)]
        halves = [machine.load_global_half(at, exists, start) for start in starts] + [machine.i32(0)]
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return [arithmetic.pack_halves(machine, low, high, high=False) for low, high in pairs]

    def zeros(self) -> Accumulators:
        """Accumulators of a warp."""
        zero, tiles = self.machine.f32(0.0), -(-self.columns // 16)
        return [[[zero] * 4 for _ in range(tiles)] for _ in range(self.thread.config.token_tiles)]

    def multiply(self, sums: Accumulators, y: list[Words], a: list[Words]) -> None:
        """sums += Aᵀ yᵀ of one k-tile. Word `tile` of a row of A holds the columns of rows g and g + 8 of that tile."""
        for half in (0, 4):
            for tile in range(-(-self.columns // 16)):
                rows = [a[half + j][tile] for j in range(4)]
                operand = [
                    arithmetic.pack_halves(self.machine, first, second, high)
                    for first, second in (rows[:2], rows[2:])
                    for high in (False, True)
                ]
                for accumulators, row in zip(sums, y, strict=True):
                    accumulators[tile] = self.machine.mma(accumulators[tile], operand, row[half // 2 : half // 2 + 2])

    def store_sums(self, sums: Accumulators) -> None:
        """This warp's sums in shared memory: (tile of tokens, e, g, token), with e as in `_run`."""
        thread, columns = self.thread, self.columns
        at = thread.shared["lora_sums_s"] + (thread.warp * self.sum_count + (thread.g * 8 + thread.c * 2)) * 4
        for i, tiles in enumerate(sums):
            for e in range(columns // 8):
                pair = tiles[e // 2][2 * (e % 2) :][:2]
                self.machine.store_shared(at, pair, byte=4 * (i * TOKEN_TILE * columns + e * 64))

    def send_sums(self) -> None:
        """Sums over this CTA's warps, to each CTA its share of them."""
        thread, machine, config = self.thread, self.machine, self.thread.config
        share = self.sum_count // config.cluster
        machine.cta_sync()
        for start in range(0, self.sum_count // 4, thread.threads):
            index = (thread.index + start) * 4
            at = thread.shared["lora_sums_s"] + machine.minimum(index, self.sum_count - 4) * 4
            of_warps = [machine.load_shared(at, 4, byte=4 * self.sum_count * w) for w in range(config.warps)]
            total = [tree_sum(values) for values in zip(*of_warps, strict=True)]
            place = thread.shared["lora_totals_s"] + (thread.rank * share + index % share) * 4
            if config.cluster > 1:
                machine.st_async(place, index // share, total, thread.lora_barrier, index < self.sum_count)
            else:
                machine.store_shared(place, total, index < self.sum_count)

    def finish(self, norm: RmsNorm | None) -> None:
        """This CTA's share of lora_x: the sums of all CTAs, added up, scaled by a norm's 1 / rms, and stored."""
        thread, machine, config, spec = self.thread, self.machine, self.thread.config, self.thread.spec
        share, jobs = self.sum_count // config.cluster, []
        for start in range(0, share, thread.threads):
            local = machine.minimum(thread.index + start, share - 1)
            index = thread.rank * share + local
            tile, within = index // (TOKEN_TILE * self.columns), index % (TOKEN_TILE * self.columns)
            e, g, row = within // 64, within // 8 % 8, within % 8
            column = e // self.run * (8 * self.run) + g * self.run + e % self.run
            column = thread.column_split * self.columns + column
            token = thread.first_token + tile * TOKEN_TILE + row
            exists = (thread.index + start < share) & (token < spec.tokens)
            if spec.partials:
                place = thread.k_split * spec.tokens + token
                to = thread.lora_x + (place * spec.columns + column) * 4
            else:
                to = thread.lora_x + (token * (MAX_RANK * len(spec.ranks)) + self._padded(column)) * 2
            factor = norm.inverse_rms(tile, row) if norm else None
            jobs.append((thread.shared["lora_totals_s"] + local * 4, factor, to, exists))
        if config.cluster > 1:
            machine.mbarrier_wait(thread.lora_barrier)
        else:
            machine.cta_sync()
        for at, factor, to, exists in jobs:
            total = tree_sum([machine.load_shared(at, byte=4 * share * rank)[0] for rank in range(config.cluster)])
            if factor is not None:
                total = total * factor
            if spec.partials:
                machine.store_global(to, [arithmetic.as_word(machine, total)], exists)
            else:
                machine.store_global_bf16(to, total, exists)

    def _padded(self, column: I32) -> I32:
        """The column of lora_x of a column of A."""
        end, place = 0, column
        for rank in self.thread.spec.ranks[:-1]:
            end += rank
            is_past = self.machine.i32(1) + (column < end) * -1
            place = place + is_past * (MAX_RANK - rank)
        return place

    def zero_padding(self) -> None:
        """Zeros in lora_x past each adapter's rank, eight columns at a time, by the first cluster of these tokens."""
        thread, machine, config, spec = self.thread, self.machine, self.thread.config, self.thread.spec
        eights = MAX_RANK // 8 * len(spec.ranks)
        share = TOKEN_TILE * config.token_tiles * eights // config.cluster
        zeros = [machine.i32(0)] * 4
        for start in range(0, share, thread.threads):
            local = thread.index + start
            item = local * config.cluster + thread.rank
            token, eight = thread.first_token + item // eights, item % eights
            exists = (local < share) & (token < spec.tokens)
            exists = exists & (thread.column_split < 1)
            adapter, within = eight // (MAX_RANK // 8), eight % (MAX_RANK // 8)
            rank = machine.i32(0)
            for i, size in enumerate(spec.ranks):
                rank = rank + ((adapter < i + 1) & (adapter > i - 1)) * (size // 8)
            exists = exists & (within > rank - 1)
            at = thread.lora_x + (token * (MAX_RANK * len(spec.ranks)) + eight * 8) * 2
            machine.store_global(at, zeros, exists)
