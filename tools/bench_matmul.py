"""Times the NVFP4 GEMM with adapters on the projections of Qwen2.5, beside a bf16 matmul of XLA's library.

    python tools/bench_matmul.py [--cases qkv_7b ...] [--tokens 1 8 ...] [--as-arch 89] [--out FILE.json]

`us` is the median duration of our kernel by the profiler, with the config of the tuning table, over weights that
outgrow the L2; forward GEMMs carry rank-32 adapters. `cublas_bf16` is the time of all kernels of a bf16 matmul of the
same shape without adapters, likewise. Every GEMM is checked first, against the exact weights in fp32.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
from as_gpu import add_as_arch, assume
from qerl_kernels import dispatch
from qerl_kernels.kernel_times import profiled
from qerl_kernels.nvfp4_matmul import cases
from qerl_kernels.nvfp4_matmul.tuner.trials import (
    CALLS,
    MANY,
    RANK,
    ROTATE_BYTES,
    Trial,
    activations,
    gemm_of,
    present,
)
from record import add_commit, write_rows

from qerl_jax.tune import compiled_timer


def cublas_us(case: str, m: int) -> float:
    """Microseconds of a bf16 matmul, the mean over calls."""
    n, k = cases.SHAPES[case]
    count = 1 if m >= MANY else math.ceil(ROTATE_BYTES / (2 * n * k))
    matrices = [jax.random.normal(jax.random.key(i), (k, n), jnp.bfloat16) for i in range(count)]
    x, call = activations(gemm_of(case), "forward", m), jax.jit(jnp.matmul)

    def run() -> None:
        for i in range(CALLS):
            y = call(x, matrices[i % count])
        jax.block_until_ready(y)

    run()
    return sum(kernel.duration_ns for kernel in profiled(run)) * 1e-3 / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS), help="rows of x")
    add_as_arch(parser)
    add_commit(parser)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/matmul.json"))
    args = parser.parse_args()
    seen_as = assume(args.as_arch)
    gpu = dispatch.this_gpu()
    rivals: dict[tuple[str, int], float] = {}
    for gemm, way in itertools.product(map(gemm_of, args.cases), ("forward", "dx")):
        tokens = [m for m in args.tokens if way == "forward" or m >= MANY]
        if not tokens:
            continue
        group = [Trial(gemm, m, way, present(gemm, m, way, gpu), gpu) for m in tokens]
        timer = compiled_timer(group)
        if timer.refused:
            raise SystemExit("\n".join(f"{trial}: {why}" for trial, why in timer.refused.items()))
        for trial, us in timer.times(group).items():
            key = trial.gemm.name, trial.m
            rivals[key] = rivals[key] if key in rivals else cublas_us(*key)
            _, n, k, *_ = trial.gemm
            about = {"case": trial.gemm.name, "m": trial.m, "n": n, "k": k, "direction": trial.direction}
            rank = RANK if trial.direction == "forward" else 0
            row = {**about, "lora_rank": rank, "impl": "qerl", **seen_as, "us": round(us, 2)}
            rival = {
                **about,
                "direction": "forward",
                "lora_rank": 0,
                "impl": "cublas_bf16",
                "us": round(rivals[key], 2),
            }
            write_rows(args.out, [row, rival], args.commit)
            print(
                f"{trial.gemm.name:12s} {trial.direction:8s} m {trial.m:6d} {us:9.2f} us  "
                f"{n * k * 0.5625 / us / 1e6:5.2f} TB/s  {2.0 * trial.m * n * k / us / 1e6:6.1f} TFLOP/s  "
                f"{rivals[key] / us:5.2f} x cublas_bf16",
                flush=True,
            )


if __name__ == "__main__":
    main()
