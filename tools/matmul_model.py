"""The tuner's model of both GEMM kernels, and the configs that it finds worth trying."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from matmul_report import COPY_BYTES_PER_S
from qerl_kernels.dispatch import SMS
from qerl_kernels.nvfp4_matmul import split as cut
from qerl_kernels.nvfp4_matmul.gemm.config import RESIDENT_CLUSTERS, GemmConfig
from qerl_kernels.nvfp4_matmul.split import Split

CLOCK_HZ = 1.98e9
RANK = 32  # of the adapters
MAX_PROLOGUE_US = 4.0  # microseconds that a prologue's `x A` may cost: more is not gained by computing it in the GEMM


def model(config: GemmConfig | Split, m: int, n: int, k: int) -> float:
    """Microseconds that the model of its kernel expects."""
    return estimate_skinny(config, n, k) if isinstance(config, Split) else estimate_gemm(config, m, n, k)


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
        issue = 112 if config.lookahead == 2 else 146
    tensor = 0 if config.mma_sync else 2 * max(config.tile_m, 32)
    waits = 250 if config.lookahead else 82 + 276 / config.k_tiles + issue
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    clusters = min(tiles, config.resident_clusters(SMS))
    cluster_tiles = -(-tiles // clusters)
    k_steps = -(-k // (64 * config.stage_k_tiles * config.unroll)) * config.unroll
    k_tiles = -(-cluster_tiles * k_steps // config.cluster) * config.k_tiles  # of a consumer
    resident = min(config.ctas_per_sm, -(-clusters // RESIDENT_CLUSTERS[config.cluster]))
    all_k_tiles = k_tiles * config.consumers * resident
    bounds = (
        all_k_tiles * (issue + tensor),
        k_tiles * (waits + tensor),
        k_tiles * 1000 / max(0.5, (config.stages - 1) * config.k_tiles - bool(config.lookahead)),
        all_k_tiles * (2304 + 128 * config.tile_m / config.warpgroups_n) / 46,
    )
    work = max(sum(bound**8 for bound in bounds) ** (1 / 8), dram(n, k))
    segments = -(-cluster_tiles // config.cluster) + (config.cluster > 1)
    sums = config.warpgroups_k + (config.cluster > 1)
    ends = segments * resident * 5.8 * config.tile_m * config.warpgroups_n * sums
    return (work + ends) / CLOCK_HZ * 1e6 + 2.0 + 1.2 * (config.cluster > 1)


def estimate_skinny(split: Split, n: int, k: int) -> float:
    """Microseconds of the skinny kernel, by a model like `estimate_gemm`: the issue slots of the busiest SM, the path
    from the L2, one warp's chain of work, the memory's latency for the k-tiles that a warp has under way, the DRAM's
    time; the largest; then the sums over warps and CTAs, and the fixed cost of a kernel and of each wave of CTAs.

    Fitted to 600 durations of 30 GEMMs as `estimate_gemm` was: 1.7 % (15 % at most), 28 of 30, 5 %; without 32B, 14B or
    7B 2.4, 1.0 and 2.3 %. There were few with m = 32 and with one m16 tile in a CTA. The cost of `x A` (A's bytes, half
    an m16 tile for 16 ranks, 0.4 us at the end) is not fitted: five times of o of 7B and 14B in the table are within
    5 % of it, four of 3B and 0.5B 0.8 to 1.6 us below.
    """
    layout = cut.Layout(split, RANK)
    units = math.ceil(k / 64) / split.cluster
    clusters = split.clusters(n)
    at_once = RESIDENT_CLUSTERS[split.cluster]
    registers = math.ceil(((split.rows + layout.steps) * split.tokens * 0.625 + 2 * split.tokens + 54) / 8) * 8
    memory, threads = cut.SMEM_BYTES // split.smem_bytes(RANK), 64 // split.warps
    resident = max(1, min(memory, threads, 65536 // (32 * split.warps * registers)))
    waves, busiest = math.ceil(clusters / (at_once * resident)), math.ceil(clusters / at_once)
    of_warp = math.ceil(units / split.warps)
    unit = split.rows * (29.7 + 3.89 * split.tokens / 8) + layout.steps * (14.9 + 3.89 * split.tokens / 8)
    rounds = 1 if split.depth >= of_warp else of_warp / (split.depth - 0.5)  # a stage is empty while its k-tile is read
    bounds = (
        busiest * units * unit,
        busiest * units * (576 * split.rows + 128 * split.tokens + 128 * layout.columns) / 40,
        waves * of_warp * 4.8 * unit,
        waves * rounds * 1680,
        dram(n, k),
    )
    ends = (0.062 * busiest * split.warps + 0.06 * split.cluster) * (split.rows + layout.steps) * split.tokens / 64
    ends += 0.4 * split.shrinks
    return max(bounds) / CLOCK_HZ * 1e6 + ends + 2.1 + 0.45 * (split.cluster > 1) + 1.2 * (waves - 1)


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
    lookahead: Sequence[int] = (0, 1, 2),
) -> list[GemmConfig]:
    """The `most` configs that look best for a GEMM of these sizes, with as many stages as fit (at most 8).

    Only those into which adapters of these `widths` fit: rollouts and training always have them. At most two have the
    same consumers (tile_m, warpgroups, mma_sync, lookahead), so that an error of the model for one kind does not take
    all the places.
    """
    best = {}  # of those that differ in k_tiles and stages alone
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


def feasible(m: int, n: int, transposed: bool, widths: tuple[int, ...], lookahead: Sequence[int]) -> list[GemmConfig]:
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


def skinny_candidates(m: int, n: int, k: int, most: int, shrinking: tuple[int, ...] = ()) -> list[Split]:
    """The `most` skinny configs that look best, at most two with the same rows and cluster; none for m above 32.
    `shrinking`: widths of adapters whose `x A` they are to compute."""
    if m > cut.MOST_TOKENS:
        return []
    adapters = [(RANK, features) for features in shrinking]
    found = []
    for rows, warps, cluster in itertools.product((1, 2, 4, 8), (4, 8, 12, 16), range(1, 9)):
        units = math.ceil(math.ceil(k / 64) / cluster / warps)  # of a warp, all of which may be under way
        for depth in range(1, min(units, 8) + 1):
            split = Split(-(-m // 8) * 8, rows, warps, cluster, depth, bool(adapters))
            if cut.fits(split, n, k, RANK) and cut.fitted(split, n, adapters) == split:
                found.append(split)
    chosen, alike = [], collections.Counter()
    for split in sorted(found, key=lambda split: (estimate_skinny(split, n, k), split.depth)):
        alike[split.rows, split.cluster] += 1
        if alike[split.rows, split.cluster] <= 2:
            chosen.append(split)
    return chosen[:most]


def worth_trying(m: int, n: int, k: int, most: int, widths: tuple[int, ...]) -> list[Split]:
    """The skinny configs that are given `x A`, and those that compute it and may be faster with the time it saves in
    the prologue."""
    plain = skinny_candidates(m, n, k, most)
    if not plain:
        return []
    bound = estimate_skinny(plain[0], n, k) + MAX_PROLOGUE_US
    return plain + [split for split in skinny_candidates(m, n, k, most, widths) if estimate_skinny(split, n, k) < bound]
