"""Time rotary embedding with the cache write of one decoded token, kernel against XLA, for results/<device>/rope.json.

    python tools/bench_rope.py [--models 7b ...] [--batch 8 ...] [--slots 512] [--out FILE.json]

One jitted function runs the operation on 28 layers with caches of their own, donated, one after the other. `us` is the
time between the beginnings of two layers on the device, gaps between kernels included, `busy` what the kernels
themselves take; both from the profiler, the median of several executions. The results have to be equal.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from bench_decode_prologue import kernel_times, timings
from qerl_kernels.decode_attention.cases import MODELS
from qerl_kernels.rope_cache.api import rope_and_cache
from record import add_commit, meta

LAYERS = 28


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def arguments(model: str, rows: int, slots: int) -> tuple[jax.Array, list, jax.Array, list]:
    """Angles, the projections of every layer, slots, and the caches of every layer."""
    heads, kv_heads, width = MODELS[model]
    angles = jnp.arange(rows * width // 2, dtype=jnp.float32).reshape(rows, -1)
    projected = jax.random.normal(jax.random.key(0), (LAYERS, rows, (heads + 2 * kv_heads) * width), jnp.bfloat16)
    caches = [[jnp.zeros((rows, kv_heads, slots, width), jnp.bfloat16) for _ in range(2)] for _ in range(LAYERS)]
    return angles, list(projected), jnp.arange(rows) % slots, caches


def layers(angles: jax.Array, projected: list, slots: jax.Array, caches: list, implementation: str) -> tuple:
    """Rotated q and the caches of every layer; no two layers can run at the same time or become one kernel."""
    turned, written, last = [], [], jnp.bfloat16(0)
    for qkv, both in zip(projected, caches, strict=True):
        qkv, last = jax.lax.optimization_barrier((qkv, last))
        last, *both = rope_and_cache(qkv, angles, slots, *both, implementation=implementation)
        turned.append(last)
        written.append(both)
    return turned, written


def measure(model: str, rows: int, slots: int) -> list[dict]:
    """The rows of a case; fails where the two implementations differ."""
    found, results = [], []
    for implementation in ("mosaic_gpu", "xla"):
        *given, caches = arguments(model, rows, slots)
        call = jax.jit(functools.partial(layers, implementation=implementation), donate_argnums=3)
        held = [call(*given, caches)]
        results.append(jax.tree.map(jnp.copy, held[0]))

        def again(held=held, call=call, given=given):
            held.append(call(*given, held.pop()[1]))
            return held[0]

        about = {"model": model, "batch": rows, "slots": slots, "impl": implementation}
        found.append(about | timings(kernel_times(again), LAYERS))
    same = jax.tree.map(lambda ours, theirs: bool((ours == theirs).all()), *results)
    assert all(jax.tree.leaves(same)), f"{model}, {rows} rows: the kernel and XLA differ"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["7b"], choices=list(MODELS))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--slots", type=int, default=512)
    add_commit(parser)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/rope.json"))
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for batch in args.batch:
            ours, theirs = measure(model, batch, args.slots)
            rows += [ours, theirs]
            for row in (ours, theirs):
                print("{model} batch {batch} {impl}: {us} us, {busy} in {kernels} kernels".format(**row), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"meta": meta(args.commit), "rows": rows}, indent=0) + "\n")


if __name__ == "__main__":
    main()
