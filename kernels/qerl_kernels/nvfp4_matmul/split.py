"""What the kernel for few tokens (`few_tokens`) computes, how it cuts that, and what it takes of a multiprocessor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from qerl_kernels.dispatch import SMEM_BYTES
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS, can_fuse
from qerl_kernels.nvfp4_matmul.packing import TILE

MOST_TOKENS = 32
PIECE_ROW_BYTES = 4 * (MMA_ROWS + 4)  # a token in an adapter's product


@dataclasses.dataclass(frozen=True)
class Task:
    """What is multiplied.

    Attributes:
      tokens: rows of x.
      features: n of the weight.
      units: of 64 along its contraction.
      scale: of the adapters.
      bias: bytes of one of its elements; None without a bias.
      adapters: (rank, features) of each.
      columns: of `shrunk` or of A.
      parts: of which `shrunk` is the sum; 0 where it is whole.
    """

    tokens: int
    features: int
    units: int
    scale: float
    bias: int | None
    adapters: tuple[tuple[int, int], ...]
    columns: int
    parts: int

    @property
    def rank(self) -> int:
        """The largest of the adapters."""
        return max((rank for rank, _ in self.adapters), default=0)

    @property
    def steps(self) -> int:
        """Products of 16 ranks that the adapters take."""
        return -(-self.rank // MMA_ROWS)


@dataclasses.dataclass(frozen=True)
class Split:
    """How the work is cut; found by `tools/tune_matmul.py`.

    Attributes:
      tokens: rows of x that there may be (8, 16, 24 or 32).
      rows: operands of 16 features in a block (1, 2, 4 or 8).
      warps: of a block, which share the contraction (a multiple of 4).
      cluster: blocks that share the contraction (1 to 8).
      depth: units of 64 along the contraction that a warp has under way.
      shrinks: True where the kernel takes A and computes `x A` itself; no block may have features of two adapters.
    """

    tokens: int
    rows: int = 4
    warps: int = 8
    cluster: int = 1
    depth: int = 4
    shrinks: bool = False

    @property
    def octets(self) -> int:
        """Of tokens: `mma.sync` takes eight at a time."""
        return self.tokens // 8

    def takes(self, tokens: int, adapters: Sequence[tuple[int, int]]) -> Literal["parts", "a"]:
        """What the kernel is given of the `x A` of `adapters` (shapes of B), for any number of tokens: the whole or
        parts of it, which it adds up; or A alone."""
        del tokens, adapters  # see `Tile.takes`
        return "a" if self.shrinks else "parts"

    @property
    def features(self) -> int:
        """Output features of a block."""
        return MMA_ROWS * self.rows

    def clusters(self, n: int) -> int:
        """Of the whole grid, for n output features."""
        return math.ceil(n / TILE) * TILE // self.features

    def smem_bytes(self, rank: int = 0) -> int:
        """Shared memory of a block, with adapters or without; each array a whole number of KiB. `rank`: the largest of
        the adapters, which counts where the kernel shrinks."""
        kib = lambda size: -(-size // 1024) * 1024  # noqa: E731
        sizes = Layout(self, rank).arrays()
        return sum(kib(size) for name, size in sizes.items() if name != "arrived_s") + 1024


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a block's shared memory has what, in bytes. `rank`: of the split's adapters, see `Split.smem_bytes`."""

    split: Split
    rank: int = 0

    @property
    def steps(self) -> int:
        """Operands of 16 ranks that a warp multiplies with x."""
        return -(-self.rank // MMA_ROWS) if self.split.shrinks else 0

    @property
    def columns(self) -> int:
        """Ranks in a row of A in a slot: 16, 32 or 64, so that a row is a power of two; 0 without A."""
        return MMA_ROWS * 2 ** math.ceil(math.log2(self.steps)) if self.steps else 0

    @property
    def a_at(self) -> int:
        """A in a slot, behind x: 64 rows."""
        return self.split.tokens * 128

    @property
    def words_at(self) -> int:
        """Words in a slot; the scales follow them."""
        return self.a_at + TILE * 2 * self.columns

    @property
    def slot_bytes(self) -> int:
        """A unit; a multiple of 128, so that rows of x begin where banks do."""
        return -(-(self.words_at + self.split.rows * 576) // 128) * 128

    @property
    def row_bytes(self) -> int:
        """One token of a warp's sums; four more in a row spread the tokens over the banks."""
        return 4 * (self.split.features + 4)

    @property
    def sum_bytes(self) -> int:
        """A warp's sums: [tokens][features] in fp32."""
        return self.split.tokens * self.row_bytes

    @property
    def b_row_bytes(self) -> int:
        """One rank of the B of a block's features, spread likewise."""
        return 2 * self.split.features + 16

    @property
    def piece_bytes(self) -> int:
        """An adapter's product of 16 ranks for 16 features: [tokens][features] in fp32, spread likewise."""
        return self.split.tokens * PIECE_ROW_BYTES

    @property
    def warp_bytes(self) -> int:
        """Of a warp: its slots, and later its sums, with its part of the products of adapters behind them that have
        not gone into these."""
        split = self.split
        pieces = 0 if split.shrinks else -(-split.rows * TILE // MMA_ROWS // split.warps) * self.piece_bytes
        return max(split.depth * self.slot_bytes, -(-(self.sum_bytes + pieces) // 128) * 128)

    @property
    def items(self) -> int:
        """Fours of fp32 that a block sends."""
        return self.split.tokens * self.split.features // 4

    def arrays(self) -> dict[str, int]:
        """Bytes of each array: the warps' own, what blocks send to the first, its barrier, and B."""
        sizes = {"ring_s": self.split.warps * self.warp_bytes}
        if self.split.cluster > 1:
            sizes |= {"box_s": (self.split.cluster - 1) * self.items * 16, "arrived_s": 16}
        return sizes | ({"b_s": MMA_ROWS * self.steps * self.b_row_bytes} if self.steps else {})


def fits(split: Split, n: int, k: int, rank: int = 0) -> bool:
    """Whether a multiprocessor can hold a block of `split`, and the weight [n, k] divides into such blocks. `rank`: the
    largest of the adapters, which a split that shrinks must have."""
    return (
        split.tokens in (8, 16, 24, 32)
        and split.rows in (1, 2, 4, 8)
        and split.warps % 4 == 0
        and 4 <= split.warps <= 32
        and 1 <= split.cluster <= 8
        and split.depth >= 1
        and math.ceil(n / TILE) * 4 % split.rows == 0
        and math.ceil(k / TILE) >= split.cluster
        and _holds(split, rank)
    )


def _holds(split: Split, rank: int) -> bool:
    """Whether shared memory and registers are enough."""
    steps = Layout(split, rank).steps
    return (
        (0 < rank <= TILE or not split.shrinks)
        and split.smem_bytes(rank) <= SMEM_BYTES
        and (split.rows + steps) * split.tokens <= 192  # above, sums and adapters of several octets spill
        # sums, x, multipliers, two rows' words and scales; the rest for addresses and what one operand takes
        and (split.rows + steps) * split.tokens // 2 + split.tokens + (2 * split.rows if steps else 0) + 64
        <= min(255, 65536 // (32 * split.warps))
    )


def fitted(split: Split, n: int, adapters: Sequence[tuple[int, int]] = ()) -> Split:
    """`split`, with four operands in a block where its eight do not divide the n features. It shrinks only where there
    are `adapters` (shapes of B), none begins within a block, and a multiprocessor has room for A."""
    if math.ceil(n / TILE) * 4 % split.rows:
        split = dataclasses.replace(split, rows=4)
    if split.shrinks:
        rank = max((rank for rank, _ in adapters), default=0)
        able = can_fuse(n, adapters, split.features) and _holds(split, rank)
        split = dataclasses.replace(split, shrinks=able)
    return split
