"""Finds the config of each GEMM by trying many, and stores the table that `qerl_kernels.nvfp4_matmul.tuning` reads.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward dx] [--write]

All configs that fit an SM are enumerated; of them are tried the table's present one, those that differ from it in one
field, and others drawn at random, `--most` in all. Each is compiled, checked (relative error) and timed; the faster
half is timed again with twice as many calls, until few are left (successive halving). No model of a GPU says what to
try, so that another GPU is tuned in the same way. For m up to 32 the skinny kernel's configs are tried, too, among them
those that compute `x A` themselves. Forward GEMMs carry adapters, as they do in rollouts and training. Where configs
differ in their LoRA input, the decode prologue is timed too, and counted (`matmul_programs`). Run it under a time
limit: a kernel with a wrong barrier does not return. `--write` replaces the rows of the GEMMs that were tried and
leaves the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import ahead
from matmul_programs import CALLS, RANK, Timer, Trial, all_programs, build, counted_prologue, present, prologues
from qerl_kernels.gpu import H200
from qerl_kernels.nvfp4_matmul import cases, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import MAX_M, SkinnyConfig
from record import add_commit, meta

T = TypeVar("T")
TABLE = tuning.path_of(H200.table)
TOKENS = (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)
FIRST_CALLS = 3  # timed calls of a config in the first round


def gemm_configs(m: int, n: int, transposed: bool, widths: tuple[int, ...]) -> list[GemmConfig]:
    """All that fit, with as many stages as fit (at most 8), into which adapters of these `widths` can be fused."""
    tiles_m = {-(-m // (8 * equal)) * 8 for equal in range(1, max(1, m // 64) + 1)}  # every number of equal tiles
    tiles_m = [tile_m for tile_m in sorted(tiles_m) if tile_m <= 256 and (tile_m >= 120 or m < 1024)]
    lookaheads = {row.config.lookahead for row in tuning.table() if isinstance(row.config, GemmConfig)}
    found = []
    for tile_m, along_n, along_k, cluster, k_tiles, ctas, mma_sync, ahead_of in itertools.product(
        tiles_m, range(1, 8), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2, 4), (1, 2, 3), (True, False), sorted(lookaheads)
    ):
        if along_n * along_k > 7 or (transposed and along_k > 2) or (mma_sync and (m > 32 or transposed)):
            continue
        if k_tiles == 4 and tile_m > 16 and along_k > 1 and cluster > 1:  # spills a few words, as compiling showed
            continue
        for stages in range(8, 1, -1):
            config = GemmConfig(tile_m, along_n, along_k, cluster, k_tiles, stages, ctas, mma_sync, ahead_of)
            if config.fits():
                if not widths or takes_lora(config, n, widths):
                    found.append(config)
                break
    return found


def takes_lora(config: GemmConfig, n: int, widths: tuple[int, ...]) -> bool:
    """Whether `tuning.config_for` has to give up no more than one stage of it for adapters of those widths."""
    smaller = dataclasses.replace(config, stages=max(2, config.stages - 1))
    return smaller.fits(has_lora=True) and config.can_fuse_lora(n, [(RANK, width) for width in widths])


def skinny_configs(m: int, n: int, k: int, widths: tuple[int, ...] = ()) -> list[SkinnyConfig]:
    """All that fit; none for m above 32. `widths`: of adapters whose `x A` they are to compute."""
    if m > MAX_M:
        return []
    adapters, found = [(RANK, features) for features in widths], []
    for m16_tiles, warps, cluster in itertools.product((1, 2, 4, 8), (4, 8, 12, 16), range(1, 9)):
        units = math.ceil(math.ceil(k / 64) / cluster / warps)  # k-tiles of a warp, all of which may be in flight
        for stages in range(1, min(units, 8) + 1):
            config = SkinnyConfig(-(-m // 8) * 8, m16_tiles, warps, cluster, stages, bool(adapters))
            if config.fits(n, k, RANK) and config.specialize(n, adapters) == config:
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


def trials(case: str, m: int, direction: str, most: int) -> list[Trial]:
    """What is tried for one GEMM, the table's present choice first."""
    n, k = cases.SHAPES[case]
    transposed = direction == "dx"
    widths = () if transposed else cases.parts(case)
    every: list[GemmConfig | SkinnyConfig] = [*gemm_configs(m, k if transposed else n, transposed, widths)]
    if not transposed:
        every += skinny_configs(m, n, k) + skinny_configs(m, n, k, widths)
    return [Trial(case, m, direction, config) for config in chosen(present(case, m, direction), every, most, m)]


def halved(several: Sequence[T], time: Callable[[Sequence[T], int], Mapping[T, float]], calls: int) -> dict[T, float]:
    """Successive halving: time all with `FIRST_CALLS`, the faster half with twice as many, and so on up to `calls`.

    Args:
      several: what is compared.
      time: (some of them, calls of each) -> time of each.
      calls: calls in the last round.

    Returns:
      The times of the last round, fastest first.
    """
    now, left = FIRST_CALLS, list(several)
    while True:
        times = time(left, now)
        left = sorted(times, key=times.__getitem__)
        if now >= calls or len(left) <= 1:
            return {one: times[one] for one in left}
        now, left = min(2 * now, calls), left[: max(2, -(-len(left) // 2))]


def tune(group: list[Trial], executables: Mapping) -> dict | None:
    """The table's row for the trials of one GEMM; prints the measurements. None where none runs."""
    timer = Timer(group, executables)
    case, m, direction = group[0].case, group[0].m, group[0].direction
    of_prologues = timer.times(prologues(group))
    added = {trial: counted_prologue(trial, of_prologues) for trial in group}

    def time(some: Sequence[Trial], calls: int) -> dict[Trial, float]:
        return {trial: us + (added[trial] or 0.0) for trial, us in timer.times(some, calls).items()}

    for trial, why in timer.refused.items():
        print(f"{case} {direction} m {m} {dataclasses.astuple(trial.config)} {why}", flush=True)
    able = [trial for trial in group if trial not in timer.refused]
    if not able:
        return None
    times = halved(able, time, CALLS)
    for trial, us in times.items():
        name, about = type(trial.config).__name__, " present" * (trial == group[0])
        print(f"{case} {direction} m {m} {name} {dataclasses.astuple(trial.config)} {us:.2f} us{about}", flush=True)
    best = next(iter(times))
    counted = None if added[best] is None else round(added[best], 2)
    own = round(times[best] - (added[best] or 0.0), 2)
    return tuning.to_json(tuning.Row(direction, *cases.SHAPES[case], m, best.config, own, counted))


def keep(stored: dict, row: dict) -> None:
    """Put a row into the table in place of that of the same GEMM."""
    same = ("direction", "n", "k", "m")
    stored["rows"] = [*(old for old in stored["rows"] if any(old[name] != row[name] for name in same)), row]


def in_lines(stored: dict) -> str:
    """JSON with one row a line."""
    rows = ",\n".join(
        json.dumps(row) for row in sorted(stored["rows"], key=lambda r: (r["direction"], r["n"], r["k"], r["m"]))
    )
    return '{\n"meta": ' + json.dumps(stored["meta"]) + ',\n"rows": [\n' + rows + "\n]\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS), help="rows of x")
    parser.add_argument("--direction", nargs="*", choices=["forward", "dx"], default=["forward", "dx"])
    parser.add_argument("--most", type=int, default=48, help="configs tried for each GEMM")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    add_commit(parser)
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=TABLE, help="store the rows found")
    args = parser.parse_args()
    stored = json.loads(TABLE.read_text())
    stored["meta"] = meta(args.commit) | {"note": stored["meta"].get("note", "")}
    gemms = itertools.product(args.cases, args.direction, args.tokens)
    groups = [trials(case, m, way, args.most) for case, way, m in gemms if way == "forward" or m >= 1024]
    executables = dict(ahead.compile_all(build, dict.fromkeys(all_programs(groups)), args.jobs))
    for group in groups:
        row = tune(group, executables)
        if row is None:
            continue
        keep(stored, row)
        print("best", *row.values(), flush=True)
        if args.write:
            args.write.write_text(in_lines(stored))


if __name__ == "__main__":
    main()
