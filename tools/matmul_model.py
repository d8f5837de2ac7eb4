"""The tuner's model of both GEMM kernels, and the configs that it finds worth trying."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from matmul_report import COPY_BYTES_PER_S
from qerl_kernels.dispatch import RESIDENT_CLUSTERS, SMEM_BYTES, SMS
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import MAX_M, SharedLayout, SkinnyConfig

CLOCK_HZ = 1.98e9
RANK = 32  # LoRA rank
MAX_PROLOGUE_US = 4.0  # microseconds that a prologue's `x A` may cost: more is not gained by computing it in the GEMM


def model(config: GemmConfig | SkinnyConfig, m: int, n: int, k: int) -> float:
    """Microseconds that the model of its kernel expects."""
    return estimate_skinny(config, n, k) if isinstance(config, SkinnyConfig) else estimate_gemm(config, m, n, k)


def estimate_gemm(config: GemmConfig, m: int, n: int, k: int) -> float:
    """Microseconds by a model in cycles of the busiest SM: its issue slots and tensor cores, which add up over its
    consumers (tools/results/notes/matmul.md); one consumer's chain of waits, from which lookahead takes what it issues;
    the turn-around of a stage; the path from the L2, no faster than ever seen; nearly the largest of these, not under
    the DRAM's time; then the ends of tiles, and the fixed cost of a kernel.

    Fitted to 950 durations of 79 GEMMs on an H200, without adapters. Its first choice of those measured is 1.8 % slower
    than the best in the geometric mean (13 % at most), the best is among its first eight in 78 GEMMs, a time is off by
    6 % in the median. Fitted without 32B, 14B or 7B: 1.5, 1.2 and 2.2 % in the model that was left out.
    """
    n8_tiles = -(-config.tile_m // 8)
    issue = 65 + 97 / config.k_tiles + (48 * n8_tiles if config.mma_sync else 0)
    if config.lookahead:
        issue = 112
    tensor = 0 if config.mma_sync else 2 * max(config.tile_m, 32)
    waits = 250 if config.lookahead else 82 + 276 / config.k_tiles + issue
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    clusters = min(tiles, config.resident_clusters(SMS))
    cluster_tiles = -(-tiles // clusters)
    k_iterations = -(-k // (64 * config.stage_k_tiles * config.unroll)) * config.unroll
    k_tiles = -(-cluster_tiles * k_iterations // config.cluster) * config.k_tiles  # k-tiles of a consumer
    resident = min(config.ctas_per_sm, -(-clusters // RESIDENT_CLUSTERS[config.cluster]))
    all_k_tiles = k_tiles * config.consumers * resident
    bounds = (
        all_k_tiles * (issue + tensor),
        k_tiles * (waits + tensor),
        k_tiles * 1000 / max(0.5, (config.stages - 1) * config.k_tiles - config.lookahead),
        all_k_tiles * (2304 + 128 * config.tile_m / config.warpgroups_n) / 46,
    )
    work = max(sum(bound**8 for bound in bounds) ** (1 / 8), dram(n, k))
    segments = -(-cluster_tiles // config.cluster) + (config.cluster > 1)
    sums = config.warpgroups_k + (config.cluster > 1)
    ends = segments * resident * 5.8 * config.tile_m * config.warpgroups_n * sums
    return (work + ends) / CLOCK_HZ * 1e6 + 2.0 + 1.2 * (config.cluster > 1)


def estimate_skinny(config: SkinnyConfig, n: int, k: int) -> float:
    """Microseconds of the skinny kernel, by a model like `estimate_gemm`: the issue slots of the busiest SM, the path
    from the L2, one warp's chain of work, the memory's latency for the k-tiles that a warp has under way, the DRAM's
    time; the largest; then the sums over warps and CTAs, and the fixed cost of a kernel and of each wave of CTAs.

    Fitted to 600 durations of 30 GEMMs as `estimate_gemm` was: 1.7 % (15 % at most), 28 of 30, 5 %; without 32B, 14B or
    7B 2.4, 1.0 and 2.3 %. There were few with m = 32 and with one m16 tile in a CTA. The cost of `x A` (A's bytes, half
    an m16 tile for 16 ranks, 0.4 us at the end) is not fitted: five times of o of 7B and 14B in the table are within
    5 % of it, four of 3B and 0.5B 0.8 to 1.6 us below.
    """
    layout = SharedLayout(config, RANK)
    units = math.ceil(k / 64) / config.cluster
    clusters = config.clusters(n)
    resident_clusters = RESIDENT_CLUSTERS[config.cluster]
    registers = (
        math.ceil(((config.m16_tiles + layout.rank_tiles) * config.tile_m * 0.625 + 2 * config.tile_m + 54) / 8) * 8
    )
    memory, threads = SMEM_BYTES // config.smem_bytes(RANK), 64 // config.warps
    resident = max(1, min(memory, threads, 65536 // (32 * config.warps * registers)))
    waves, busiest = math.ceil(clusters / (resident_clusters * resident)), math.ceil(clusters / resident_clusters)
    of_warp = math.ceil(units / config.warps)
    unit = config.m16_tiles * (29.7 + 3.89 * config.tile_m / 8) + layout.rank_tiles * (14.9 + 3.89 * config.tile_m / 8)
    rounds = (
        1 if config.stages >= of_warp else of_warp / (config.stages - 0.5)
    )  # a stage is empty while its k-tile is read
    bounds = (
        busiest * units * unit,
        busiest * units * (576 * config.m16_tiles + 128 * config.tile_m + 128 * layout.a_columns) / 40,
        waves * of_warp * 4.8 * unit,
        waves * rounds * 1680,
        dram(n, k),
    )
    ends = (
        (0.062 * busiest * config.warps + 0.06 * config.cluster)
        * (config.m16_tiles + layout.rank_tiles)
        * config.tile_m
        / 64
    )
    ends += 0.4 * config.computes_lora_x
    return max(bounds) / CLOCK_HZ * 1e6 + ends + 2.1 + 0.45 * (config.cluster > 1) + 1.2 * (waves - 1)


def dram(n: int, k: int) -> float:
    """Cycles that a weight's packed bytes take at the rate of a copy."""
    return n * k * 0.5625 / COPY_BYTES_PER_S * CLOCK_HZ


def takes_lora(config: GemmConfig, n: int, widths: tuple[int, ...]) -> bool:
    """Whether `tuning.config_for` has to give up no more than one stage of it for adapters of those widths."""
    smaller = dataclasses.replace(config, stages=max(2, config.stages - 1))
    return smaller.fits(has_lora=True) and config.can_fuse_lora(n, [(RANK, width) for width in widths])


def candidates(
    m: int,
    n: int,
    k: int,
    transposed: bool,
    most: int,
    widths: tuple[int, ...] = (),
    lookahead: Sequence[bool] = (False, True),
) -> list[GemmConfig]:
    """The `most` configs that look best for a GEMM of these sizes, with as many stages as fit (at most 8).

    Only those into which adapters of these `widths` fit: rollouts and training always have them. At most two have the
    same consumers (tile_m, warpgroups, mma_sync, lookahead), so that an error of the model for one kind does not take
    all the places.
    """
    best = {}  # the best among configurations that differ in k_tiles and stages alone
    found = feasible(m, n, transposed, widths, lookahead)
    for config in sorted(found, key=lambda config: estimate_gemm(config, m, n, k)):
        best.setdefault(dataclasses.replace(config, k_tiles=1, stages=1), config)
    chosen, alike = [], collections.Counter()
    for config in best.values():
        consumers = (config.tile_m, config.warpgroups_n, config.warpgroups_k, config.mma_sync, config.lookahead)
        alike[consumers] += 1
        if alike[consumers] <= 2:
            chosen.append(config)
    return chosen[:most]


def feasible(m: int, n: int, transposed: bool, widths: tuple[int, ...], lookahead: Sequence[bool]) -> list[GemmConfig]:
    """All configs that `candidates` chooses from."""
    tiles_m = {-(-m // (8 * equal)) * 8 for equal in range(1, max(1, m // 64) + 1)}  # every number of equal tiles
    tiles_m = [tile_m for tile_m in sorted(tiles_m) if tile_m <= 256 and (tile_m >= 120 or m < 1024)]
    found = []
    for tile_m, along_n, along_k, cluster, k_tiles, ctas, mma_sync, ahead in itertools.product(
        tiles_m, range(1, 8), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2, 4), (1, 2, 3), (True, False), lookahead
    ):
        if along_n * along_k > 7 or (transposed and along_k > 2) or (mma_sync and (m > 32 or transposed)):
            continue
        if k_tiles == 4 and tile_m > 16 and along_k > 1 and cluster > 1:  # spills a few words, as compiling showed
            continue
        if (tile_m > 32 and (k_tiles == 4 or ctas == 3)) or (along_n > 3 and tile_m > 128) or (cluster > 2 and m > 512):
            continue
        for stages in range(8, 1, -1):
            config = GemmConfig(tile_m, along_n, along_k, cluster, k_tiles, stages, ctas, mma_sync, ahead)
            if config.fits():
                is_deep = stages * k_tiles * along_k * ctas >= 4 and not (ahead and (stages - 1) * k_tiles < 3)
                if is_deep and (not widths or takes_lora(config, n, widths)):
                    found.append(config)
                break
    return found


def skinny_candidates(m: int, n: int, k: int, most: int, shrinking: tuple[int, ...] = ()) -> list[SkinnyConfig]:
    """The `most` skinny configs that look best, at most two with the same rows and cluster; none for m above 32.
    `shrinking`: widths of adapters whose `x A` they are to compute."""
    if m > MAX_M:
        return []
    adapters = [(RANK, features) for features in shrinking]
    found = []
    for m16_tiles, warps, cluster in itertools.product((1, 2, 4, 8), (4, 8, 12, 16), range(1, 9)):
        units = math.ceil(math.ceil(k / 64) / cluster / warps)  # k-tiles of a warp, all of which may be in flight
        for stages in range(1, min(units, 8) + 1):
            config = SkinnyConfig(-(-m // 8) * 8, m16_tiles, warps, cluster, stages, bool(adapters))
            if config.fits(n, k, RANK) and config.specialize(n, adapters) == config:
                found.append(config)
    chosen, alike = [], collections.Counter()
    for config in sorted(found, key=lambda config: (estimate_skinny(config, n, k), config.stages)):
        alike[config.m16_tiles, config.cluster] += 1
        if alike[config.m16_tiles, config.cluster] <= 2:
            chosen.append(config)
    return chosen[:most]


def worth_trying(m: int, n: int, k: int, most: int, widths: tuple[int, ...]) -> list[SkinnyConfig]:
    """The skinny configs that are given `x A`, and those that compute it and may be faster with the time it saves in
    the prologue."""
    plain = skinny_candidates(m, n, k, most)
    if not plain:
        return []
    bound = estimate_skinny(plain[0], n, k) + MAX_PROLOGUE_US
    return plain + [
        config for config in skinny_candidates(m, n, k, most, widths) if estimate_skinny(config, n, k) < bound
    ]
