"""Finds the tile of each product by trying many, and stores the table that `qerl_kernels.nvfp4_matmul.tiles` reads.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward|dx] [--write]

Every candidate is checked (relative error) and timed as `bench_matmul.py` does. Run it under a time limit: a kernel
with a wrong barrier does not return. `--write` replaces the rows of the shapes that were tried and leaves the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib

import bench_matmul as bench
import jax
import jax.numpy as jnp
from qerl_kernels.nvfp4_matmul import cases, mosaic_gpu, tiles

TABLE = pathlib.Path(tiles.__file__).parent / tiles.TABLE


def candidates(m: int, transposed: bool) -> list[mosaic_gpu.Tile]:
    """Tiles worth trying for m tokens: all that fit, of the ranges that have won so far."""
    few = m <= 32
    widths = [min(256, -(-m // 8) * 8)] if m <= 64 else [64, 128, 256]
    found = []
    for tokens, rows, slices, cluster, depth, blocks in itertools.product(
        widths, (1, 2, 3, 4, 6), (1, 2, 4, 7), (1, 2, 4), (1, 2, 4), (1, 2)
    ):
        if rows * slices > 7 or (transposed and slices > 2) or (not few and depth > 2):
            continue
        for stages in range(8, 1, -1):
            tile = mosaic_gpu.Tile(tokens, rows, slices, cluster, depth, stages, blocks, warp_mma=few)
            if mosaic_gpu.fits(tile):
                found.append(tile)
                break
    return found


def best_tile(case: str, m: int, direction: str, weights: list) -> tuple[float, mosaic_gpu.Tile]:
    n, k = cases.SHAPES[case]
    transposed = direction == "dx"
    x = jax.random.normal(jax.random.key(0), (m, n if transposed else k), jnp.bfloat16)
    results = []
    for tile in candidates(m, transposed):

        def call(x, weight, tile=tile):
            return mosaic_gpu.matmul(x, weight, tile, transposed=transposed)

        error = bench.relative_error(jax.jit(call)(x, weights[0]), x, weights[0], transposed)
        if not error <= bench.MAX_ERROR:
            raise SystemExit(f"{case} m={m} {tile}: relative error {error:.2e}")
        us = bench.microseconds(call, [x], weights[:3] if m >= 1024 else weights, repeats=3)
        results.append((us, tile))
        print(f"{case} {direction} m {m} {us:9.2f} us {tile}", flush=True)
    return min(results, key=lambda result: result[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.SHAPES), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 16, 32, 64, 128, 256, 512, 1024, 16384])
    parser.add_argument("--direction", choices=["forward", "dx"], default="forward")
    parser.add_argument("--write", action="store_true", help="store what was found")
    args = parser.parse_args()
    stored = json.loads(TABLE.read_text())
    for case in args.cases:
        n, k = cases.SHAPES[case]
        weights = bench.weights_of(case)
        for m in args.tokens:
            us, tile = best_tile(case, min(m, 4096), args.direction, weights)
            print(f"best: {case} {args.direction} m {m} {us:.2f} us {tile}", flush=True)
            row = {"direction": args.direction, "n": n, "k": k, "tokens": m, "tile": dataclasses.asdict(tile)}
            key = (args.direction, n, k, m)
            stored["rows"] = [r for r in stored["rows"] if (r["direction"], r["n"], r["k"], r["tokens"]) != key] + [row]
    stored["meta"] = bench.meta()
    if args.write:
        TABLE.write_text(json.dumps(stored, indent=0) + "\n")


if __name__ == "__main__":
    main()
