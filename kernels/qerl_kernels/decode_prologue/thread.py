"""One thread's share of a decode prologue: its tokens, features and columns of A, and its accesses to global memory.

Thread (g, c) = (lane / 4, lane % 4) of a warp holds eight features of the warp's k-tile for token g of each n8 tile.
For bf16 inputs they are 8 c ... 8 c + 7, which are 16 bytes. For a norm, whose x and s are fp32, they are 4 c + 16 h +
(0, 1, 2, 3) for h = 0 and 1, so that each access of four threads is whole sectors of 32 bytes.
"""

from __future__ import annotations

from qerl_kernels.decode_prologue.config import K_TILE, TOKEN_TILE, PrologueConfig, PrologueSpec
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.launch import Position
from qerl_kernels.ptx.values import I32, Flag, Ptr

Words = list[I32]  # eight features of a token: four words of bf16, or eight of fp32


class Thread:
    """Indices, pointers and global memory accesses of one thread.

    Attributes:
      k_tiles_of_warp: k-tiles of a warp, numbered from 0; the last may not exist.
      columns: columns of A of this cluster.
      column_split: index of this cluster among those that share out the columns of A.
      k_split: index of this cluster among those that share out the features; one of the two indices is 0.
    """

    def __init__(
        self,
        machine: PtxMachine,
        spec: PrologueSpec,
        config: PrologueConfig,
        position: Position,
        pointers: list[Ptr],
        shared: dict[str, I32],
    ):
        """`pointers`: the inputs, A and the outputs, as `fused_prologue` takes and returns them."""
        self.machine, self.spec, self.config, self.shared = machine, spec, config, shared
        cluster, self.rank, self.index = position
        self._name_pointers(list(pointers))
        self.squares_barrier, self.lora_barrier = (shared["barriers_s"] + 8 * i for i in range(2))
        self.threads = config.warps * 32
        lane = self.index % 32
        self.warp, self.g, self.c = self.index // 32, lane // 4, lane % 4
        # Features from a thread's first to the next thread's first, and from its first to its fifth.
        self.thread_stride, self.half_stride = (4, 16) if spec.kind == "norm" else (8, 4)
        self.k_tiles = spec.features // K_TILE
        self.k_tiles_of_cta = -(-self.k_tiles // (config.cluster * config.k_splits))
        self.k_tiles_of_warp = -(-self.k_tiles_of_cta // config.warps)
        self.columns = spec.columns // config.column_splits
        self.column_split, self.k_split = cluster % config.column_splits, cluster % config.k_splits
        self.first_token = cluster // (config.column_splits * config.k_splits) * (TOKEN_TILE * config.token_tiles)
        tokens = [self.first_token + TOKEN_TILE * i + self.g for i in range(config.token_tiles)]
        self.token_exists = [token < spec.tokens for token in tokens]
        self.tokens = [machine.minimum(token, spec.tokens - 1) for token in tokens]

    def _name_pointers(self, pointers: list[Ptr]) -> None:
        spec = self.spec
        self.x = pointers.pop(0)
        self.delta = pointers.pop(0) if spec.residual else None
        self.weight = pointers.pop(0) if spec.kind == "norm" else None
        self.a, self.lora_x = (pointers.pop(0), pointers.pop()) if spec.columns else (None, None)
        self.s = pointers.pop(0) if spec.residual else None
        self.y = pointers.pop(0) if spec.kind != "plain" else None
        assert not pointers

    def features(self, k_tile: int) -> tuple[I32, Flag]:
        """(this thread's first feature in its warp's k-tile number `k_tile`, whether there is such a k-tile)."""
        in_cta = self.warp + k_tile * self.config.warps
        cta = self.k_split * self.config.cluster + self.rank
        index = cta * self.k_tiles_of_cta + in_cta
        exists = (in_cta < self.k_tiles_of_cta) & (index < self.k_tiles)
        return index * K_TILE + self.c * self.thread_stride, exists

    def places(self, base: Ptr, k_tile: int, width: int, itemsize: int = 2) -> list[tuple[Ptr, Flag]]:
        """(address, whether it exists) of each tile's token in an array whose rows have `width` elements."""
        feature, exists = self.features(k_tile)
        return [
            (base + (token * width + feature) * itemsize, exists & token_exists)
            for token, token_exists in zip(self.tokens, self.token_exists, strict=True)
        ]

    def load_halves(self, at: Ptr, itemsize: int, exists: Flag) -> Words:
        """A norm's eight features of this thread: for each four of them, as many words as an item has bytes."""
        return [
            word
            for half in range(2)
            for word in self.machine.load_global(at, itemsize, exists, half * self.half_stride * itemsize)
        ]

    def load_x(self, k_tile: int) -> list[Words]:
        """Words of x for each tile's token: four, or for SiLU four of gate and four of up."""
        load, width = self.machine.load_global, self.spec.features
        if self.spec.kind == "silu":
            places = self.places(self.x, k_tile, 2 * width)
            return [load(at, 4, exists) + load(at, 4, exists, 2 * width) for at, exists in places]
        return [load(at, 4, exists) for at, exists in self.places(self.x, k_tile, width)]

    def store(self, base: Ptr, k_tile: int, rows: list[Words], itemsize: int) -> None:
        """Stores each tile's row. The clusters of the same tokens take turns, a k-tile each."""
        turn = k_tile % self.config.column_splits
        is_ours = (self.column_split < turn + 1) & (self.column_split > turn - 1)
        places = self.places(base, k_tile, self.spec.features, itemsize)
        for (at, exists), row in zip(places, rows, strict=True):
            halves = [row[:itemsize], row[itemsize:]] if self.spec.kind == "norm" else [row]
            for half, words in enumerate(halves):
                self.machine.store_global(at, words, exists & is_ours, half * self.half_stride * itemsize)
