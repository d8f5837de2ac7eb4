"""The configs that are tried for a GEMM."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import TypeVar

from qerl_kernels.gpu import Gpu
from qerl_kernels.nvfp4_matmul import tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import MAX_TILE_M, SkinnyConfig
from qerl_kernels.nvfp4_matmul.tuner.trials import RANK, Gemm, Trial, present

T = TypeVar("T")


def trials(gemm: Gemm, m: int, direction: str, most: int, gpu: Gpu) -> list[Trial]:
    """What is tried for one GEMM: the table's present choice, configs that differ from it in one field, and others at
    random, at most `most` in all."""
    transposed = direction == "dx"
    widths = () if transposed else gemm.parts
    n, k = gemm.n, gemm.k
    every: list[GemmConfig | SkinnyConfig] = [*gemm_configs(m, k if transposed else n, transposed, widths, gpu)]
    if not transposed:
        every += skinny_configs(m, n, k, gpu)
        if gpu.tier == "wgmma" or gemm.prologue != "norm":  # elsewhere XLA computes it beside the norm: not comparable
            every += skinny_configs(m, n, k, gpu, widths)
    start = present(gemm, m, direction, gpu)
    return [Trial(gemm, m, direction, config, gpu) for config in chosen(start, every, most, m)]


def gemm_configs(m: int, n: int, transposed: bool, widths: tuple[int, ...], gpu: Gpu) -> list[GemmConfig]:
    """All that fit, with as many stages as fit (at most 8), into which adapters of these `widths` can be fused; none
    where the GPU lacks `wgmma`."""
    if gpu.tier != "wgmma":
        return []
    tiles_m = {-(-m // (8 * equal)) * 8 for equal in range(1, max(1, m // 64) + 1)}  # every number of equal tiles
    tiles_m = [tile_m for tile_m in sorted(tiles_m) if tile_m <= 256 and (tile_m >= 120 or m < 1024)]
    lookaheads = {row.config.lookahead for row in tuning.table(gpu.table) if isinstance(row.config, GemmConfig)}
    found = []
    for tile_m, along_n, along_k, cluster, k_tiles, ctas, ahead_of in itertools.product(
        tiles_m, range(1, 8), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2, 4), (1, 2, 3), sorted(lookaheads)
    ):
        if along_n * along_k > 7 or (transposed and along_k > 2):
            continue
        if k_tiles == 4 and tile_m > 16 and along_k > 1 and cluster > 1:  # spills a few words, as compiling showed
            continue
        for stages in range(8, 1, -1):
            config = GemmConfig(tile_m, along_n, along_k, cluster, k_tiles, stages, ctas, ahead_of)
            if config.fits():
                if not widths or takes_lora(config, n, widths):
                    found.append(config)
                break
    return found


def takes_lora(config: GemmConfig, n: int, widths: tuple[int, ...]) -> bool:
    """Whether `tuning.config_for` has to give up no more than one stage of it for adapters of those widths."""
    smaller = dataclasses.replace(config, stages=max(2, config.stages - 1))
    return smaller.fits(has_lora=True) and config.can_fuse_lora(n, [(RANK, width) for width in widths])


def skinny_configs(m: int, n: int, k: int, gpu: Gpu, widths: tuple[int, ...] = ()) -> list[SkinnyConfig]:
    """All that fit, with the fewest blocks of rows; none for more than four blocks. `widths`: of adapters whose `x A`
    they are to compute.
    """
    blocks = -(-m // MAX_TILE_M)
    if blocks > 4:
        return []
    tile_m = -(-m // (8 * blocks)) * 8
    adapters, found = [(RANK, features) for features in widths], []
    for m16_tiles, warps, cluster in itertools.product((1, 2, 4, 8), (4, 8, 12, 16), range(1, 9)):
        units = math.ceil(math.ceil(k / 64) / cluster / warps)  # k-tiles of a warp, all of which may be in flight
        for stages in range(1, min(units, 8) + 1):
            config = SkinnyConfig(tile_m, m16_tiles, warps, cluster, stages, bool(adapters))
            if config.fits(n, k, RANK, gpu) and config.specialize(n, adapters, gpu) == config:
                found.append(config)
    return found


def chosen(start: T, every: Sequence[T], most: int, seed: int) -> list[T]:
    """`start`, those of `every` that differ from it in one field, and others at random, at most `most` in all."""

    def differences(config: T) -> int:
        if type(config) is not type(start):
            return len(dataclasses.fields(config))
        return sum(a != b for a, b in zip(dataclasses.astuple(config), dataclasses.astuple(start), strict=True))

    others = [config for config in every if config != start]
    random.Random(seed).shuffle(others)
    return [start, *sorted(others, key=lambda config: differences(config) > 1)][:most]
