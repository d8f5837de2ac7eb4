"""Times the prologues of Qwen2.5's projections in decode, the fused kernel against the plain XLA path.

    python tools/bench_decode_prologue.py [--cases qkv_7b ...] [--tokens 1 8 ...] [--rank 32] [--out FILE.json]

One jitted function runs the operation over many sets of buffers (at least 100 MB in all, so that the L2 does not help),
one after the other. `us` is the time between the beginnings of two operations on the device, gaps between kernels
included, `busy` what the kernels themselves take; both from the profiler, the median of several executions. `x A` is
computed whole; where decode leaves split-K partials or lets the GEMM compute it, `tune_matmul` times that.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import statistics

import jax
import jax.numpy as jnp
from qerl_kernels.decode_prologue import cases
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from record import add_commit, meta
from timing import profiled

ROTATE_BYTES = 100e6
EXECUTIONS = 5


def operation(kind: str, ranks: tuple[int, ...], implementation: str, inputs: list, a: jax.Array) -> tuple:
    """Outputs of one prologue."""
    if kind == "norm":
        return rms_norm_prologue(*inputs, 1e-6, a, ranks, dtype=jnp.bfloat16, implementation=implementation)
    if kind == "silu":
        return silu_mul_prologue(*inputs, a, ranks, implementation=implementation)
    return (lora_prologue(*inputs, a, ranks, implementation=implementation),)


def in_turn(one, sets: list) -> list:
    """`one` of every set; no two can run at the same time or become one kernel."""
    outs, last = [], jnp.float32(0)
    for inputs, a in sets:
        (x, *rest), last = jax.lax.optimization_barrier((inputs, last))
        out = one([x, *rest], a)
        outs.append(out)
        last = out[-1]
    return outs


def sets_of(kind: str, tokens: int, features: int, columns: int) -> list:
    """Random (inputs, A), enough of them to outgrow the L2."""
    width = features * (2 if kind == "silu" else 1)
    count = max(20, math.ceil(ROTATE_BYTES / (2 * (features * columns + tokens * width))))

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, kind):
        keys = jax.random.split(key, 3)
        x, delta = jax.random.normal(keys[0], (2, tokens, width), jnp.bfloat16)
        a = jax.random.normal(keys[1], (features, columns), jnp.bfloat16) / features**0.5
        if kind == "norm":
            return [x.astype(jnp.float32), delta, jax.random.normal(keys[2], (features,))], a
        return [x], a

    return [draw(jax.random.key(i), kind) for i in range(min(count, 200))]


def kernel_times(call) -> list[list[tuple[float, float]]]:
    """(begin, end) in µs of every kernel on the device, for each of `EXECUTIONS` calls."""
    jax.block_until_ready(call())
    runs = [profiled(call) for _ in range(EXECUTIONS)]
    return [[(kernel.start_ns / 1e3, (kernel.start_ns + kernel.duration_ns) / 1e3) for kernel in run] for run in runs]


def timings(runs: list[list[tuple[float, float]]], count: int) -> dict[str, float]:
    """Times of one of `count` operations, from the kernels of several executions of all."""
    return {
        "us": round(statistics.median((run[-1][1] - run[0][0]) / count for run in runs), 2),
        "busy": round(statistics.median(sum(end - begin for begin, end in run) / count for run in runs), 2),
        "kernels": round(len(runs[0]) / count, 2),
    }


def measure(case: str, tokens: int, rank: int, implementation: str) -> dict:
    """One row of the result."""
    kind, features, adapters = cases.SHAPES[case]
    ranks = (rank,) * adapters
    sets = sets_of(kind, tokens, features, sum(ranks))
    every = jax.jit(lambda sets: in_turn(functools.partial(operation, kind, ranks, implementation), sets))
    about = {"case": case, "m": tokens, "rank": rank, "impl": implementation}
    return about | timings(kernel_times(lambda: every(sets)), len(sets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.SHAPES), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--rank", type=int, default=32)
    add_commit(parser)
    default = pathlib.Path("tools/results/nvidia-h200/decode_prologue.json")
    parser.add_argument("--out", type=pathlib.Path, default=default)
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        for tokens in args.tokens:
            ours, theirs = (measure(case, tokens, args.rank, impl) for impl in ("mosaic_gpu", "xla"))
            rows += [ours, theirs]
            print(f"{case:12s} m {tokens:4d}  ours {ours['us']:6.2f} us  xla {theirs['us']:6.2f} us, "
                  f"{theirs['kernels']} kernels that take {theirs['busy']:6.2f}", flush=True)  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"meta": meta(args.commit), "rows": rows}, indent=0) + "\n")


if __name__ == "__main__":
    main()
