"""The choice of configs: what the table's config becomes for a number of rows, against counting waves by hand."""

import dataclasses
import functools
import json
import math

import pytest
from qerl_kernels.decode_prologue.config import PrologueConfig
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul import cases, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

N, K = 4608, 4096  # of no model whose GEMMs were timed: nearer than any of those to itself
WIDE = GemmConfig(tile_m=256, warpgroups_n=2, k_tiles=1, stages=4, lookahead=True)


def timed(path, *rows: tuning.Row, gpu: Gpu = H200) -> Gpu:
    """A GPU with a tuning table of its own."""
    path.write_text(json.dumps({"rows": [tuning.to_json(row) for row in rows]}))
    return dataclasses.replace(gpu, own_table=str(path))


def waves(config: GemmConfig, m: int, n: int) -> int:
    return math.ceil(math.ceil(m / config.tile_m) * math.ceil(n / (64 * config.warpgroups_n)) / 132)


@pytest.mark.parametrize(
    ("change", "m", "n", "tile_m"),
    [
        ({}, 4096, 3584, 232),  # 28 x 16 tiles of 256: 3.39 waves, four are run; 28 x 18 of 232: 3.82, four are run
        ({}, 4096, 37888, 256),  # 296 x 16: 35.9 waves
        ({}, 129, 132 * 128, 136),  # one wave; two of 72 would cost more
        ({}, 128, 3584, 256),  # one tile is left alone
        ({"tile_m": 128, "cluster": 2}, 2048, 3584, 128),  # so are clusters that share tiles; others have 120
        ({}, 1024, 3584, 256),  # 28 x 4 tiles of 132 CTAs are one wave
        ({"ctas_per_sm": 2}, 1024, 3584, 120),  # and so are 28 x 9 of 264
    ],
)
def test_by_hand(change, m, n, tile_m):
    config = dataclasses.replace(WIDE, **change)
    assert tuning.balance_waves(config, m, n) == dataclasses.replace(config, tile_m=tile_m)


LARGE = GemmConfig(tile_m=232, warpgroups_n=2, k_tiles=1, stages=5, lookahead=True)


@pytest.mark.parametrize(
    ("config", "adapters", "change"),
    [
        (LARGE, [(32, 896)], {"stages": 4}),  # LoRA's input takes the room of a stage
        (LARGE, [(32, 448)] * 2, {"stages": 4}),  # an adapter's last tile is half a tile
        (LARGE, [(32, 416), (32, 480)], None),  # 64 features are of two adapters
        (GemmConfig(64, stages=11, k_tiles=1), [(32, 896)], {"warpgroups_n": 2}),  # the room of two stages
    ],
)
def test_a_config_that_adds_adapters_has_room_for_them(config, adapters, change):
    wanted = None if change is None else dataclasses.replace(config, **change)
    assert tuning.fit_lora(config, 896, adapters) == wanted


def test_never_costs_more_than_the_table_s_config():
    for n in (3584, 4608, 5120, 18944, 55296):
        for m in range(129, 5000, 97):
            found = tuning.balance_waves(WIDE, m, n)
            assert found.tile_m % 8 == 0 and 64 <= found.tile_m <= 256
            both = [waves(config, m, n) * (config.tile_m + tuning.K_TILE_ROWS) for config in (found, WIDE)]
            assert both[0] <= both[1]
            assert tuning.balance_waves(found, m, n) == found


def test_the_direction_decides_which_features_count(tmp_path):
    """dx has as many features as the weight has columns. A timed row is taken as it is, for the m and the shape it was
    timed at."""
    row = tuning.Row("dx", 37888, 3584, 4096, WIDE, None)
    dx = functools.partial(tuning.config_for, transposed=True)
    assert dx(4096, 37888, 3584, gpu=timed(tmp_path / "untimed", row)).tile_m == 232
    gpu = timed(tmp_path / "timed", dataclasses.replace(row, us=1500.0))
    assert dx(4096, 37888, 3584, gpu=gpu) == WIDE
    assert dx(4000, 37888, 3584, gpu=gpu).tile_m < 256
    assert dx(4096, 37824, 3584, gpu=gpu).tile_m == 232


def test_the_nearest_shape_is_by_ratio(tmp_path):
    """3000 features are 2.9 times 1024, and 8192 are 2.7 times 3000; those of H200's table are farther away."""
    near, far = (dataclasses.replace(WIDE, stages=stages) for stages in (3, 4))
    rows = [tuning.Row("forward", n, 1 << 20, 128, config, 1.0) for n, config in ((8192, near), (1024, far))]
    assert tuning.config_for(128, 3000, 1 << 20, gpu=timed(tmp_path / "table", *rows)) == near


def test_a_gpus_own_row_comes_before_its_tiers(tmp_path):
    row = next(row for row in tuning.table() if row.us and isinstance(row.config, GemmConfig))
    own = dataclasses.replace(row, config=dataclasses.replace(row.config, stages=row.config.stages - 1))
    gemm, gpus = (row.m, row.n, row.k), (H200, timed(tmp_path / "own.json", own))
    found = [tuning.config_for(*gemm, transposed=row.direction == "dx", gpu=gpu) for gpu in gpus]
    assert found == [row.config, own.config]


def test_clusters_that_fit():
    assert [GemmConfig(64, cluster=n).resident_clusters(H200) for n in (1, 2, 3, 4)] == [132, 66, 39, 30]
    assert GemmConfig(64, cluster=3, ctas_per_sm=2).resident_clusters(H200) == 78


def holds(config: GemmConfig | SkinnyConfig, n: int, k: int, m: int, has_lora: bool = False) -> bool:
    if isinstance(config, SkinnyConfig):
        return config.fits(n, k, rank=32 * has_lora) and config.blocks(m) <= 2
    return config.fits(has_lora)


@pytest.mark.parametrize("case", cases.SHAPES)
def test_every_m_has_a_config_that_fits(case):
    n, k = cases.SHAPES[case]
    for m in (*cases.TOKENS, 100, 333, 2000, 3072, 50000):
        assert holds(tuning.config_for(m, n, k), n, k, m) and tuning.config_for(m, n, k, transposed=True).fits()
    parts = [(32, width) for width in cases.parts(case)]
    for m in (1, 8, 64, 128):
        assert holds(tuning.config_for(m, n, k, adapters=parts), n, k, m, has_lora=True)


def test_a_row_may_hold_either_kernel(tmp_path):
    """As the tuner stores it and the table reads it. The skinny config is used as it is up to its m, in every shape;
    never with `batch_invariant`, nor with adapters that do not fit it."""
    config = SkinnyConfig(8, m16_tiles=8, warps=16, cluster=2, stages=2)
    rows = [tuning.Row("forward", N, K, 8, config, 5.5), tuning.Row("forward", N, K, 4096, WIDE, None)]
    stored = json.loads(json.dumps([tuning.to_json(row) for row in rows]))
    assert [row["kernel"] for row in stored] == ["skinny", "gemm"]
    assert [tuning.from_json(row) for row in stored] == rows
    config_for = functools.partial(tuning.config_for, gpu=timed(tmp_path / "table", *rows))
    for m in range(1, 9):
        assert config_for(m, N, K) == config
    assert isinstance(config_for(9, N, K), GemmConfig)
    assert isinstance(config_for(8, N, K, batch_invariant=True), GemmConfig)
    narrower = config_for(8, N + 64, K)  # 73 tiles of 64: not divided by 128
    assert narrower == dataclasses.replace(config, m16_tiles=4) and narrower.fits(N + 64, K)
    assert config_for(8, N, K, adapters=[(32, 3584), (64, 512), (8, 512)]) == config
    for adapters in ([(32, 3584), (32, 512)], [(72, N)], [(12, N)], [(32, 4592), (32, 16)]):
        assert config_for(8, N, K, adapters=adapters) is None


def test_x_a_is_computed_only_where_the_adapters_allow_it(tmp_path):
    """CTAs of 128 features: 3584, 512 and 512 are multiples, 3584 + 64 is not. A of rank 64 takes 8 KiB a stage, and
    three stages of each of eight warps more than an SM has. Stored, the field is there where it is true."""
    config = SkinnyConfig(8, m16_tiles=8, warps=8, cluster=2, stages=2, computes_lora_x=True)
    rows = [tuning.Row("forward", N, K, 8, config, 5.5), tuning.Row("forward", N, K, 16, WIDE, None)]
    stored = json.loads(json.dumps([tuning.to_json(row) for row in rows]))
    assert stored[0]["config"]["computes_lora_x"] is True and [tuning.from_json(row) for row in stored] == rows
    plain = dataclasses.replace(config, computes_lora_x=False)
    assert "computes_lora_x" not in tuning.to_json(dataclasses.replace(rows[0], config=plain))["config"]
    config_for = functools.partial(tuning.config_for, 8, N, K, gpu=timed(tmp_path / "table", *rows))
    assert config_for(adapters=[(32, 3584), (16, 512), (32, 512)]) == config
    assert config_for() == plain
    assert config_for(adapters=[(32, 3648), (32, 960)]) == plain
    deeper = dataclasses.replace(config, stages=3)
    assert [rank for rank in (0, 8, 32, 64, 72) if deeper.fits(N, K, rank)] == [8]
    gpu = timed(tmp_path / "deeper", dataclasses.replace(rows[0], config=deeper))
    for rank, expected in ((16, deeper), (64, dataclasses.replace(deeper, computes_lora_x=False))):
        assert tuning.config_for(8, N, K, adapters=[(rank, N)], gpu=gpu) == expected


def test_what_an_sm_cannot_hold_does_not_fit():
    good = SkinnyConfig(8, m16_tiles=4, warps=8, cluster=2, stages=4)
    assert good.fits(4608, 3584)
    for wrong in (
        {"tile_m": 12}, {"tile_m": 40}, {"m16_tiles": 3}, {"warps": 6}, {"warps": 36}, {"cluster": 9}, {"stages": 0},
        {"stages": 9}, {"m16_tiles": 8, "tile_m": 32, "warps": 4}, {"m16_tiles": 4, "warps": 28, "stages": 1},
    ):  # fmt: skip
        assert not dataclasses.replace(good, **wrong).fits(4608, 3584), wrong
    assert not dataclasses.replace(good, m16_tiles=8).fits(4608 + 64, 3584)
    assert not dataclasses.replace(good, cluster=8).fits(4608, 7 * 64)
    plain = GemmConfig(64, warpgroups_n=2, stages=3)
    assert plain.fits()
    for wrong in (
        {"tile_m": 0}, {"tile_m": 12}, {"tile_m": 264, "warpgroups_n": 1}, {"stages": 0}, {"stages": -1},
        {"k_tiles": 0}, {"warpgroups_k": 0}, {"cluster": 0}, {"cluster": 5}, {"ctas_per_sm": 0},
    ):  # fmt: skip
        assert not dataclasses.replace(plain, **wrong).fits(), wrong


def test_what_a_config_leaves_out():
    """Of the attributes, in their order."""
    assert dataclasses.astuple(GemmConfig(64)) == (64, 4, 1, 1, 2, 4, 1, False)
    assert dataclasses.astuple(SkinnyConfig(8)) == (8, 4, 8, 1, 4, False)
    assert dataclasses.astuple(PrologueConfig(2, 8, 1, 4)) == (2, 8, 1, 4, 1, 1)
