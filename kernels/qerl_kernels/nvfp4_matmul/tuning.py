"""The config of each GEMM: a table found by `python -m qerl_jax.tune` and stored as data, one file for a kind of GPU.

A row of the table: kernel ("gemm" or "skinny"), direction ("forward" or "dx"), n, k, m (the largest m it was tuned
for), the fields of that kernel's config, and the microseconds measured; null where the row is that of a similar shape
or of an earlier sweep. A shape that is not in the table takes the row of the shape nearest to it in log n and log k.
Rows of a GPU's own table, which may be few, come before those of the table of its tier. "prologue_us": microseconds of
the decode prologue where it was counted when this row was chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from importlib import resources

from qerl_kernels.gpu import H200, Gpu, slug, user_table
from qerl_kernels.nvfp4_matmul import lora_input
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.tcgen05.config import Tcgen05Config

# Rows for which tier "warp" has configs; up to the other number its skinny kernel has blocks of as many (not measured).
MAX_WARP_M, MAX_SKINNY_M = 32, 128
MAX_TUNED_M = 128  # above, a config may take a smaller tile_m than the table says
# What a k-tile costs beside its rows, in rows: 49 ns and 1.16 ns a row (tools/results/notes/matmul.md).
K_TILE_ROWS = 42
MIN_FEATURES = 512  # a weight with fewer is no projection of a model and takes the plainest config
BATCH_INVARIANT = GemmConfig(tile_m=64, warpgroups_n=2, warpgroups_k=2, k_tiles=1, stages=4)
PLAINEST = GemmConfig(tile_m=64, warpgroups_n=1, k_tiles=1, stages=4)


@dataclasses.dataclass(frozen=True)
class Row:
    """A config, the GEMM it was found for (x [m, k] with a weight [n, k]), its microseconds if measured, and those of
    the decode prologue if counted."""

    direction: str
    n: int
    k: int
    m: int
    config: GemmConfig | SkinnyConfig
    us: float | None
    prologue_us: float | None = None


_CONFIGS = {"gemm": GemmConfig, "skinny": SkinnyConfig}


def from_json(stored: dict) -> Row:
    """A row of the file."""
    rest = {name: value for name, value in stored.items() if name != "kernel"}
    return Row(**{**rest, "config": _CONFIGS[stored["kernel"]](**stored["config"])})


def to_json(row: Row) -> dict:
    """The inverse of `from_json`. Left out: "computes_lora_x" where false, "prologue_us" where nothing was counted."""
    is_skinny = isinstance(row.config, SkinnyConfig)
    stored = {"kernel": "skinny" if is_skinny else "gemm", **dataclasses.asdict(row)}
    if row.prologue_us is None:
        del stored["prologue_us"]
    if is_skinny:
        stored["config"] = {
            name: value for name, value in stored["config"].items() if name != "computes_lora_x" or value
        }
    return stored


@functools.cache
def table(name: str = H200.table) -> tuple[Row, ...]:
    """All rows of a file, read once; `name`: as `Gpu.table`."""
    return tuple(map(from_json, json.loads(path_of(name).read_text())["rows"]))


def own_tables(gpu: Gpu) -> list[pathlib.Path]:
    """The tables timed on this GPU: the user's, and one that comes with the kernels; such as there are."""
    return [path for path in (user_table(gpu.name), path_of(f"tuning_{slug(gpu.name)}.json")) if path.exists()]


def fault_of(path: str, gpu: Gpu) -> str | None:
    """Why a file is no tuning table for this GPU; None where it is one."""
    try:
        stored, rows = json.loads(pathlib.Path(path).read_text()), table(path)
        if (name := stored["meta"]["gpu"]) != gpu.name:
            return f"timed on {name}, this is {gpu.name}"
        return next((f"{row} does not run on {gpu.name}" for row in rows if not _runs(row, gpu)), None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"no tuning table ({type(error).__name__}: {error})"


def _runs(row: Row, gpu: Gpu) -> bool:
    if row.direction not in ("forward", "dx") or min(row.n, row.k, row.m) < 1:
        return False
    if isinstance(row.config, GemmConfig):
        return gpu.tier == "wgmma" and row.config.fits()
    return row.direction == "forward" and row.config.fits(row.n, row.k, 8 * row.config.computes_lora_x, gpu)


def path_of(name: str) -> pathlib.Path:
    """The file of a table: beside this module unless `name` is a path."""
    return pathlib.Path(str(resources.files("qerl_kernels.nvfp4_matmul").joinpath(name)))


def config_for(
    m: int,
    n: int,
    k: int,
    *,
    transposed: bool = False,
    adapters: Sequence[tuple[int, int]] = (),
    batch_invariant: bool = False,
    gpu: Gpu = H200,
) -> GemmConfig | SkinnyConfig | Tcgen05Config | None:
    """The config for x [m, k] (transposed: dy [m, n]) and a weight [n, k]; its class names the kernel. None where the
    adapters cannot be added within the kernel, and, without adapters, where this GPU has no kernel for this GEMM. A
    skinny config computes `x A` only where these adapters allow it.

    Args:
      m: rows of x.
      n: output features of the weight.
      k: input features of the weight.
      transposed: the config of dx.
      adapters: shape of B, [rank, features], of each adapter that the kernel is to add.
      batch_invariant: one config for every m, which cuts sums along the contraction in the same places whatever m is.
      gpu: the GPU.
    """
    if gpu.tier == "warp":
        can_fuse = not adapters or lora_input.can_fuse(n, adapters)
        if transposed or batch_invariant or not can_fuse:
            return None
        if m > MAX_SKINNY_M:
            return Tcgen05Config() if gpu.has_tcgen05 and min(n, k) >= MIN_FEATURES and not adapters else None
        return _nearest_row(min(m, MAX_WARP_M), n, k, False, gpu).config.specialize(n, adapters, gpu)
    if n < MIN_FEATURES or k < MIN_FEATURES:
        config = PLAINEST
    elif batch_invariant:
        config = BATCH_INVARIANT
    else:
        row = _nearest_row(m, n, k, transposed, gpu)
        if isinstance(row.config, SkinnyConfig):
            # The skinny kernel takes more adapters than the other, but `vmap` may still make m large: the same are
            # fused.
            can_fuse = not adapters or GemmConfig(tile_m=8, warpgroups_n=1).can_fuse_lora(n, adapters)
            return row.config.specialize(n, adapters, gpu) if can_fuse else None
        is_timed = row.us is not None and (row.n, row.k, row.m) == (n, k, m)
        config = row.config if is_timed else balance_waves(row.config, m, k if transposed else n, gpu.sms)
    return fit_lora(config, n, adapters) if adapters else config


def fit_lora(config: GemmConfig, n: int, adapters: Sequence[tuple[int, int]]) -> GemmConfig | None:
    """`config`, or one with fewer stages or features that has room for these adapters; None where none has."""
    for warpgroups_n, stages in itertools.product((config.warpgroups_n, 4, 2, 1), (config.stages, config.stages - 1)):
        smaller = dataclasses.replace(config, warpgroups_n=warpgroups_n, stages=stages)
        can_fuse = smaller.fits(has_lora=True) and smaller.can_fuse_lora(n, adapters)
        if warpgroups_n <= config.warpgroups_n and stages >= min(2, config.stages) and can_fuse:
            return smaller
    return None


def balance_waves(config: GemmConfig, m: int, n: int, sms: int = H200.sms) -> GemmConfig:
    """`config` with the tile_m, up to its own, that keeps the SMs busy to the end; n: output features of the GEMM.

    CTAs that walk alone over whole tiles take ⌈tiles / SMs⌉ waves. 448 tiles with a tile_m of 256, for example, take
    four for 3.4; with 232 there are 504, and four waves of them should cost 8 % less (a model, not timed).
    """
    if m <= MAX_TUNED_M or config.cluster > 1:
        return config
    ctas = sms * config.ctas_per_sm

    def cost(tile_m: int) -> int:
        tiles = -(-m // tile_m) * -(-n // config.tile_n)
        return -(-tiles // ctas) * (tile_m + K_TILE_ROWS)

    return dataclasses.replace(config, tile_m=min(range(config.tile_m, min(64, config.tile_m) - 1, -8), key=cost))


def _nearest_row(m: int, n: int, k: int, transposed: bool, gpu: Gpu) -> Row:
    """The row of the nearest shape that has one for m rows or more, and of its rows that for the fewest; where no shape
    has one, that for the most."""
    tables = [table(name) for name in (gpu.table, gpu.own_table) if name]
    every = {(row.direction, row.n, row.k, row.m): row for rows in tables for row in rows}
    rows = [row for row in every.values() if row.direction == ("dx" if transposed else "forward")]
    rows = [row for row in rows if row.m >= m] or rows

    def distance(row: Row) -> float:
        return abs(math.log(n / row.n)) + abs(math.log(k / row.k))

    nearest = min(distance(row) for row in rows)
    same_shape = sorted((row for row in rows if distance(row) == nearest), key=lambda row: row.m)
    return same_shape[0] if same_shape[0].m >= m else same_shape[-1]
