"""Times the NVFP4 product on the projections of Qwen2.5 and writes tools/results/<device>/matmul.json.

    python tools/bench_matmul.py [--anchors ROWS.json] [--cases qkv_7b ...] [--tokens 1 8 ...] [--out FILE.json]

A figure is the wall time of one jitted loop whose body runs the product over many weights (at least 300 MB of packed
bytes and two copies, so that the L2 does not help), divided by the number of products. The loop stands for a decode
loop: its buffers do not move, so that its CUDA graphs are captured once; a list of calls without a loop is captured
anew whenever an output lies elsewhere, and then the host is what is timed. The smallest of five repetitions after the
GPU has been busy for 30 ms. Every product is checked first, against the exact weights in fp32. All loops are compiled
beforehand, by processes that do not touch the GPU (`ahead`); one process times them, one after the other. `--anchors`
names rows of rivals in the same layout ("marlin", "cublas_bf16"), for the ratios; without it only our own figures are
printed. The rows of rivals are copied into the result, marked with their own source.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import time
import types

import ahead
import jax
import jax.numpy as jnp
from qerl_kernels.lora_shrink.shrink import norm_shrink, shrink, silu_shrink
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.api import PackedNvfp4
from qerl_kernels.nvfp4_matmul.matmul import nvfp4_matmul, product_takes
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


def weights_of(case: str, m: int) -> list[PackedNvfp4]:
    """Packed random weights of one case, enough to outgrow the L2; three where the product itself takes long."""
    n, k = cases.SHAPES[case]
    copies = max(2, math.ceil(ROTATE_BYTES / (n * k * 0.5625)))
    copies = copies if m < 1024 else min(3, copies)
    return [cases.random_packed(jax.random.key(i), n, k) for i in range(copies)]


# Autotuning would take longer than all else here.
@functools.partial(jax.jit, static_argnums=2, compiler_options={"xla_gpu_autotune_level": 0})
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


def loras_of(a, expand) -> list:
    """Adapters with their A side by side."""
    loras, offset = [], 0
    for i, b in enumerate(expand):
        loras.append(types.SimpleNamespace(a=a, b=b, scale=1.0, offset=offset, column=i * b.shape[0]))
        offset += b.shape[1]
    return loras


def with_adapters(x, layer, shrunk=None):
    """The product with the adapters of one layer: (x, (weight, A, [B, ...])) -> y."""
    weight, a, expand = layer
    return nvfp4_matmul(x, weight, None, loras_of(a, expand), implementation="mosaic_gpu", shrunk=shrunk)


def shrunk_before(rows: int, layer, norm: bool = False) -> dict:
    """How what precedes a product of a layer is to be called: A and the ranks of its adapters, and, but for a norm,
    whether their `x A` may come in parts. No A where the product computes `x A` itself; all of it where there is no
    weight."""
    weight, a, expand = layer
    takes = "whole"
    if weight is not None:
        takes = product_takes(rows, weight, loras_of(a, expand), jnp.bfloat16, implementation="mosaic_gpu")
    if takes == "a":
        a, expand = None, []
    how = {"a": a, "ranks": tuple(b.shape[0] for b in expand)}
    return how if norm else {**how, "in_parts": takes == "parts"}


@dataclasses.dataclass(frozen=True)
class Product:
    """A product to be timed, with adapters of a rank or without; their `x A` is the product's own where the table of
    tiles says so, else XLA's, and counted either way."""

    case: str
    m: int
    direction: str = "forward"
    lora_rank: int = 0
    batch_invariant: bool = False

    def row(self) -> dict:
        """Of the result, without its time."""
        n, k = cases.SHAPES[self.case]
        row = {"case": self.case, "m": self.m, "n": n, "k": k, "direction": self.direction, "impl": "qerl"}
        more = {"batch_invariant": True} if self.batch_invariant else {}
        return {**row, "lora_rank": self.lora_rank, **more}

    def expected_us(self) -> float:
        """Roughly what a product takes."""
        return 1.5 * floor_us(self.m, *cases.SHAPES[self.case]) + 5

    def call(self, x: jax.Array, weight) -> jax.Array:
        """The product."""
        if self.direction == "dx":
            return backward(x, weight)
        if self.lora_rank:
            return with_adapters(x, weight)
        return nvfp4_matmul(x, weight, implementation="mosaic_gpu", batch_invariant=self.batch_invariant)

    def width(self) -> int:
        """Features of x (of dy where the product is dx)."""
        n, k = cases.SHAPES[self.case]
        return n if self.direction == "dx" else k

    def arguments(self, x: jax.Array) -> tuple:
        """(x, weights) of the loop; an x for each weight where there are adapters: XLA would make one product of those
        that share theirs."""
        weights = weights_of(self.case, self.m)
        if not self.lora_rank:
            return x, weights
        pairs = [(weight, *adapters(self.case, self.lora_rank, i)) for i, weight in enumerate(weights)]
        return [jnp.roll(x, i, axis=1) for i in range(len(weights))], pairs


@dataclasses.dataclass(frozen=True)
class Step:
    """What a decode step of 7B does outside attention, `layers` times, in one jit: the operations before each
    projection as the rollout fuses them (with `x A`), and, with `products`, the projections. Without them and without
    adapters, what is left is not the projections' and not the adapters'.
    """

    m: int
    lora_rank: int
    layers: int
    products: bool

    def row(self) -> dict:
        """Of the result, without its time."""
        row = {"case": "layers_7b", "m": self.m, "n": 0, "k": 0, "direction": "forward", "impl": "qerl"}
        return {**row, "lora_rank": self.lora_rank, "layers": self.layers, "products": self.products}

    def expected_us(self) -> float:
        """Roughly what a step takes."""
        return 60.0 * self.layers

    def call(self, start: tuple, stack: list) -> jax.Array:
        """One step."""
        return _layers(start, stack, self.products)

    def width(self) -> int:
        """Features of the residual stream."""
        return cases.SHAPES["down_7b"][0]

    def arguments(self, x: jax.Array) -> tuple:
        """(what enters the first layer, [the layers])."""
        stack = []
        for i in range(self.layers):
            parts = [adapters(case, self.lora_rank, 4 * i + j) for j, case in enumerate(cases.LAYER_7B)]
            keys = jax.random.split(jax.random.key(i), len(parts))
            weights = [
                cases.random_packed(key, *cases.SHAPES[case]) if self.products else None
                for key, case in zip(keys, cases.LAYER_7B, strict=True)
            ]
            stack.append([(weight, *part) for weight, part in zip(weights, parts, strict=True)])
        gates = jax.random.normal(jax.random.key(1), (self.layers, self.m, 2 * cases.SHAPES["down_7b"][1]), x.dtype)
        return (x.astype(jnp.float32), jnp.roll(x, 1), list(gates)), [stack]


def program(what: Product | Step):
    """(x, weights) -> what depends on the whole loop, and the first product."""
    loop = looped(what.call, _rounds(what))
    return lambda x, weights: (loop(x, weights), what.call(x[0] if isinstance(x, list) else x, weights[0]))


def _rounds(what: Product | Step) -> int:
    """Rounds of the loop; two or more, because XLA takes a loop of one round apart."""
    count = 1 if isinstance(what, Step) else len(jax.eval_shape(lambda: weights_of(what.case, what.m)))
    return max(2, rounds_of(what.expected_us(), count))


def build(what: Product | Step) -> tuple:
    """For `ahead.compile_all`: the program and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((what.m, what.width()), jnp.bfloat16)
    return program(what), jax.eval_shape(what.arguments, x)


def wanted(case: str, tokens: list[int], rank: int, batch_invariant: bool) -> list[Product]:
    """The products of one case that are timed."""
    found = [Product(case, m) for m in tokens]
    found += [Product(case, m, batch_invariant=True) for m in tokens if batch_invariant and m in (8, 64, 4096)]
    found += [Product(case, m, lora_rank=rank) for m in tokens if rank and m <= 64]
    return found + [Product(case, m, "dx") for m in tokens if m >= 4096]


class Bench:
    """Times programs on this machine's GPU, one by one, and checks what they compute."""

    def __init__(self, executables: dict, anchors: dict) -> None:
        self.executables, self.anchors = executables, anchors
        self.inputs = functools.lru_cache(1)(self._inputs)

    def _inputs(self, case: str, direction: str, most: int) -> tuple[jax.Array, jax.Array]:
        """Rows of x for every number of tokens of a case, and the exact product of the first."""
        what = Product(case, most, direction)
        x = jax.random.normal(jax.random.key(9), (most, what.width()), jnp.bfloat16)
        return x, exact(x[:256], weights_of(case, 1024)[0], direction == "dx")

    def measure(self, what: Product | Step, most: int) -> dict:
        """The row of `what`. `most`: tokens of the largest product of its case."""
        found = self.executables[(what,)]
        if isinstance(found, str):
            raise SystemExit(f"{what} does not compile: {found}")
        if isinstance(what, Step):
            x, expected = jax.random.normal(jax.random.key(9), (what.m, what.width()), jnp.bfloat16), None
        else:
            x, expected = self.inputs(what.case, what.direction, most)
        args = what.arguments(x[: what.m])
        compiled = ahead.load(found, *args)
        _, first = compiled(*args)
        if expected is not None and not what.lora_rank:
            refuse_if_wrong(first, expected[: what.m], str(what))
        us = microseconds(compiled, *args, _rounds(what) * len(args[1]) + 1)
        row = {**what.row(), "us": round(us, 2)}
        print(describe(row, self.anchors), flush=True)
        return row


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


def _layers(start, stack, products: bool):
    """(residual stream, what is added to it, gate and up of each layer) -> what depends on every operation, [1, 1]."""
    (x, delta, gates), every = start, jnp.float32(0)
    scale = jnp.ones(x.shape[1])
    norm = functools.partial(norm_shrink, eps=1e-6, dtype=jnp.bfloat16)
    of = functools.partial(shrunk_before, x.shape[0])
    for (qkv, o, up, down), gate_up in zip(stack, gates, strict=True):
        x, y, t = norm(x, delta, scale, **of(qkv, norm=True))
        delta = y
        if products:
            every += with_adapters(y, qkv, t)[0, 0]
            before = of(o)
            t = None if before["a"] is None else shrink(y, **before)
            delta = with_adapters(y, o, t)
        x, y, t = norm(x, delta, scale, **of(up, norm=True))
        h, t = silu_shrink(with_adapters(y, up, t) if products else gate_up, **of(down))
        delta = with_adapters(h, down, t) if products else y
        every += h[0, 0] + delta[0, 0]
    return (every + x[0, 0])[None, None]


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
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS))
    parser.add_argument("--rank", type=int, default=32, help="of the adapters timed for up to 64 tokens; 0 for none")
    parser.add_argument("--layers", type=int, default=28, help="of the decode steps; 0 to leave them out")
    parser.add_argument("--batch-invariant", action="store_true", help="also that mode, at 8, 64 and 4096 tokens")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/matmul.json"))
    args = parser.parse_args()
    rivals = json.loads(args.anchors.read_text())["rows"] if args.anchors else []
    anchors = {(row["case"], row["m"], row["impl"]): row["us"] for row in rivals}
    copied = [{**rival, "source": args.anchors.name} for rival in rivals] if args.anchors else []
    kinds = [(0, False), (0, True), (args.rank, True)] if args.layers else []
    steps = [Step(m, rank, args.layers, products) for m in (8, 32, 64) for rank, products in kinds]
    products = [what for case in args.cases for what in wanted(case, args.tokens, args.rank, args.batch_invariant)]
    programs = [(what,) for what in steps + products]  # the longest to compile first
    bench = Bench(dict(ahead.compile_all(build, programs, args.jobs, ONE_BY_ONE)), anchors)
    rows, about = [], meta(args.commit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for (what,) in programs:
        rows.append({**bench.measure(what, max(args.tokens)), "commit": about["commit"]})
        args.out.write_text(json.dumps({"meta": about, "rows": rows + copied}, indent=0) + "\n")
    print(means(rows, anchors))
    print(step_cost(rows))


if __name__ == "__main__":
    main()
