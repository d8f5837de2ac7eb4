"""Which tile a product uses: a table found by `tools/tune_matmul.py` and stored as data, one file for a kind of GPU.

A row of the table: direction ("forward" or "dx"), n, k, `tokens` (the largest m it was tuned for), the fields of `Tile`
and the microseconds measured (null where it is the choice of the tuner's model, or that of a shape like it). With
`"kernel": "few_tokens"` the fields are those of `Split`, and that kernel runs; "shrinks" may be left out. A shape that
is not in the table takes the row of the shape nearest to it in log n and log k. "before": where it was timed, the
microseconds of what then has to precede the product, which were counted when this row was chosen over others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from importlib import resources

from qerl_kernels.dispatch import MULTIPROCESSORS
from qerl_kernels.nvfp4_matmul.split import Split, fitted
from qerl_kernels.nvfp4_matmul.tile import Tile, can_fuse, fits

TABLE = "tiles_h200.json"
FREE = 128  # tokens above which a tile may take fewer than the table says
PER_ROUND = 42  # what a unit costs beside its tokens, in tokens: 49 ns and 1.16 ns a token (tools/results/LOG.md)
SMALL = 512  # features below which a weight is no projection of a model and takes the plainest tile


@dataclasses.dataclass(frozen=True)
class Row:
    """A tile, the product it was found for (x [tokens, k] with a weight [n, k]) and its microseconds, if measured, and
    those of what precedes it, if counted."""

    direction: str
    n: int
    k: int
    tokens: int
    tile: Tile | Split
    us: float | None
    before: float | None = None


_KERNELS = {"tiles": Tile, "few_tokens": Split}  # the key "kernel" of a row -> what its fields are


def from_stored(stored: dict) -> Row:
    """A row of the file."""
    kernel = _KERNELS[stored.get("kernel", "tiles")]
    rest = {name: value for name, value in stored.items() if name != "kernel"}
    return Row(**{**rest, "tile": kernel(**stored["tile"])})


def as_stored(row: Row) -> dict:
    """The inverse of `from_stored`; what is not needed is left out: "kernel" where it is "tiles", "shrinks" where it is
    false, "before" where nothing was counted."""
    stored = dataclasses.asdict(row)
    if row.before is None:
        del stored["before"]
    if not isinstance(row.tile, Split):
        return stored
    tile = {name: value for name, value in stored["tile"].items() if name != "shrinks" or value}
    return {**stored, "tile": tile, "kernel": "few_tokens"}


@functools.cache
def table() -> tuple[Row, ...]:
    """All rows of the file, read once."""
    stored = json.loads(resources.files("qerl_kernels.nvfp4_matmul").joinpath(TABLE).read_text())["rows"]
    return tuple(map(from_stored, stored))


def tile_for(
    m: int,
    n: int,
    k: int,
    *,
    transposed: bool = False,
    adapters: Sequence[tuple[int, int]] = (),
    batch_invariant: bool = False,
) -> Tile | Split | None:
    """The tile for x [m, k] (transposed: [m, n]) and a weight [n, k], or the split of the kernel for few tokens, which
    shrinks only where these adapters allow it; None where the adapters cannot be added within the kernel.

    Args:
      adapters: shape of B of each adapter that the kernel is to add.
      batch_invariant: one tile for every m, whose sums are cut along the contraction in the same places whatever m is.
    """
    if n < SMALL or k < SMALL:
        tile = Tile(tokens=64, depth=1, rows=1, stages=4)
    elif batch_invariant:
        tile = Tile(tokens=64, rows=2, slices=2, depth=1, stages=4)
    else:
        row = _tuned(m, n, k, transposed)
        if isinstance(row.tile, Split):
            # it takes more adapters than tiles do, but `vmap` may still make many tokens of few: the same are fused
            fuses = not adapters or can_fuse(Tile(tokens=8, rows=1), n, adapters)
            return fitted(row.tile, n, adapters) if fuses else None
        timed = row.us is not None and (row.n, row.k, row.tokens) == (n, k, m)
        tile = row.tile if timed else in_waves(row.tile, m, k if transposed else n)
    return with_adapters(tile, n, adapters) if adapters else tile


def with_adapters(tile: Tile, n: int, adapters: Sequence[tuple[int, int]]) -> Tile | None:
    """`tile`, or with fewer stages or features what has room for adapters with B of these shapes; None where nothing
    has."""
    for rows, stages in itertools.product((tile.rows, 4, 2, 1), (tile.stages, tile.stages - 1)):
        narrower = dataclasses.replace(tile, rows=rows, stages=stages)
        fused = fits(narrower, adapted=True) and can_fuse(narrower, n, adapters)
        if rows <= tile.rows and stages >= min(2, tile.stages) and fused:
            return narrower
    return None


def in_waves(tile: Tile, m: int, features: int) -> Tile:
    """`tile` with as many tokens, up to its own, as keep the multiprocessors busy to the end.

    Blocks that walk alone over whole tiles take ⌈tiles / multiprocessors⌉ rounds. 448 tiles of 256 tokens for example
    take four for 3.4; with 232 tokens there are 504, and four rounds of them should cost 8 % less (a model, not timed).
    """
    if m <= FREE or tile.cluster > 1 or tile.warp_mma:
        return tile
    blocks = MULTIPROCESSORS * tile.blocks_per_sm

    def cost(tokens: int) -> int:
        tiles = -(-m // tokens) * -(-features // (64 * tile.rows))
        return -(-tiles // blocks) * (tokens + PER_ROUND)

    return dataclasses.replace(tile, tokens=min(range(tile.tokens, min(64, tile.tokens) - 1, -8), key=cost))


def _tuned(m: int, n: int, k: int, transposed: bool) -> Row:
    rows = [row for row in table() if row.direction == ("dx" if transposed else "forward")]

    def distance(row: Row) -> float:
        return abs(math.log(n / row.n)) + abs(math.log(k / row.k))

    nearest = min(distance(row) for row in rows)
    same_shape = sorted((row for row in rows if distance(row) == nearest), key=lambda row: row.tokens)
    return next((row for row in same_shape if row.tokens >= m), same_shape[-1])
