"""Finds the tile of each product by trying many, and stores the table that `qerl_kernels.nvfp4_matmul.tiles` reads.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward dx] [--write]

Of all tiles that fit a multiprocessor, those that a rough model of the kernel (`estimate`) puts first are compiled by
processes that do not touch the GPU (`ahead`), then checked (relative error) and timed one after the other; the table's
present tile is always among them. For up to 32 tokens so are as many splits of the kernel for few tokens
(`few_tokens`), by a model of their own, and as many that compute `x A` themselves, where the model sees a gain in that.
Forward products carry adapters, as they do in rollouts and training. Where they differ in what they are given of the
adapters' `x A` (`takes`), what precedes them in decode is timed too, and counted (`Before`). A time is the median
duration of the kernel itself as the profiler has it, over weights that outgrow the L2: some 0.8 µs less than in a loop.
Run it under a time limit: a kernel with a wrong barrier does not return. `--write` replaces the rows of the products
that were tried and leaves the others; with `--untimed` it stores the model's choice, for products that nobody has
timed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence

import ahead
import bench_matmul as bench
import jax
import jax.numpy as jnp
from matmul_report import COPY_BYTES_PER_S
from qerl_kernels import dispatch
from qerl_kernels.decode_prologue import config as prologue_config
from qerl_kernels.decode_prologue import reference
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul import cases, few_tokens, mosaic_gpu, tiles
from qerl_kernels.nvfp4_matmul import split as cut
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, split_lora_x
from qerl_kernels.nvfp4_matmul.split import Split
from qerl_kernels.nvfp4_matmul.tile import AT_ONCE, Tile, can_fuse, clusters_at_once, fits
from qerl_kernels.ops import fp32_matmul
from record import kernel_medians, meta

TABLE = pathlib.Path(tiles.__file__).parent / tiles.TABLE
TOKENS = (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)
CLOCK_HZ = 1.98e9
SMS = dispatch.MULTIPROCESSORS
RANK = 32  # of the adapters
FEW_CALLS = 24  # of what is timed with fewer than 1024 tokens
OURS = re.compile("nvfp4|lora_(norm|silu|plain)")  # names of the kernels that are timed
LAUNCH_US = 0.8  # what a kernel takes in a loop over its duration by the profiler (tools/results/LOG.md)
MOST_BEFORE = 4.0  # microseconds that `x A` may cost before a product: more is not gained by computing it there


def estimate(tile: Tile, m: int, n: int, k: int) -> float:
    """Microseconds by a model in cycles of the busiest multiprocessor: its issue slots and tensor cores, which add up
    over its consumers (see LOG.md); one consumer's chain of waits, off which `ahead` takes what it issues; the
    turn-around of a slot; the path from the L2, no faster than ever seen; nearly the largest of these, not under the
    DRAM's time; then the ends of tiles, and what a kernel pays once.

    Fitted to 950 durations of 79 products on an H200, without adapters. Its first choice of those measured is 1.8 %
    slower than the best in the geometric mean (13 % at most), the best among its first eight in 78 products, a time off
    by 6 % in the median. Fitted without 32B, 14B or 7B: 1.5, 1.2 and 2.2 % in what was left out.
    """
    octets = -(-tile.tokens // 8)
    issue = 65 + 97 / tile.depth + (48 * octets if tile.warp_mma else 0)
    if tile.ahead:
        issue = 112 if tile.ahead == 2 else 146
    tensor = 0 if tile.warp_mma else 2 * max(tile.tokens, 32)
    waits = 250 if tile.ahead else 82 + 276 / tile.depth + issue
    tiles_ = -(-m // tile.tokens) * -(-n // (64 * tile.rows))
    groups = min(tiles_, clusters_at_once(tile, SMS))
    of_group = -(-tiles_ // groups)
    steps = -(-k // (64 * tile.slices * tile.depth * tile.turn)) * tile.turn
    units = -(-of_group * steps // tile.cluster) * tile.depth  # of a consumer
    resident = min(tile.blocks_per_sm, -(-groups // AT_ONCE[tile.cluster]))
    all_units = units * tile.consumers * resident
    parts = (
        all_units * (issue + tensor),
        units * (waits + tensor),
        units * 1000 / max(0.5, (tile.stages - 1) * tile.depth - bool(tile.ahead)),
        all_units * (2304 + 128 * tile.tokens / tile.rows) / 46,
    )
    work = max(sum(part**8 for part in parts) ** (1 / 8), dram(n, k))
    segments = -(-of_group // tile.cluster) + (tile.cluster > 1)
    ends = segments * resident * 5.8 * tile.tokens * tile.rows * (tile.slices + (tile.cluster > 1))
    return (work + ends) / CLOCK_HZ * 1e6 + 2.0 + 1.2 * (tile.cluster > 1)


def estimate_split(split: Split, n: int, k: int) -> float:
    """Microseconds of the kernel for few tokens, by a model like `estimate`: the issue slots of the busiest
    multiprocessor, the path from the L2, one warp's chain of work, the memory's latency for what a warp has under way,
    the DRAM's time; the largest; then what adding up warps and blocks takes, and what a kernel pays once and for each
    wave of blocks.

    Fitted to 600 durations of 30 products as `estimate` was: 1.7 % (15 % at most), 28 of 30, 5 %; without 32B, 14B or
    7B 2.4, 1.0 and 2.3 %. Of 32 tokens and of one operand of 16 features in a block there were few. What is counted for
    `x A` (A's bytes, half an operand of 16 features for 16 ranks, 0.4 us at the end) is not fitted: five times of o of
    7B and 14B in the table are within 5 % of it, four of 3B and 0.5B 0.8 to 1.6 us below.
    """
    layout = cut.Layout(split, RANK)
    units = math.ceil(k / 64) / split.cluster
    clusters = split.clusters(n)
    at_once = AT_ONCE[split.cluster]
    registers = math.ceil(((split.rows + layout.steps) * split.tokens * 0.625 + 2 * split.tokens + 54) / 8) * 8
    memory, threads = cut.SMEM_BYTES // split.smem_bytes(RANK), 64 // split.warps
    resident = max(1, min(memory, threads, 65536 // (32 * split.warps * registers)))
    waves, busiest = math.ceil(clusters / (at_once * resident)), math.ceil(clusters / at_once)
    of_warp = math.ceil(units / split.warps)
    unit = split.rows * (29.7 + 3.89 * split.tokens / 8) + layout.steps * (14.9 + 3.89 * split.tokens / 8)
    rounds = 1 if split.depth >= of_warp else of_warp / (split.depth - 0.5)  # a slot is empty while its unit is read
    parts = (
        busiest * units * unit,
        busiest * units * (576 * split.rows + 128 * split.tokens + 128 * layout.columns) / 40,
        waves * of_warp * 4.8 * unit,
        waves * rounds * 1680,
        dram(n, k),
    )
    ends = (0.062 * busiest * split.warps + 0.06 * split.cluster) * (split.rows + layout.steps) * split.tokens / 64
    ends += 0.4 * split.shrinks
    return max(parts) / CLOCK_HZ * 1e6 + ends + 2.1 + 0.45 * (split.cluster > 1) + 1.2 * (waves - 1)


def dram(n: int, k: int) -> float:
    """Cycles that a weight's packed bytes take at the rate of a copy."""
    return n * k * 0.5625 / COPY_BYTES_PER_S * CLOCK_HZ


def splits(m: int, n: int, k: int, most: int, shrinking: tuple[int, ...] = ()) -> list[Split]:
    """The `most` splits for few tokens that look best, at most two with the same rows and cluster; none above 32
    tokens. `shrinking`: features of adapters whose `x A` they are to compute."""
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
    for split in sorted(found, key=lambda split: (estimate_split(split, n, k), split.depth)):
        alike[split.rows, split.cluster] += 1
        if alike[split.rows, split.cluster] <= 2:
            chosen.append(split)
    return chosen[:most]


def worth_trying(m: int, n: int, k: int, most: int, parts: tuple[int, ...]) -> list[Split]:
    """The splits without `x A`, and with it those that may be faster with what is saved before them."""
    plain = splits(m, n, k, most)
    if not plain:
        return []
    bound = estimate_split(plain[0], n, k) + MOST_BEFORE
    return plain + [split for split in splits(m, n, k, most, parts) if estimate_split(split, n, k) < bound]


def model(how: Tile | Split, m: int, n: int, k: int) -> float:
    """Microseconds that the model of its kernel expects."""
    return estimate_split(how, n, k) if isinstance(how, Split) else estimate(how, m, n, k)


def takes_adapters(tile: Tile, n: int, parts: tuple[int, ...]) -> bool:
    """Whether `tiles.tile_for` has to give up no more than one of its stages for adapters of those parts."""
    fewer = dataclasses.replace(tile, stages=max(2, tile.stages - 1))
    return fits(fewer, adapted=True) and can_fuse(tile, n, [(32, part) for part in parts])


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
        if depth == 4 and tokens > 16 and slices > 1 and cluster > 1:  # spills a few words, as compiling them showed
            continue
        if (tokens > 32 and (depth == 4 or blocks == 3)) or (rows > 3 and tokens > 128) or (cluster > 2 and m > 512):
            continue
        for stages in range(8, 1, -1):
            tile = Tile(tokens, rows, slices, cluster, depth, stages, blocks, warp_mma, ahead_)
            if fits(tile):
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


@dataclasses.dataclass(frozen=True)
class Trial:
    """A tile or split tried for a product."""

    case: str
    m: int
    direction: str
    how: Tile | Split

    def call(self, x: jax.Array, shrunk: jax.Array, layer: tuple) -> jax.Array:
        """The product. `layer`: the weight, A of its adapters side by side and B of each."""
        weight, a, expand = layer
        if self.direction == "dx":
            return mosaic_gpu.matmul(x, weight, self.how, transposed=True)
        given = takes(self.case, self.m, self.how)
        if given == "a":
            return few_tokens.matmul(x, weight, self.how, a=a, expand=expand)
        if given == "parts":  # as many as there are in decode, all but one of them zeros
            whole = jnp.concatenate(split_lora_x(shrunk, [RANK] * len(expand)), axis=1)
            shrunk = jnp.pad(whole[None].astype(jnp.float32), ((0, parts_of(self.case, self.m) - 1), (0, 0), (0, 0)))
        if isinstance(self.how, Split):
            return few_tokens.matmul(x, weight, self.how, shrunk=shrunk, expand=expand)
        tile = tiles.with_adapters(self.how, weight.shape[0], [b.shape for b in expand])
        return mosaic_gpu.matmul(x, weight, tile, shrunk=shrunk, expand=expand)


def kind_before(case: str) -> str:
    """What precedes a projection in decode, as `decode_prologue` names it."""
    return {"qkv": "norm", "gate": "norm", "down": "silu", "o": "plain"}[case.split("_")[0]]


def takes(case: str, m: int, how: Tile | Split) -> str:
    """What this product is given of its adapters' `x A` in decode: "whole", "parts" or "a" (nothing)."""
    n, _ = cases.SHAPES[case]
    adapters = [(RANK, width) for width in cases.parts(case)]
    if isinstance(how, Tile):
        how = tiles.with_adapters(how, n, adapters)
    given = how.takes(m, adapters)
    return "whole" if given == "parts" and kind_before(case) == "norm" else given


def parts_of(case: str, m: int) -> int:
    """How many parts there are."""
    ranks = (RANK,) * len(cases.parts(case))
    spec = prologue_config.PrologueSpec(kind_before(case), m, cases.SHAPES[case][1], ranks, partials=True)
    return prologue_config.best_config(spec).k_splits


@dataclasses.dataclass(frozen=True)
class Before:
    """What precedes a product in decode: a norm, SiLU, or `x A` alone, and what it `gives` of that (see `takes`)."""

    case: str
    m: int
    gives: str

    @property
    def kind(self) -> str:
        """As `decode_prologue` names it."""
        return kind_before(self.case)

    def inputs(self, seed: int) -> tuple:
        """(what the operation takes, A); another set for each of the calls, so that none of it is in the L2."""
        _, k = cases.SHAPES[self.case]
        key = jax.random.key(seed)
        width = 2 * k if self.kind == "silu" else k
        x = jax.random.normal(key, (self.m, width), jnp.float32 if self.kind == "norm" else jnp.bfloat16)
        rest = (x.astype(jnp.bfloat16), jnp.ones(k)) if self.kind == "norm" else ()
        return (x, *rest), None if self.gives == "a" else bench.adapters(self.case, RANK, seed)[0]

    def call(self, layer: tuple) -> tuple:
        """The operation. `layer`: from `inputs`."""
        inputs, a = layer
        ranks = () if a is None else (RANK,) * len(cases.parts(self.case))
        if self.kind == "norm":
            return rms_norm_prologue(*inputs, 1e-6, a, ranks, dtype=jnp.bfloat16, implementation="mosaic_gpu")
        more = {"in_parts": self.gives == "parts", "implementation": "mosaic_gpu"}
        if self.kind == "silu":
            return silu_mul_prologue(*inputs, a, ranks, **more)
        return lora_prologue(*inputs, a, ranks, **more)


def befores(group: Sequence[Trial]) -> list[Before]:
    """What precedes the products of some trials, where it is not the same for all of them."""
    wanted = {m: {takes(t.case, m, t.how): None for t in group if t.m == m} for m in dict.fromkeys(t.m for t in group)}
    found = [Before(group[0].case, m, gives) for m, several in wanted.items() if len(several) > 1 for gives in several]
    return [before for before in found if (before.kind, before.gives) != ("plain", "a")]


def counted_before(trial: Trial, times: dict) -> float | None:
    """Microseconds of what has to precede this product, from those of each `Before`; None where it is the same for all.
    A launch that one of them does without is counted for the others."""
    if not any(isinstance(key, Before) and key.m == trial.m for key in times):
        return None
    before = Before(trial.case, trial.m, takes(trial.case, trial.m, trial.how))
    if before.kind != "plain":
        return times[before]
    return 0.0 if before.gives == "a" else times[before] + LAUNCH_US


def layers_of(case: str, m: int) -> list[tuple]:
    """Weights as `bench.weights_of` has them, each with A of its adapters side by side and B of each."""
    return [(weight, *bench.adapters(case, RANK, i)) for i, weight in enumerate(bench.weights_of(case, m))]


def activations(case: str, direction: str, m: int) -> jax.Array:
    """x (or dy)."""
    return jax.random.normal(jax.random.key(0), (m, bench.Product(case, m, direction).width()), jnp.bfloat16)


# Autotuning would take longer than all else here.
@functools.partial(jax.jit, static_argnums=2, compiler_options={"xla_gpu_autotune_level": 0})
def _x_a(x: jax.Array, a: jax.Array, parts: int) -> jax.Array:
    """`x A` of the adapters as the kernels take it: zeros past the rank."""
    return reference.lora_x(x, a, (RANK,) * parts)


def shrunk_of(x: jax.Array, layer: tuple, direction: str) -> jax.Array | None:
    """`x A` of a layer's adapters; None for dx, which has none."""
    return None if direction == "dx" else _x_a(x, layer[1], len(layer[2]))


def build(trial: Trial | Before) -> tuple:
    """For `ahead.compile_all`."""
    if isinstance(trial, Before):
        return trial.call, (jax.eval_shape(lambda: trial.inputs(0)),)
    x = jax.eval_shape(lambda: activations(trial.case, trial.direction, trial.m))
    layer = jax.eval_shape(lambda: layers_of(trial.case, trial.m)[0])
    shrunk = jax.ShapeDtypeStruct((trial.m, MAX_RANK * len(layer[2])), x.dtype)
    return trial.call, (x, None if trial.direction == "dx" else shrunk, layer)


def present(m: int, n: int, k: int, transposed: bool, parts: tuple[int, ...]) -> Tile | Split:
    """The table's choice, with as many stages as it has without adapters."""
    adapted = tiles.tile_for(m, n, k, transposed=transposed, adapters=[(RANK, features) for features in parts])
    return adapted if isinstance(adapted, Split) else tiles.tile_for(m, n, k, transposed=transposed)


def trials(case: str, tokens: list[int], directions: list[str], most: int, ahead_: list[int]) -> list[Trial]:
    """Everything that is tried for one shape, the table's present choice first."""
    n, k = cases.SHAPES[case]
    found = []
    for m, direction in itertools.product(tokens, directions):
        transposed = direction == "dx"
        if transposed and m < 1024:
            continue
        shape = (k, n) if transposed else (n, k)
        parts = () if transposed else cases.parts(case)
        wanted = [
            present(m, n, k, transposed, parts),
            *candidates(m, *shape, transposed, most, parts, ahead_),
        ]
        wanted += [] if transposed else worth_trying(m, n, k, most, parts)
        found += [Trial(case, m, direction, how) for how in dict.fromkeys(wanted)]
    return found


def tune_case(group: list[Trial], executables: dict) -> list[dict]:
    """Rows of the table for the trials of one shape and direction; what is measured is printed."""
    case, direction = group[0].case, group[0].direction
    x = activations(case, direction, max(trial.m for trial in group))
    layers = {large: layers_of(case, 1024 if large else 1) for large in {trial.m >= 1024 for trial in group}}
    weight, _, expand = next(iter(layers.values()))[0]
    shrunk = shrunk_of(x, next(iter(layers.values()))[0], direction)
    expected = bench.exact(x[:256], weight, direction == "dx")
    if direction == "forward":
        x_a = split_lora_x(shrunk[:256], [b.shape[0] for b in expand])
        expected += jnp.concatenate([fp32_matmul(t, b) for t, b in zip(x_a, expand, strict=True)], axis=1)
    calls, results = [], {}
    for trial in group:
        found, some = executables[(trial,)], layers[trial.m >= 1024]
        if isinstance(found, str):
            results[trial] = found
            continue
        inputs = x[: trial.m], None if shrunk is None else shrunk[: trial.m]
        call = functools.partial(ahead.load(found, *inputs, some[0]), *inputs)
        try:  # the rest of the sweep is worth having
            bench.refuse_if_wrong(call(some[0]), expected[: trial.m], str(trial))
        except (SystemExit, jax.errors.JaxRuntimeError) as error:
            results[trial] = f"WRONG: {str(error)[:200]}"
            continue
        calls.append((trial, call, some))
    for before in befores(group):
        found = executables[(before,)]
        if isinstance(found, str):
            raise SystemExit(f"{before} does not compile: {found}")
        sets = [before.inputs(seed) for seed in range(FEW_CALLS)]
        calls.append((before, ahead.load(found, sets[0]), sets))
    times = durations(calls)
    return best_of(group, {trial: times.get(trial, results.get(trial)) for trial in group}, times)


def best_of(group: list[Trial], results: dict[Trial, float | str], times: dict) -> list[dict]:
    """The row of each number of tokens, all results printed. `times`: those of `befores` among them."""
    for before in befores(group):
        made = {"whole": "with x A", "parts": "with x A in parts", "a": "without x A"}[before.gives]
        print(f"{before.case} m {before.m} before it: {before.kind} {made} {times[before]:.2f} us", flush=True)
    case, direction, rows = group[0].case, group[0].direction, []
    n_k = cases.SHAPES[case]
    for m in dict.fromkeys(trial.m for trial in group):
        of_m = [trial for trial in group if trial.m == m]
        before = {trial: counted_before(trial, times) for trial in of_m}
        whole = {t: results[t] if isinstance(results[t], str) else results[t] + (before[t] or 0.0) for t in of_m}
        for trial in sorted(of_m, key=lambda trial: (isinstance(whole[trial], str), whole[trial])):
            us, kind = results[trial], type(trial.how).__name__
            expects = model(trial.how, m, *(n_k if direction == "forward" else n_k[::-1]))
            measured = us if isinstance(us, str) else f"{us:.2f} us"
            about = f"(model {expects:.1f}){' present' * (trial == of_m[0])}"
            about = about if before[trial] is None else f"+ {before[trial]:.2f} before it {about}"
            print(f"{case} {direction} m {m} {kind} {dataclasses.astuple(trial.how)} {measured} {about}", flush=True)
        timed = [trial for trial in of_m if not isinstance(results[trial], str)]
        if timed:
            best = min(timed, key=whole.__getitem__)
            counted = None if before[best] is None else round(before[best], 2)
            rows.append(tiles.as_stored(tiles.Row(direction, *n_k, m, best.how, round(results[best], 2), counted)))
    return rows


def durations(calls: Sequence[tuple[Trial | Before, Callable, list]]) -> dict[Trial | Before, float]:
    """Median microseconds of each call's kernel, called with all weights in turn; what heats the GPU is called some
    times more before, to be timed at the clock that its power allows."""
    counts = [(0, FEW_CALLS) if trial.m < 1024 else (8, 6) for trial, _, _ in calls]

    def run() -> None:
        for (_, call, layers), count in zip(calls, counts, strict=True):
            for i in range(sum(count)):
                y = call(layers[i % len(layers)])
            jax.block_until_ready(y)

    times = kernel_medians(run, lambda name: OURS.search(name) is not None, counts)
    return {trial: us for (trial, _, _), us in zip(calls, times, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--direction", nargs="*", choices=["forward", "dx"], default=["forward", "dx"])
    parser.add_argument("--most", type=int, default=16, help="tiles tried for each product")
    parser.add_argument("--ahead", nargs="*", type=int, default=[0, 1, 2], choices=[0, 1, 2], help="of the tiles tried")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
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
    groups = [
        trials(case, args.tokens, [direction], args.most, args.ahead)
        for case, direction in itertools.product(args.cases, args.direction)
    ]
    wanted = [what for group in groups for what in (*group, *befores(group))]
    executables = dict(ahead.compile_all(build, [(what,) for what in wanted], args.jobs))
    for group in filter(None, groups):
        keep(stored, best, tune_case(group, executables))
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
        shape = (k, n) if transposed else (n, k)
        firsts = candidates(m, *shape, transposed, 1, parts, ahead) + ([] if transposed else splits(m, n, k, 1))
        best = min(firsts, key=lambda how: model(how, m, *shape))
        rows.append(tiles.as_stored(tiles.Row(direction, n, k, m, best, None)))
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
