"""RMSNorm of a cluster's tokens: residual add, sums of squares over the CTAs, the scaled rows.

Every CTA gets the sums of squares of all CTAs by `st.async`, and adds them up in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

from qerl_kernels.decode_prologue.config import TOKEN_TILE
from qerl_kernels.decode_prologue.thread import Thread, Words
from qerl_kernels.ptx import arithmetic
from qerl_kernels.ptx.values import F32, I32, tree_sum


class RmsNorm:
    """The norm's part of a thread's instructions."""

    def __init__(self, thread: Thread):
        self.thread, self.machine = thread, thread.machine

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that every CTA gets: a sum for each token from each CTA."""
        config = self.thread.config
        return 4 * TOKEN_TILE * config.token_tiles * config.cluster

    def load_rows(self, k_tile: int) -> tuple[list[Words], list[Words] | None]:
        """Words of x (eight for each tile's token) and of delta (four)."""
        thread, width = self.thread, self.thread.spec.features
        x = [thread.load_halves(at, 4, exists) for at, exists in thread.places(thread.x, k_tile, width, 4)]
        if thread.delta is None:
            return x, None
        return x, [thread.load_halves(at, 2, exists) for at, exists in thread.places(thread.delta, k_tile, width)]

    def load_weights(self, k_tile: int) -> Words:
        """The weights of this thread's features."""
        feature, exists = self.thread.features(k_tile)
        return self.thread.load_halves(self.thread.weight + feature * 4, 4, exists)

    def add_delta(self, loaded: tuple[list[Words], list[Words] | None]) -> list[Words]:
        """s = x + delta."""
        x, delta = loaded
        if delta is None:
            return x
        add = arithmetic.add_bf16
        return [
            [value for i, word in enumerate(words) for value in add(self.machine, row[2 * i : 2 * i + 2], word)]
            for row, words in zip(x, delta, strict=True)
        ]

    def send_squares(self, rows: list[list[Words]]) -> None:
        """This CTA's sum of squares of each token, to every CTA of the cluster."""
        thread, machine, config = self.thread, self.machine, self.thread.config
        tokens, ctas = TOKEN_TILE * config.token_tiles, config.cluster
        own, everyone = thread.shared["squares_s"], thread.shared["all_squares_s"]
        is_first = thread.c < 1
        for i in range(config.token_tiles):
            square = machine.f32(0.0)
            for row in rows:
                for value in row[i]:
                    square = arithmetic.add_square(machine, square, value)
            square = arithmetic.quad_sum(machine, square)
            at = own + (thread.warp * tokens + thread.g) * 4
            machine.store_shared(at, [square], is_first, byte=4 * TOKEN_TILE * i)
        machine.cta_sync()
        for start in range(0, ctas * tokens, thread.threads):
            index = thread.index + start
            cta, token = index // tokens, index % tokens
            at = own + token * 4
            total = tree_sum([machine.load_shared(at, byte=4 * tokens * w)[0] for w in range(config.warps)])
            place = everyone + (token * ctas + thread.rank) * 4
            machine.st_async(place, cta, [total], thread.squares_barrier, index < ctas * tokens)

    def inverse_rms(self, tile: int | I32, token: I32) -> F32:
        """1 / sqrt(mean(s²) + eps) of a tile's token, from the sums of squares of all CTAs."""
        spec, ctas = self.thread.spec, self.thread.config.cluster
        at = self.thread.shared["all_squares_s"] + (tile * TOKEN_TILE + token) * (4 * ctas)
        of_ctas = [value for rank in range(0, ctas, 4) for value in self.machine.load_shared(at, 4, 4 * rank)]
        return arithmetic.inverse_rms(self.machine, tree_sum(of_ctas), spec.features, spec.eps)

    def scale(self, rows: list[Words], weights: Words, factors: Sequence[F32 | None]) -> list[Words]:
        """Each tile's row times its factor (None: 1) and the weights, as words of bf16."""
        scale = arithmetic.weight_bf16
        return [
            [scale(self.machine, row[i : i + 2], weights[i : i + 2], factor) for i in range(0, 8, 2)]
            for row, factor in zip(rows, factors, strict=True)
        ]
