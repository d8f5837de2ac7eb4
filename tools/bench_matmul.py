"""Times the NVFP4 product on the projections of Qwen2.5 and writes tools/results/<device>/matmul.json.

    python tools/bench_matmul.py [--anchors ROWS.json] [--cases qkv_7b ...] [--tokens 1 8 ...] [--out FILE.json]

A figure is the wall time of one jitted call that runs the product over many weights (at least 512 MB of packed bytes,
three copies from 1024 tokens on, so that the L2 does not help), divided by their number: the smallest of five
repetitions. Every product is checked first, against the exact weights in fp32. `--anchors` names rows of rivals in the
same layout ("marlin", "cublas_bf16"), for the ratios; without it only our own figures are printed. The rows of rivals
are copied into the result, marked with their own source.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import pathlib
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.matmul import nvfp4_matmul

ROTATE_BYTES = 512e6
COPY_BYTES_PER_S = 4.30e12  # read + write of a device-to-device copy on an H200
MATRIX_FLOP_PER_S = 788e12  # an 8192 × 8192 × 8192 bf16 product on an H200
MAX_ERROR = 2.5e-3


def microseconds(call, inputs: list, weights: list, repeats: int = 5) -> float:
    """Time of one `call(x, weight)`, from one jitted function that makes all calls x by weight."""
    every = jax.jit(lambda inputs, weights: [call(x, weight) for x in inputs for weight in weights])
    for _ in range(2):
        jax.block_until_ready(every(inputs, weights))
    count, best = len(inputs) * len(weights), math.inf
    rounds = 4
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(rounds):
            out = every(inputs, weights)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / rounds / count * 1e6)
    return best


def weights_of(case: str, least: int = 2, limit: int | None = None) -> list:
    """Packed random weights of one case, enough to outgrow the L2."""
    n, k = cases.SHAPES[case]
    copies = max(least, math.ceil(ROTATE_BYTES / (n * k * 0.5625)))
    copies = copies if limit is None else min(copies, limit)
    return [packing.pack(cases.random_weight(jax.random.key(i), n, k)) for i in range(copies)]


def relative_error(y, x, weight, transposed: bool) -> float:
    """‖y − x·W‖ / ‖x·W‖ over at most 256 tokens, the exact weights in fp32."""
    matrix, row = packing.packed_parts(weight)
    matrix = matrix.astype(jnp.float32)
    x, y = x[:256].astype(jnp.float32), y[:256].astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    if transposed:
        expected = jnp.matmul(x * row, matrix, precision=highest)
    else:
        expected = jnp.matmul(x, matrix.T, precision=highest) * row
    return float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected))


def forward(x, weight):
    return nvfp4_matmul(x, weight, implementation="mosaic_gpu")


def backward(dy, weight):
    """dx alone: the forward product of the same call is not used and falls away."""
    x = jnp.zeros((dy.shape[0], weight.shape[1]), dy.dtype)
    return jax.vjp(lambda x: forward(x, weight), x)[1](dy)[0]


def adapters(case: str, rank: int) -> list:
    n, k = cases.SHAPES[case]
    del n
    loras, offset = [], 0
    for i, width in enumerate(cases.parts(case)):
        a = jax.random.normal(jax.random.key(2 * i), (k, rank), jnp.bfloat16) / k**0.5
        b = jax.random.normal(jax.random.key(2 * i + 1), (rank, width), jnp.bfloat16) / 8
        loras.append(types.SimpleNamespace(a=a, b=b, scale=1.0, offset=offset))
        offset += width
    return loras


def row_of(case: str, m: int, direction: str, rank: int, us: float) -> dict:
    n, k = cases.SHAPES[case]
    return {
        "case": case, "m": m, "n": n, "k": k, "direction": direction, "lora_rank": rank, "impl": "qerl", "us":
        round(us, 2)
    }  # fmt: skip


def describe(row: dict, anchors: dict) -> str:
    m, n, k, us = row["m"], row["n"], row["k"], row["us"]
    if not n:
        return f"{row['case']} m {m} lora {row['lora_rank']} {us / 1e3:.3f} ms"
    packed_bytes = n * k * 0.5625
    flop = 2.0 * m * n * k
    text = (
        f"{row['case']:12s} {row['direction']:8s} m {m:6d} lora {row['lora_rank']:2d} {us:9.2f} us  "
        f"{packed_bytes / us / 1e6:5.2f} TB/s ({packed_bytes / us * 1e6 / COPY_BYTES_PER_S:4.0%})  "
        f"{flop / us / 1e6:6.1f} TFLOP/s ({flop / us * 1e6 / MATRIX_FLOP_PER_S:4.0%})"
    )
    for impl in ("cublas_bf16", "marlin"):
        rival = anchors.get((row["case"], m, impl))
        if rival and row["direction"] == "forward" and not row["lora_rank"]:
            text += f"  {rival / us:5.2f} x {impl}"
    return text


def measure_case(case: str, tokens: list[int], rank: int, emit) -> None:
    n, k = cases.SHAPES[case]
    weights = weights_of(case)
    for m in tokens:
        some = weights[:3] if m >= 1024 else weights
        inputs = [jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16) for i in range(1 if n * k > 4e7 else 3)]
        error = relative_error(jax.jit(forward)(inputs[0], some[0]), inputs[0], some[0], False)
        if not error <= MAX_ERROR:
            raise SystemExit(f"{case} m={m}: relative error {error:.2e} is above {MAX_ERROR:.1e}")
        emit(row_of(case, m, "forward", 0, microseconds(forward, inputs, some)))
        if rank and m <= 64:
            loras = adapters(case, rank)
            call = functools.partial(nvfp4_matmul, loras=loras, implementation="mosaic_gpu")
            emit(row_of(case, m, "forward", rank, microseconds(call, inputs, some)))
        if m >= 4096:
            dy = jax.random.normal(jax.random.key(9), (m, n), jnp.bfloat16)
            error = relative_error(jax.jit(backward)(dy, some[0]), dy, some[0], True)
            if not error <= MAX_ERROR:
                raise SystemExit(f"{case} dx m={m}: relative error {error:.2e} is above {MAX_ERROR:.1e}")
            emit(row_of(case, m, "dx", 0, microseconds(backward, [dy], some)))


def measure_layers(m: int, rank: int, layers: int, emit) -> None:
    """All projections of a 7B decode step, `layers` times qkv, o, gate_up, down in one jit."""
    sets = [[weights_of(case, 1, 1)[0] for case in cases.LAYER_7B] for _ in range(layers)]
    loras = [adapters(case, rank) if rank else () for case in cases.LAYER_7B]
    inputs = [jax.random.normal(jax.random.key(i), (m, cases.SHAPES[c][1])) for i, c in enumerate(cases.LAYER_7B)]
    inputs = [x.astype(jnp.bfloat16) for x in inputs]

    def step(inputs, layer):
        return [
            nvfp4_matmul(x, weight, None, lora, implementation="mosaic_gpu")
            for x, weight, lora in zip(inputs, layer, loras, strict=True)
        ]

    us = microseconds(step, [inputs], sets) * layers
    emit({"case": "layer_set_7b", "m": m, "n": 0, "k": 0, "direction": "forward", "lora_rank": rank, "impl": "qerl",
          "us": round(us, 1)})  # fmt: skip


def meta() -> dict:
    def output(*command):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    return {
        "gpu": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", *sys.argv]),
        "jax": jax.__version__,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=pathlib.Path, help="JSON rows of rivals measured on the same kind of GPU")
    parser.add_argument("--cases", nargs="*", default=list(cases.SHAPES), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS))
    parser.add_argument("--rank", type=int, default=32, help="of the adapters timed for up to 64 tokens; 0 for none")
    parser.add_argument("--layers", type=int, default=28, help="of the decode-step rows; 0 to leave them out")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/matmul.json"))
    args = parser.parse_args()
    rivals = json.loads(args.anchors.read_text())["rows"] if args.anchors else []
    anchors = {(row["case"], row["m"], row["impl"]): row["us"] for row in rivals}
    rows, about = [], meta()

    def emit(row: dict) -> None:
        rows.append({**row, "commit": about["commit"]})
        print(describe(row, anchors), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        copied = [{**rival, "source": str(args.anchors.name)} for rival in rivals] if args.anchors else []
        args.out.write_text(json.dumps({"meta": about, "rows": rows + copied}, indent=0))

    for rank in (0, args.rank) if args.layers else ():
        measure_layers(8, rank, args.layers, emit)
    for case in args.cases:
        measure_case(case, args.tokens, args.rank, emit)


if __name__ == "__main__":
    main()
