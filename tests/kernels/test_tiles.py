"""The choice of tiles: what the table's tile becomes for a number of tokens, against counting rounds by hand."""

import dataclasses
import json
import math

import pytest
from qerl_kernels.nvfp4_matmul import cases, few_tokens, tiles
from qerl_kernels.nvfp4_matmul.few_tokens import Split
from qerl_kernels.nvfp4_matmul.tile import Tile, clusters_at_once, fits

WIDE = Tile(tokens=256, rows=2, depth=1, stages=4, ahead=2)


def rounds(tile: Tile, m: int, features: int) -> int:
    return math.ceil(math.ceil(m / tile.tokens) * math.ceil(features / (64 * tile.rows)) / 132)


@pytest.mark.parametrize(
    ("m", "features", "tokens"),
    [
        (4096, 3584, 232),  # 28 x 16 tiles of 256: 3.39 rounds, four are run; 28 x 18 of 232: 3.82, four are run
        (4096, 37888, 256),  # 296 x 16: 35.9 rounds
        (129, 132 * 128, 136),  # one round; two of 72 would cost more
    ],
)
def test_by_hand(m, features, tokens):
    assert tiles.in_waves(WIDE, m, features) == dataclasses.replace(WIDE, tokens=tokens)


def test_never_costs_more_than_the_table_s_tile():
    for features in (3584, 4608, 5120, 18944, 55296):
        for m in range(129, 5000, 97):
            found = tiles.in_waves(WIDE, m, features)
            assert found.tokens % 8 == 0 and 64 <= found.tokens <= 256
            both = [rounds(tile, m, features) * (tile.tokens + tiles.PER_ROUND) for tile in (found, WIDE)]
            assert both[0] <= both[1]
            assert tiles.in_waves(found, m, features) == found


def test_blocks_that_share_a_multiprocessor_make_the_rounds_shorter():
    """264 blocks: 28 x 16 tiles of 256 tokens are two rounds; of 240, 28 x 18 are two as well, and shorter."""
    two = dataclasses.replace(WIDE, blocks_per_sm=2)
    assert tiles.in_waves(two, 4096, 3584).tokens == 232


def test_the_direction_decides_which_features_count(monkeypatch):
    """dx has as many features as the weight has columns. A timed row is taken as it is, for the tokens and the shape it
    was timed at."""
    row = tiles.Row("dx", 37888, 3584, 4096, WIDE, None)
    monkeypatch.setattr(tiles, "table", lambda: (row,))
    assert tiles.tile_for(4096, 37888, 3584, transposed=True).tokens == 232
    monkeypatch.setattr(tiles, "table", lambda: (dataclasses.replace(row, us=1500.0),))
    assert tiles.tile_for(4096, 37888, 3584, transposed=True) == WIDE
    assert tiles.tile_for(4000, 37888, 3584, transposed=True).tokens < 256
    assert tiles.tile_for(4096, 37824, 3584, transposed=True).tokens == 232


def test_clusters_that_fit():
    assert [clusters_at_once(Tile(64, cluster=n), 132) for n in (1, 2, 3, 4, 8)] == [132, 66, 39, 30, 15]
    assert clusters_at_once(Tile(64, cluster=3, blocks_per_sm=2), 132) == 78


def test_tiles_that_share_their_work_are_left_alone():
    for tile in (Tile(tokens=128, cluster=2), Tile(tokens=8, warp_mma=True)):
        assert tiles.in_waves(tile, 4096, 3584) == tile
    assert tiles.in_waves(WIDE, 128, 3584) == WIDE


def holds(how: Tile | Split, n: int, k: int, m: int, adapted: bool = False) -> bool:
    if isinstance(how, Split):
        return few_tokens.fits(how, n, k, rank=32 * adapted) and m <= how.tokens
    return fits(how, adapted)


@pytest.mark.parametrize("case", cases.SHAPES)
def test_every_number_of_tokens_has_a_tile_that_fits(case):
    n, k = cases.SHAPES[case]
    for m in (*cases.TOKENS, 100, 333, 2000, 3072, 50000):
        assert holds(tiles.tile_for(m, n, k), n, k, m) and fits(tiles.tile_for(m, n, k, transposed=True))
    parts = [(32, width) for width in cases.parts(case)]
    for m in (1, 8, 64, 128):
        assert holds(tiles.tile_for(m, n, k, adapters=parts), n, k, m, adapted=True)


def test_a_row_may_hold_either_kernel(monkeypatch):
    """As the tuner stores it and the table reads it. The split is used as it is up to its tokens, in every shape; never
    with `batch_invariant`, nor with adapters that do not fit it."""
    split = Split(8, rows=8, warps=16, cluster=2, depth=2)
    rows = [tiles.Row("forward", 4608, 3584, 8, split, 5.5), tiles.Row("forward", 4608, 3584, 4096, WIDE, None)]
    stored = json.loads(json.dumps([tiles.as_stored(row) for row in rows]))
    assert [row.get("kernel") for row in stored] == ["few_tokens", None]
    assert [tiles.from_stored(row) for row in stored] == rows
    monkeypatch.setattr(tiles, "table", lambda: tuple(rows))
    for m in range(1, 9):
        assert tiles.tile_for(m, 4608, 3584) == split
    assert isinstance(tiles.tile_for(9, 4608, 3584), Tile)
    assert isinstance(tiles.tile_for(8, 4608, 3584, batch_invariant=True), Tile)
    narrower = tiles.tile_for(8, 4608 + 64, 3584)  # 73 tiles of 64: not divided by 128
    assert narrower == dataclasses.replace(split, rows=4) and few_tokens.fits(narrower, 4608 + 64, 3584)
    assert tiles.tile_for(8, 4608, 3584, adapters=[(32, 3584), (64, 512), (8, 512)]) == split
    for adapters in ([(32, 3584), (32, 512)], [(72, 4608)], [(12, 4608)], [(32, 4592), (32, 16)]):
        assert tiles.tile_for(8, 4608, 3584, adapters=adapters) is None


def test_a_split_shrinks_only_where_the_adapters_allow_it(monkeypatch):
    """Blocks of 128 features: 3584, 512 and 512 are multiples, 3584 + 64 is not. A of rank 64 takes 8 KiB a slot, and
    three slots of each of eight warps more than a multiprocessor has. Stored, the field is there where it is true."""
    split = Split(8, rows=8, warps=8, cluster=2, depth=2, shrinks=True)
    rows = [tiles.Row("forward", 4608, 3584, 8, split, 5.5), tiles.Row("forward", 4608, 3584, 16, WIDE, None)]
    stored = json.loads(json.dumps([tiles.as_stored(row) for row in rows]))
    assert stored[0]["tile"]["shrinks"] is True and [tiles.from_stored(row) for row in stored] == rows
    plain = dataclasses.replace(split, shrinks=False)
    assert "shrinks" not in tiles.as_stored(dataclasses.replace(rows[0], tile=plain))["tile"]
    monkeypatch.setattr(tiles, "table", lambda: tuple(rows))
    three = [(32, 3584), (16, 512), (32, 512)]
    assert tiles.tile_for(8, 4608, 3584, adapters=three) == split
    assert tiles.tile_for(8, 4608, 3584) == plain
    assert tiles.tile_for(8, 4608, 3584, adapters=[(32, 3648), (32, 960)]) == plain
    deeper = dataclasses.replace(split, depth=3)
    assert [rank for rank in (0, 8, 32, 64, 72) if few_tokens.fits(deeper, 4608, 3584, rank)] == [8]
    monkeypatch.setattr(tiles, "table", lambda: (dataclasses.replace(rows[0], tile=deeper),))
    assert tiles.tile_for(8, 4608, 3584, adapters=[(16, 4608)]) == deeper
    assert tiles.tile_for(8, 4608, 3584, adapters=[(64, 4608)]) == dataclasses.replace(deeper, shrinks=False)


def test_what_a_multiprocessor_cannot_hold_does_not_fit():
    good = Split(8, rows=4, warps=8, cluster=2, depth=4)
    assert few_tokens.fits(good, 4608, 3584)
    for wrong in (
        {"tokens": 12}, {"tokens": 40}, {"rows": 3}, {"warps": 6}, {"warps": 36}, {"cluster": 9}, {"depth": 0},
        {"depth": 9}, {"rows": 8, "tokens": 32, "warps": 4}, {"rows": 4, "warps": 28, "depth": 1},
    ):  # fmt: skip
        assert not few_tokens.fits(dataclasses.replace(good, **wrong), 4608, 3584), wrong
    assert not few_tokens.fits(dataclasses.replace(good, rows=8), 4608 + 64, 3584)
    assert not few_tokens.fits(dataclasses.replace(good, cluster=8), 4608, 7 * 64)
