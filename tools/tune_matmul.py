"""Finds the tile of each product by trying many, and stores the table that `qerl_kernels.nvfp4_matmul.tiles` reads.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward dx] [--write]

Of all tiles that fit a multiprocessor, those that a rough model of the kernel (`estimate`) puts first are compiled,
checked (relative error) and timed as `bench_matmul.py` does; the table's present tile is always among them. For up to
32 tokens so are as many splits of the kernel for few tokens (`few_tokens`), by a model of their own. Run it
under a time limit: a kernel with a wrong barrier does not return. `--write` replaces the rows of the products that were
tried and leaves the others; with `--untimed` it stores the model's choice, for products that nobody has timed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import pathlib
import time
from collections.abc import Sequence

import bench_matmul as bench
import jax
import jax.numpy as jnp
from qerl_kernels import dispatch
from qerl_kernels.nvfp4_matmul import cases, few_tokens, mosaic_gpu, tiles
from qerl_kernels.nvfp4_matmul.few_tokens import Split
from qerl_kernels.nvfp4_matmul.mosaic_gpu import Tile
from record import meta

TABLE = pathlib.Path(tiles.__file__).parent / tiles.TABLE
TOKENS = (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)
CLOCK_HZ = 1.85e9
SMS = dispatch.MULTIPROCESSORS


def estimate(tile: Tile, m: int, n: int, k: int) -> float:
    """Microseconds by a rough model: for a unit of 64 × 64 weights, cycles of the issue slots, of shared memory, of the
    tensor cores, of the path from the L2, and of one consumer's chain of waits divided by the consumers; the largest
    (with `mma.sync` plus a part of all; with `wgmma` the issue slots and the tensor cores add up, as sweeps show);
    times the units of the busiest multiprocessor; not under the DRAM's time; plus what a kernel pays once. It only has
    to put the good tiles among the first; the constants fit the sweeps in LOG.md by eye, most times within 15 %.
    """
    groups_of_8 = -(-tile.tokens // 8)
    moved = 2304 + 128 * tile.tokens / tile.rows
    issue = 80 + 40 / tile.depth + (6 * groups_of_8 if tile.warp_mma else 0)
    shared = 24 + moved / 128 + (32 * groups_of_8 if tile.warp_mma else 0)
    tensor = 4 * tile.tokens if tile.warp_mma else 2 * max(tile.tokens, 32)
    path = moved / 44
    chain = (300 / tile.depth + 260 + tensor) / (tile.consumers * tile.blocks_per_sm)
    unit = max(issue, shared, tensor, path, chain) + 0.15 * (issue + shared + tensor + path)
    if not tile.warp_mma:
        unit = max(issue + tensor, shared, path, chain)
    if tile.ahead:
        chain = (260 + 100 / tile.depth) / (tile.consumers * tile.blocks_per_sm)
        unit = max(1.1 * issue, tensor, shared, path, chain) + (35 if tile.ahead == 1 else 10)
    if m >= 1024:  # at the clock that the GPU's power allows
        unit = max(unit, 75 + 2.1 * tile.tokens) + 0.05 * unit
    tiles_ = -(-m // tile.tokens) * -(-n // (64 * tile.rows))
    groups = min(tiles_, mosaic_gpu.clusters_at_once(tile, SMS))
    steps = -(-k // (64 * tile.slices * tile.depth * tile.turn)) * tile.turn
    passes = math.ceil(-(-tiles_ // groups) * steps / tile.cluster)
    resident = min(tile.blocks_per_sm, math.ceil(groups * tile.cluster / SMS))
    busiest = passes * tile.slices * tile.depth * tile.rows * resident
    once = 4.0 + 0.6 * (tile.cluster > 1) + 0.3 * (tile.slices > 1) + 0.4 * (tile.cluster > 2)
    return max(busiest * unit / CLOCK_HZ * 1e6, n * k * 0.5625 / bench.COPY_BYTES_PER_S * 1e6) + once


def estimate_split(split: Split, n: int, k: int) -> float:
    """Microseconds of the kernel for few tokens, by a model like `estimate` that no sweep has been held against: for
    16 × 64 weights 20 cycles of the issue slots, by SASS; the path from the L2; the memory's latency for what the warps
    of a multiprocessor have under way; its rate; the largest and a part of all, and what a kernel pays once.
    """
    units = math.ceil(k / 64) / split.cluster
    blocks = math.ceil(n / 64) * 4 // split.rows * split.cluster
    registers = math.ceil((split.rows * split.tokens * 0.625 + 2 * split.tokens + 54) / 8) * 8
    memory, threads = few_tokens.SMEM_BYTES // split.smem_bytes(), 64 // split.warps
    resident = max(1, min(memory, threads, 65536 // (32 * split.warps * registers)))
    # of the clusters of 5 to 7 nobody has asked the driver: as those of six, if they take multiprocessors by pairs
    clusters = mosaic_gpu.AT_ONCE.get(split.cluster, 18 if split.cluster < 7 else 15) * resident
    waves = math.ceil(blocks / split.cluster / clusters)
    busiest = max(math.ceil(blocks / SMS), resident * waves if waves > 1 else 1)
    at_once = min(busiest, resident)
    of_block = units * (576 * split.rows + 128 * split.tokens)
    of_warp = units / split.warps
    depth = of_warp if split.depth >= of_warp else split.depth - 0.5  # a slot is empty while its unit is read
    under_way = at_once * split.warps * depth * 576 * split.rows
    issue = busiest * units * split.rows * (20 + split.tokens / 8)
    path = busiest * of_block / 44
    waits = busiest * units * 576 * split.rows / under_way * 1500
    rate = n * k * 0.5625 / bench.COPY_BYTES_PER_S * CLOCK_HZ
    once = 3.3 + 0.5 * (split.cluster > 1) + 0.3 * (busiest / at_once - 1)
    return (max(issue, path, waits, rate) + 0.15 * (issue + path + waits)) / CLOCK_HZ * 1e6 + once


def splits(m: int, n: int, k: int, most: int) -> list[Split]:
    """The `most` splits for few tokens that look best, at most two with the same rows and cluster; none above 32
    tokens."""
    if m > few_tokens.MOST_TOKENS:
        return []
    found = []
    for rows, warps, cluster in itertools.product((1, 2, 4, 8), (4, 8, 12, 16), range(1, 9)):
        units = math.ceil(math.ceil(k / 64) / cluster / warps)  # of a warp, all of which may be under way
        for depth in range(1, min(units, 8) + 1):
            split = Split(-(-m // 8) * 8, rows, warps, cluster, depth)
            if few_tokens.fits(split, n, k):
                found.append(split)
    chosen, alike = [], collections.Counter()
    for split in sorted(found, key=lambda split: (estimate_split(split, n, k), split.depth)):
        alike[split.rows, split.cluster] += 1
        if alike[split.rows, split.cluster] <= 2:
            chosen.append(split)
    return chosen[:most]


def model(how: Tile | Split, m: int, n: int, k: int) -> float:
    """Microseconds that the model of its kernel expects."""
    return estimate_split(how, n, k) if isinstance(how, Split) else estimate(how, m, n, k)


def takes_adapters(tile: Tile, n: int, parts: tuple[int, ...]) -> bool:
    """Whether `tiles.tile_for` has to give up no more than one of its stages for adapters of those parts."""
    fewer = dataclasses.replace(tile, stages=max(2, tile.stages - 1))
    return mosaic_gpu.fits(fewer, adapted=True) and mosaic_gpu.can_fuse(tile, n, [(32, part) for part in parts])


def candidates(
    m: int, n: int, k: int, transposed: bool, most: int, parts: tuple[int, ...] = (), ahead: Sequence[int] = (0, 1, 2)
) -> list[Tile]:
    """The `most` tiles that look best for x [m, k] and a weight [n, k], with as many stages as fit (at most 8).

    Only those into which adapters for `parts` of the features fit: rollouts and training always have them. At most
    two have the same consumers (tokens, rows, slices, ahead), so that what the model gets wrong for one kind does not
    take all the places.
    """
    adapted = bool(parts)
    widths = {-(-m // (8 * equal)) * 8 for equal in range(1, max(1, m // 64) + 1)}  # every number of equal tiles
    widths = [width for width in sorted(widths) if width <= 256 and (width >= 120 or m < 1024)]
    found = []
    for tokens, rows, slices, cluster, depth, blocks, warp_mma, ahead_ in itertools.product(
        widths, range(1, 8), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2, 4), (1, 2, 3), (True, False), ahead
    ):
        if rows * slices > 7 or (transposed and slices > 2) or (warp_mma and (m > 32 or transposed)):
            continue
        if (tokens > 32 and (depth == 4 or blocks == 3)) or (rows > 3 and tokens > 128) or (cluster > 2 and m > 512):
            continue
        for stages in range(8, 1, -1):
            tile = Tile(tokens, rows, slices, cluster, depth, stages, blocks, warp_mma, ahead_)
            if mosaic_gpu.fits(tile):
                enough = stages * depth * slices * blocks >= 4 and not (ahead_ and (stages - 1) * depth < 3)
                if enough and (not adapted or takes_adapters(tile, n, parts)):
                    found.append(tile)
                break
    best = {}  # of those that differ in depth and stages alone
    for tile in sorted(found, key=lambda tile: estimate(tile, m, n, k)):
        best.setdefault(dataclasses.replace(tile, depth=1, stages=1), tile)
    chosen, alike = [], collections.Counter()
    for tile in best.values():
        consumers = (tile.tokens, tile.rows, tile.slices, tile.warp_mma, tile.ahead)
        alike[consumers] += 1
        if alike[consumers] <= 2:
            chosen.append(tile)
    return chosen[:most]


def attempt(
    what: str, transposed: bool, x: jax.Array, weights: list, expected: jax.Array, us: float, tile: Tile | Split
):
    """Microseconds of a product, or what the compiler says against it."""
    call = functools.partial(product, tile=tile, transposed=transposed)
    rounds = max(2, bench.rounds_of(us, len(weights)))  # a loop of one round is none: its first product would be `call`
    loop = bench.looped(call, rounds)
    try:
        both = jax.jit(lambda x, weights: (loop(x, weights), call(x, weights[0])), compiler_options=bench.ONE_BY_ONE)
        compiled = both.lower(x, weights).compile()
    except Exception as error:  # any refusal of the compiler is an answer
        return repr(error)[:200]
    with bench.gpu_alone():
        try:  # the rest of the sweep is worth having
            bench.refuse_if_wrong(compiled(x, weights)[1], expected, what)
        except (SystemExit, jax.errors.JaxRuntimeError) as error:
            return f"WRONG: {str(error)[:200]}"
        warm = 0.1 if us > 100 else 0.01  # what heats the GPU is to be timed at the clock that its power allows
        return bench.microseconds(compiled, x, weights, rounds * len(weights) + 1, repeats=3, warm=warm)


def product(x: jax.Array, weight, tile: Tile | Split, transposed: bool) -> jax.Array:
    if isinstance(tile, Split):
        return few_tokens.matmul(x, weight, tile)
    return mosaic_gpu.matmul(x, weight, tile, transposed=transposed)


def tune_case(
    case: str, tokens: list[int], directions: list[str], most: int, ahead: list[int], until: float
) -> list[dict]:
    """Rows of the table for one shape; what is measured is printed. Nothing new is begun after the time `until`."""
    n, k = cases.SHAPES[case]
    with bench.gpu_shared():
        weights = jax.block_until_ready(bench.weights_of(case))
    rows = []
    for m, direction in itertools.product(tokens, directions):
        transposed = direction == "dx"
        if time.time() > until or (transposed and m < 1024):
            continue
        shape = (k, n) if transposed else (n, k)
        with bench.gpu_shared():
            x = jax.random.normal(jax.random.key(0), (m, shape[1]), jnp.bfloat16)
            expected = bench.exact(x, weights[0], transposed)
        present = tiles.tile_for(m, n, k, transposed=transposed)
        parts = () if transposed else cases.parts(case)
        wanted = [present, *candidates(m, *shape, transposed, most, parts, ahead)]
        wanted = list(dict.fromkeys(wanted + ([] if transposed else splits(m, n, k, most))))
        us = 1.5 * bench.floor_us(m, n, k) + 5
        some = weights[:3] if m >= 1024 else weights
        one = functools.partial(attempt, f"{case} {direction} m={m}", transposed, x, some, expected, us)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = dict(zip(wanted, pool.map(one, wanted), strict=True))
        for tile, us in sorted(results.items(), key=lambda item: (isinstance(item[1], str), item[1])):
            measured = us if isinstance(us, str) else f"{us:.2f} us"
            about = f"(model {model(tile, m, *shape):.1f}){' present' * (tile == present)}"
            kind = type(tile).__name__
            print(f"{case} {direction} m {m} {kind} {dataclasses.astuple(tile)} {measured} {about}", flush=True)
        best = min((us, i) for i, us in enumerate(results.values()) if not isinstance(us, str))[1]
        row = tiles.Row(direction, n, k, m, wanted[best], round(results[wanted[best]], 2))
        rows.append(tiles.as_stored(row))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.SHAPES), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--direction", nargs="*", choices=["forward", "dx"], default=["forward", "dx"])
    parser.add_argument("--most", type=int, default=12, help="tiles tried for each product")
    parser.add_argument("--ahead", nargs="*", type=int, default=[0, 1, 2], choices=[0, 1, 2], help="of the tiles tried")
    parser.add_argument("--jobs", type=int, default=10, help="processes that compile; they time one at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further product is begun")
    parser.add_argument("--untimed", action="store_true", help="no GPU: take what the model puts first")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=TABLE, help="store what was found")
    args = parser.parse_args()
    stored = json.loads(TABLE.read_text())
    best = []
    if args.untimed:
        for case in args.cases:
            keep(stored, best, guesses(case, args.tokens, args.direction, args.ahead), over_timed=False)
        for row in best:
            print(*row.values())
        if args.write:
            args.write.write_text(in_lines(stored))
        return
    stored["meta"] = meta(args.commit) | {"note": stored["meta"].get("note", "")}
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        rest = (args.tokens, args.direction, args.most, args.ahead, time.time() + args.seconds)
        tasks = [pool.submit(tune_case, case, *rest) for case in args.cases]
        for done in concurrent.futures.as_completed(tasks):
            keep(stored, best, done.result())
            if args.write:
                args.write.write_text(in_lines(stored))
    for row in sorted(best, key=lambda row: (row["direction"], row["tokens"], row["n"], row["k"])):
        tile = tuple(row["tile"].values())
        print(f"best {row['direction']} n {row['n']} k {row['k']} m {row['tokens']} {tile} {row['us']} us", flush=True)


def guesses(case: str, tokens: list[int], directions: list[str], ahead: list[int]) -> list[dict]:
    """Rows of the table for one shape as the model has them, without a time."""
    n, k = cases.SHAPES[case]
    rows = []
    for m, direction in itertools.product(tokens, directions):
        transposed = direction == "dx"
        if transposed and m < 1024:
            continue
        parts = () if transposed else cases.parts(case)
        [tile] = candidates(m, *((k, n) if transposed else (n, k)), transposed, 1, parts, ahead)
        rows.append(tiles.as_stored(tiles.Row(direction, n, k, m, tile, None)))
    return rows


def keep(stored: dict, best: list[dict], rows: list[dict], over_timed: bool = True) -> None:
    """Put rows into the table in place of those of the same products; a timed one stays unless `over_timed`."""
    for row in rows:
        key = [row[name] for name in ("direction", "n", "k", "tokens")]
        same = [r for r in stored["rows"] if [r[name] for name in ("direction", "n", "k", "tokens")] == key]
        if over_timed or not any(r["us"] is not None for r in same):
            stored["rows"] = [*(r for r in stored["rows"] if r not in same), row]
            best.append(row)


def in_lines(stored: dict) -> str:
    """JSON with one row a line."""
    rows = ",\n".join(
        json.dumps(row) for row in sorted(stored["rows"], key=lambda r: (r["direction"], r["n"], r["k"], r["tokens"]))
    )
    return '{\n"meta": ' + json.dumps(stored["meta"]) + ',\n"rows": [\n' + rows + "\n]\n}\n"


if __name__ == "__main__":
    main()
