"""Times the NVFP4 product on the projections of Qwen2.5 and writes tools/results/<device>/matmul.json.

    python tools/bench_matmul.py [--anchors ROWS.json] [--cases qkv_7b ...] [--tokens 1 8 ...] [--out FILE.json]

A figure is the wall time of one jitted loop whose body runs the product over many weights (at least 300 MB of packed
bytes and two copies, so that the L2 does not help), divided by the number of products. The loop stands for a decode
loop: its buffers do not move, so that its CUDA graphs are captured once; a list of calls without a loop is captured
anew whenever an output lies elsewhere, and then the host is what is timed. The smallest of five repetitions after the
GPU has been busy for 30 ms. Every product is checked first, against the exact weights in fp32. `--anchors` names rows
of rivals in the same layout ("marlin", "cublas_bf16"), for the ratios; without it only our own figures are printed.
The rows of rivals are copied into the result, marked with their own source.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import math
import multiprocessing
import pathlib
import statistics
import tempfile
import time
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from qerl_kernels.lora_shrink.shrink import norm_shrink, shrink, silu_shrink
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.matmul import nvfp4_matmul
from record import meta

ROTATE_BYTES = 300e6
COPY_BYTES_PER_S = 4.30e12  # read + write of a device-to-device copy on an H200
MATRIX_FLOP_PER_S = 788e12  # an 8192 × 8192 × 8192 bf16 product on an H200
MAX_ERROR = 2.5e-3
# direction, numbers of tokens, and the rival that counts there
GROUPS = (
    ("forward", (1, 8, 16, 32), "marlin"),
    ("forward", (64,), "the better"),
    ("forward", (96, 128), "the better"),
    ("forward", (256, 512, 1024), "cublas_bf16"),
    ("forward", (4096, 16384), "cublas_bf16"),
    ("dx", (4096, 16384), "cublas_bf16"),
)
# Products that do not depend on each other must not run at the same time within a captured graph.
ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


@contextlib.contextmanager
def _locked(kind: int):
    with open(pathlib.Path(tempfile.gettempdir()) / "qerl-bench.lock", "w") as file:  # a file for each: threads too
        fcntl.flock(file, kind)
        yield


def gpu_alone():
    """No other process or thread that asks is on the GPU meanwhile."""
    return _locked(fcntl.LOCK_EX)


def gpu_shared():
    """Others may be on it too; who wants it alone waits. For compiling, which tries XLA's own products on the GPU."""
    return _locked(fcntl.LOCK_SH)


def looped(call, rounds: int):
    """(x, weights) -> a number that depends on every product: `rounds` times `call(x, weight)` for each weight; x turns
    its sign every round, so that nothing can leave the loop. x may be a list, one for each weight."""

    def every(x, weights):

        def one_round(_, carry):
            x, total = carry
            inputs = x if isinstance(x, list) else [x] * len(weights)
            outs = [call(x, weight) for x, weight in zip(inputs, weights, strict=True)]
            return jax.tree.map(jnp.negative, x), total + sum(out[0, 0].astype(jnp.float32) for out in outs)

        return jax.lax.fori_loop(0, rounds, one_round, (x, jnp.float32(0)))

    return every


def microseconds(compiled, x, weights: list, count: int, repeats: int = 5, warm: float = 0.03) -> float:
    """Time of one of the `count` products of a compiled `looped`."""
    best = math.inf
    start = time.perf_counter()
    while time.perf_counter() - start < warm:
        jax.block_until_ready(compiled(x, weights))
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x, weights))
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


def floor_us(m: int, n: int, k: int) -> float:
    """No product is faster: its bytes at the copy's rate, its operations at the matrix unit's."""
    return max(n * k * 0.5625 / COPY_BYTES_PER_S, 2.0 * m * n * k / MATRIX_FLOP_PER_S) * 1e6


def rounds_of(us: float, count: int) -> int:
    """Rounds of a loop that take about 8 ms."""
    return max(1, round(8e3 / (us * count)))


def prepare(call, x, weights: list, us: float):
    """Compiles the loop of `call(x, weight)`, which takes about `us`; the result times it, nobody else on the GPU."""
    rounds = rounds_of(us, len(weights))
    compiled = jax.jit(looped(call, rounds), compiler_options=ONE_BY_ONE).lower(x, weights).compile()

    def timed() -> float:
        with gpu_alone():
            return microseconds(compiled, x, weights, rounds * len(weights))

    return timed


def weights_of(case: str, least: int = 2, limit: int | None = None) -> list:
    """Packed random weights of one case, enough to outgrow the L2."""
    n, k = cases.SHAPES[case]
    copies = max(least, math.ceil(ROTATE_BYTES / (n * k * 0.5625)))
    copies = copies if limit is None else min(copies, limit)
    return [packing.pack(cases.random_weight(jax.random.key(i), n, k)) for i in range(copies)]


@functools.partial(jax.jit, static_argnums=2)
def _exact(x, weight, transposed: bool):
    matrix, row = packing.packed_parts(weight)
    matrix, x = matrix.astype(jnp.float32), x[:256].astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    if transposed:
        return jnp.matmul(x * row, matrix, precision=highest)
    return jnp.matmul(x, matrix.T, precision=highest) * row


@jax.jit
def _distance(y, expected):
    return jnp.linalg.norm(y[: len(expected)].astype(jnp.float32) - expected) / jnp.linalg.norm(expected)


def exact(x, weight, transposed: bool) -> jax.Array:
    """x · W for at most 256 tokens, the exact weights in fp32."""
    return jax.block_until_ready(_exact(x, weight, transposed))


def refuse_if_wrong(y, expected, what: str) -> None:
    """Raises SystemExit where ‖y − expected‖ / ‖expected‖ is above the bound or not a number."""
    error = float(_distance(y, expected))
    if not error <= MAX_ERROR:
        raise SystemExit(f"{what}: relative error {error:.2e} is above {MAX_ERROR:.1e}")


def forward(x, weight):
    return nvfp4_matmul(x, weight, implementation="mosaic_gpu")


def backward(dy, weight):
    """dx alone: the forward product of the same call is not used and falls away."""
    x = jnp.zeros((dy.shape[0], weight.shape[1]), dy.dtype)
    return jax.vjp(lambda x: forward(x, weight), x)[1](dy)[0]


def adapters(case: str, rank: int, seed: int) -> tuple[jax.Array | None, list]:
    """The A of all parts of a projection side by side, as a decode loop keeps them, and the B of each."""
    if not rank:
        return None, []
    _, k = cases.SHAPES[case]
    first, *keys = jax.random.split(jax.random.key(seed), 1 + len(cases.parts(case)))
    a = jax.random.normal(first, (k, rank * len(keys)), jnp.bfloat16) / k**0.5
    widths = zip(keys, cases.parts(case), strict=True)
    return a, [jax.random.normal(key, (rank, width), jnp.bfloat16) / 8 for key, width in widths]


def with_adapters(x, layer, shrunk=None):
    """The product with the adapters of one layer: (x, (weight, A, [B, ...])) -> y."""
    weight, a, expand = layer
    loras, offset = [], 0
    for i, b in enumerate(expand):
        loras.append(types.SimpleNamespace(a=a, b=b, scale=1.0, offset=offset, column=i * b.shape[0]))
        offset += b.shape[1]
    return nvfp4_matmul(x, weight, None, loras, implementation="mosaic_gpu", shrunk=shrunk)


def row_of(case: str, m: int, direction: str, rank: int) -> dict:
    n, k = cases.SHAPES.get(case, (0, 0))
    return {"case": case, "m": m, "n": n, "k": k, "direction": direction, "lora_rank": rank, "impl": "qerl"}


def describe(row: dict, anchors: dict) -> str:
    m, n, k, us = row["m"], row["n"], row["k"], row["us"]
    if not n:
        what = "projections and what precedes them" if row["products"] else "what precedes the projections"
        return f"{row['case']} x {row['layers']} m {m} lora {row['lora_rank']:2d}: {us / 1e3:.3f} ms, {what}"
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
    return text + ("  batch invariant" if row.get("batch_invariant") else "")


def prepare_case(case: str, tokens: list[int], rank: int, batch_invariant: bool) -> list[tuple[dict, Callable]]:
    """Rows of one case without their time, each with what measures it."""
    n, k = cases.SHAPES[case]
    weights = weights_of(case)
    prepared = []

    def add(call, m: int, direction: str, rank: int, x, weights, **more) -> None:
        timed = prepare(call, x, weights, 1.5 * floor_us(m, n, k) + 5)
        prepared.append(({**row_of(case, m, direction, rank), **more}, timed))

    def check(call, m: int, x, transposed: bool) -> None:
        y, expected = jax.jit(call)(x, weights[0]), exact(x, weights[0], transposed)
        refuse_if_wrong(y, expected, f"{case} m={m} transposed={transposed}")

    for m in tokens:
        some = weights[:3] if m >= 1024 else weights
        x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
        check(forward, m, x, False)
        add(forward, m, "forward", 0, x, some)
        if batch_invariant and m in (8, 64, 4096):
            invariant = functools.partial(nvfp4_matmul, implementation="mosaic_gpu", batch_invariant=True)
            check(invariant, m, x, False)
            add(invariant, m, "forward", 0, x, some, batch_invariant=True)
        if rank and m <= 64:
            # an x for each weight: XLA would make one product of those that share theirs
            inputs = [jnp.roll(x, i, axis=1) for i in range(len(some))]
            pairs = [(weight, *adapters(case, rank, i)) for i, weight in enumerate(some)]
            add(with_adapters, m, "forward", rank, inputs, pairs)
        if m >= 4096:
            dy = jax.random.normal(jax.random.key(9), (m, n), jnp.bfloat16)
            check(backward, m, dy, True)
            add(backward, m, "dx", 0, dy, some)
    return prepared


def prepare_layers(m: int, rank: int, layers: int, products: bool) -> list[tuple[dict, Callable]]:
    """What a decode step of 7B does outside attention, `layers` times, in one jit: the operations before each
    projection as the rollout fuses them (with `x A`), and, with `products`, the projections. Without them and without
    adapters, what is left is not the projections' and not the adapters'.
    """
    stack = []
    for i in range(layers):
        parts = [adapters(case, rank, 4 * i + j) for j, case in enumerate(cases.LAYER_7B)]
        weights = [weights_of(case, 1, 1)[0] if products else None for case in cases.LAYER_7B]
        stack.append([(weight, *part) for weight, part in zip(weights, parts, strict=True)])
    hidden, ffn = cases.SHAPES["down_7b"]
    keys = jax.random.split(jax.random.key(m), 3)
    start = (
        jax.random.normal(keys[0], (m, hidden)),
        jax.random.normal(keys[1], (m, hidden), jnp.bfloat16),
        list(jax.random.normal(keys[2], (layers, m, 2 * ffn), jnp.bfloat16)),
    )
    call = functools.partial(_layers, rank=rank, products=products)
    timed = prepare(call, start, [stack], 30.0 * layers)
    row = {**row_of("layers_7b", m, "forward", rank), "layers": layers, "products": products}
    return [(row, timed)]


def _layers(start, stack, rank: int, products: bool):
    """(residual stream, what is added to it, gate and up of each layer) -> what depends on every operation, [1, 1]."""
    (x, delta, gates), every = start, jnp.float32(0)
    scale = jnp.ones(x.shape[1])
    norm = functools.partial(norm_shrink, eps=1e-6, dtype=jnp.bfloat16)
    of = lambda layer: {"a": layer[1], "ranks": (rank,) * len(layer[2])}  # noqa: E731
    for (qkv, o, up, down), gate_up in zip(stack, gates, strict=True):
        x, y, t = norm(x, delta, scale, **of(qkv))
        delta = y
        if products:
            every += with_adapters(y, qkv, t)[0, 0]
            t = shrink(y, **of(o)) if rank else None
            delta = with_adapters(y, o, t)
        x, y, t = norm(x, delta, scale, **of(up))
        h, t = silu_shrink(with_adapters(y, up, t) if products else gate_up, **of(down))
        delta = with_adapters(h, down, t) if products else y
        every += h[0, 0] + delta[0, 0]
    return (every + x[0, 0])[None, None]


def measure(anchors: dict, what: Callable, *args) -> list[dict]:
    """Rows of `what(*args)`: first all is compiled, then timed while no other process compiles or times."""
    with gpu_shared():
        prepared = what(*args)
    rows = []
    for row, timed in prepared:
        rows.append({**row, "us": round(timed(), 2)})
        print(describe(rows[-1], anchors), flush=True)
    return rows


def ratios(rows: list[dict], anchors: dict) -> dict[tuple[str, int, str], list[float]]:
    """(direction, m, rival) -> the rival's time over ours in every case. dx is compared with cuBLAS's forward."""
    found = {}
    for row in rows:
        if row["lora_rank"] or not row["n"] or row.get("batch_invariant"):
            continue
        times = {impl: anchors.get((row["case"], row["m"], impl)) for impl in ("marlin", "cublas_bf16")}
        for impl, us in [*times.items(), ("the better", min((us for us in times.values() if us), default=None))]:
            if us and (row["direction"] == "forward" or impl == "cublas_bf16"):
                found.setdefault((row["direction"], row["m"], impl), []).append(us / row["us"])
    return found


def means(rows: list[dict], anchors: dict) -> str:
    """Geometric means of `ratios` for each number of tokens, then for each group of them that has a rival of its own,
    and the packed bytes that the wide projections read a second at few tokens."""
    all_ratios, lines = ratios(rows, anchors), []
    for (direction, m, impl), values in sorted(all_ratios.items()):
        lines.append(f"{direction:8s} m {m:18d}  {_mean(values)} x {impl}")
    for direction, tokens, impl in GROUPS:
        values = [ratio for m in tokens for ratio in all_ratios.get((direction, m, impl), [])]
        if values:
            lines.append(f"{direction:8s} m {', '.join(map(str, tokens)):>18s}  {_mean(values)} x {impl}")
    for row in rows:
        wide = row["case"].startswith(("gate_up", "down")) and row["direction"] == "forward" and row["m"] <= 16
        if wide and not row["lora_rank"] and not row.get("batch_invariant"):
            lines.append(f"{row['case']} m {row['m']}: {row['n'] * row['k'] * 0.5625 / row['us'] / 1e6:.2f} TB/s")
    return "\n".join(lines)


def step_cost(rows: list[dict]) -> str:
    """What the projections of a decode step take, and what adapters add, over what precedes them without adapters."""
    times = {(row["m"], row["lora_rank"], row["products"]): row["us"] for row in rows if "products" in row}
    lines = []
    for m, rank in sorted({(m, rank) for m, rank, products in times if rank and products}):
        rest, plain, adapted = times[m, 0, False], times[m, 0, True], times[m, rank, True]
        lines.append(
            f"step m {m:3d}: projections {(plain - rest) / 1e3:.3f} ms, with adapters of rank {rank} "
            f"{(adapted - rest) / 1e3:.3f} ms ({(adapted - plain) / (plain - rest):+.1%})"
        )
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    return f"{statistics.geometric_mean(values):5.2f} (least {min(values):.2f}, {len(values)} products)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=pathlib.Path, help="JSON rows of rivals measured on the same kind of GPU")
    parser.add_argument("--cases", nargs="*", default=list(cases.SHAPES), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS))
    parser.add_argument("--rank", type=int, default=32, help="of the adapters timed for up to 64 tokens; 0 for none")
    parser.add_argument("--layers", type=int, default=28, help="of the decode steps; 0 to leave them out")
    parser.add_argument("--batch-invariant", action="store_true", help="also that mode, at 8, 64 and 4096 tokens")
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile; then they time one by one")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/matmul.json"))
    args = parser.parse_args()
    rivals = json.loads(args.anchors.read_text())["rows"] if args.anchors else []
    anchors = {(row["case"], row["m"], row["impl"]): row["us"] for row in rivals}
    copied = [{**rival, "source": args.anchors.name} for rival in rivals] if args.anchors else []
    rows, about = [], meta(args.commit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        kinds = [(0, False), (0, True), (args.rank, True)] if args.layers else []
        steps = [(m, rank, args.layers, products) for m in (8, 32, 64) for rank, products in kinds]
        tasks = [pool.submit(measure, anchors, prepare_layers, *step) for step in steps]
        tasks += [
            pool.submit(measure, anchors, prepare_case, case, args.tokens, args.rank, args.batch_invariant)
            for case in args.cases
        ]
        for done in concurrent.futures.as_completed(tasks):
            for row in done.result():
                rows.append({**row, "commit": about["commit"]})
            args.out.write_text(json.dumps({"meta": about, "rows": rows + copied}, indent=0) + "\n")
    print(means(rows, anchors))
    print(step_cost(rows))


if __name__ == "__main__":
    main()
