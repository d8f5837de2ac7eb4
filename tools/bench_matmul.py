"""Times the NVFP4 product on the projections of Qwen2.5 and writes tools/results/<device>/matmul.json.

    python tools/bench_matmul.py [--anchors ROWS.json | --library _C.abi3.so] [--cases qkv_7b ...] [--tokens 1 8 ...]
        [--out FILE.json]

A figure comes from two jitted loops whose body runs the product over many weights (`bursts`): the longer loop's median
wall time less the shorter's, divided by the products it has more of, so that what the host does once a call (for
hundreds of arrays 0.1 to 2 ms) does not count. A loop stands for a decode loop: its buffers do not move, so that its
CUDA graphs are captured once; a list of calls without a loop is captured anew whenever an output lies elsewhere. Every
product is checked first, against the exact weights in fp32. All loops are compiled beforehand, by processes that do
not touch the GPU (`ahead`); one process times them, one after the other.

Rivals, for the ratios: `--library` names vLLM's library of kernels, and Marlin and cuBLAS are timed first, on this GPU
and in the same bursts (`time_rivals.py`); `--anchors`, where there is no library, names rows that it wrote on the same
kind of GPU. Their rows are copied into the result, marked with their source.

The result is written after every row, and a run goes on where one of the same commit was cut short: rows that are there
already are not timed again. `matmul_report.py` prints the summary of a stored result.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import types

import ahead
import bursts
import jax
import jax.numpy as jnp
import numpy as np
from matmul_report import describe, rivals_of, summary
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import route
from record import meta

SHORT = 2  # rounds of the shorter loop, because XLA takes a loop of one round apart
MAX_ERROR = 2.5e-3
# Products that do not depend on each other must not run at the same time within a captured graph.
ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


def looped(call, rounds: int):
    """(xs, weights) -> a number that depends on every product: in each of the `rounds`, for each of `xs`,
    `call(x, weight)` for each weight. An x may be a list, one for each weight; all must differ, or XLA would make one
    call of several. Every round's xs wait for the sum of the round before, so that nothing can leave the loop, and
    nothing but the sum is computed beside the products."""

    def every(xs, weights):

        def one_round(_, total):
            now, _ = jax.lax.optimization_barrier((xs, total))
            inputs = [one for x in now for one in (x if isinstance(x, list) else [x] * len(weights))]
            outs = [call(x, weight) for x, weight in zip(inputs, weights * len(xs), strict=True)]
            return total + sum(out[0, 0].astype(jnp.float32) for out in outs)

        return jax.lax.fori_loop(0, rounds, one_round, jnp.float32(0))

    return every


def microseconds(programs: list[tuple]) -> list[float]:
    """Time of a single GEMM for each (short, long, args, count): the difference of `long(*args)` and `short(*args)`,
    divided by the `count` GEMMs that the long program has more. All programs take turns."""

    def seconds(compiled, args) -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        return time.perf_counter() - start

    runs = [functools.partial(seconds, each, args) for *both, args, _ in programs for each in both]
    found = bursts.medians(runs)
    each = zip(programs, found[::2], found[1::2], strict=True)
    return [(more - less) / count * 1e6 for (*_, count), less, more in each]


def weights_of(case: str, m: int) -> list[PackedNvfp4]:
    """Packed random weights of one case, as many as its burst rotates."""
    shape = cases.SHAPES[case]
    return [cases.random_packed(jax.random.key(i), *shape) for i in range(Product(case, m).burst().weights)]


@jax.jit
def _turned(x, by):
    """One program for all shifts."""
    return jnp.roll(x, by, axis=1)


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


def with_adapters(x, layer, lora_x=None):
    """The GEMM with the adapters of one layer: (x, (weight, A, [B, ...])) -> y."""
    weight, a, lora_b = layer
    return nvfp4_matmul(x, weight, None, loras_of(a, lora_b), implementation="mosaic_gpu", lora_x=lora_x)


def prologue_arguments(rows: int, layer, norm: bool = False) -> dict:
    """Arguments of the decode prologue of a GEMM of a layer: A and the ranks of its adapters, and, except for a norm,
    the form of their `x A`. No A where the GEMM computes `x A`; all of it where there is no
    weight."""
    weight, a, lora_b = layer
    form = LoraForm.WHOLE
    if weight is not None:
        form = route(rows, weight, loras_of(a, lora_b), jnp.bfloat16, implementation="mosaic_gpu").lora_form
    if form is LoraForm.A:
        a, lora_b = None, []
    arguments = {"a": a, "ranks": tuple(b.shape[0] for b in lora_b)}
    return arguments if norm else {**arguments, "lora_form": form}


@dataclasses.dataclass(frozen=True)
class Product:
    """A product to be timed, with adapters of a rank or without; their `x A` is the product's own where the table of
    tiles says so, else that of `decode_prologue`'s kernel up to 128 tokens, else XLA's, and counted either way."""

    case: str
    m: int
    direction: str = "forward"
    lora_rank: int = 0
    batch_invariant: bool = False

    def row(self) -> dict:
        """The row of the result file, without its time."""
        n, k = cases.SHAPES[self.case]
        row = {"case": self.case, "m": self.m, "n": n, "k": k, "direction": self.direction, "impl": "qerl"}
        more = {"batch_invariant": True} if self.batch_invariant else {}
        return {**row, "lora_rank": self.lora_rank, **more}

    def burst(self) -> bursts.Burst:
        """How it is timed."""
        n, k = cases.SHAPES[self.case]
        return bursts.burst_of(self.m, n, k, n * k * 0.5625)

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
        """(xs, weights) of the loop, an x for each turn; for each weight, too, where there are adapters: XLA would make
        one `x A` of those that share theirs."""
        weights, turns = weights_of(self.case, self.m), range(self.burst().turns)
        if not self.lora_rank:
            return [_turned(x, i) for i in turns], weights
        layers = [(weight, *adapters(self.case, self.lora_rank, i)) for i, weight in enumerate(weights)]
        return [[_turned(x, i * len(layers) + j) for j in range(len(layers))] for i in turns], layers


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
        """The row of the result file, without its time."""
        row = {"case": "layers_7b", "m": self.m, "n": 0, "k": 0, "direction": "forward", "impl": "qerl"}
        return {**row, "lora_rank": self.lora_rank, "layers": self.layers, "products": self.products}

    def burst(self) -> bursts.Burst:
        """How it is timed."""
        return bursts.burst_of_step(self.layers)

    def call(self, start: tuple, stack: list) -> jax.Array:
        """One step."""
        return _layers(start, stack, self.products)

    def width(self) -> int:
        """Features of the residual stream."""
        return cases.SHAPES["down_7b"][0]

    def weights(self) -> list[list[PackedNvfp4 | None]]:
        """Weights of each layer's projections; None without GEMMs."""
        if not self.products:
            return [[None] * len(cases.LAYER_7B)] * self.layers
        keys = [jax.random.split(jax.random.key(i), len(cases.LAYER_7B)) for i in range(self.layers)]
        shapes = [cases.SHAPES[case] for case in cases.LAYER_7B]
        return [[cases.random_packed(key, *shape) for key, shape in zip(of, shapes, strict=True)] for of in keys]

    def arguments(self, x: jax.Array, weights: list | None = None) -> tuple:
        """([what enters the first layer], [the layers]); `weights` in place of its own."""
        stack = []
        for i, of_layer in enumerate(weights or self.weights()):
            parts = [adapters(case, self.lora_rank, 4 * i + j) for j, case in enumerate(cases.LAYER_7B)]
            stack.append([(weight, *part) for weight, part in zip(of_layer, parts, strict=True)])
        gates = jax.random.normal(jax.random.key(1), (self.layers, self.m, 2 * cases.SHAPES["down_7b"][1]), x.dtype)
        return [(x.astype(jnp.float32), x, list(gates))], [stack]


def program(what: Product | Step, rounds: int):
    """(xs, weights) -> what depends on the whole loop, and the first product."""
    loop = looped(what.call, rounds)
    return lambda xs, weights: (loop(xs, weights), what.call(_first(xs), weights[0]))


def _first(xs: list):
    return xs[0][0] if isinstance(xs[0], list) else xs[0]


def rounds_of(what: Product | Step) -> tuple[int, int]:
    """Rounds of the shorter and of the longer loop."""
    return SHORT, SHORT + what.burst().rounds


def build(what: Product | Step, rounds: int) -> tuple:
    """For `ahead.compile_all`: the program and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((what.m, what.width()), jnp.bfloat16)
    return program(what, rounds), jax.eval_shape(what.arguments, x)


def wanted(case: str, tokens: list[int], rank: int, batch_invariant: bool) -> list[Product]:
    """The products of one case that are timed."""
    found = [Product(case, m) for m in tokens]
    found += [Product(case, m, batch_invariant=True) for m in tokens if batch_invariant and m in (8, 64, 4096)]
    found += [Product(case, m, lora_rank=rank) for m in tokens if rank and m <= 64]
    return found + [Product(case, m, "dx") for m in tokens if m >= 4096]


class Bench:
    """Times programs on this machine's GPU, one by one, and checks what they compute."""

    def __init__(self, executables: dict, rivals: dict) -> None:
        self.executables, self.rivals = executables, rivals
        self.inputs = functools.lru_cache(1)(self._inputs)
        # With adapters and without, the same weights at the same place: see `bursts.PLACES`.
        self.weights = functools.lru_cache(bursts.PLACES)(lambda layers, place: Step(1, 0, layers, True).weights())

    def _inputs(self, case: str, direction: str, most: int) -> tuple[jax.Array, np.ndarray]:
        """Rows of x for every number of tokens of a case, and the exact product of the first."""
        what = Product(case, most, direction)
        x = jax.random.normal(jax.random.key(9), (most, what.width()), jnp.bfloat16)
        return x, np.asarray(exact(x[:256], weights_of(case, most)[0], direction == "dx"))

    def measure(self, several: list[Product | Step], most: int) -> list[dict]:
        """The rows of `several`, which take turns; of steps the mean over the places where their arrays lie. `most`:
        tokens of the largest product of their case. Raises SystemExit where one does not compile or is wrong."""
        steps = isinstance(several[0], Step)
        times, held = [], []
        for place in range(bursts.PLACES if steps else 1):
            programs = [self._prepared(what, most, place) for what in several]
            times.append(microseconds(programs))
            # Held, so that the next arrays and what the programs need meanwhile lie elsewhere.
            held += [programs, *(jnp.zeros(1 << size, jnp.uint8) for size in range(16, 27))]
        rows = []
        for what, us in zip(several, zip(*times, strict=True), strict=True):
            places = {"us_at_places": [round(one, 2) for one in us]} if steps else {}
            rows.append({**what.row(), "us": round(statistics.mean(us), 2), **places})
            print(describe(rows[-1], self.rivals), flush=True)
        return rows

    def _prepared(self, what: Product | Step, most: int, place: int) -> tuple:
        """(short, long, args, count) for `microseconds`, run once and checked."""
        both = [self.executables[what, rounds] for rounds in rounds_of(what)]
        for found in both:
            if isinstance(found, str):
                raise SystemExit(f"{what} does not compile: {found}")
        if isinstance(what, Step):
            x, expected = jax.random.normal(jax.random.key(9), (what.m, what.width()), jnp.bfloat16), None
        else:
            x, expected = self.inputs(what.case, what.direction, most)
        shared = [self.weights(what.layers, place)] if isinstance(what, Step) and what.products else []
        args = what.arguments(x[: what.m], *shared)
        short, long = (ahead.load(found, *args) for found in both)
        _, first = long(*args)
        if expected is not None:
            expected = expected[: what.m]
            expected = expected + adapters_of(_first(args[0]), args[1][0]) if what.lora_rank else expected
            refuse_if_wrong(first, expected, str(what))
        return short, long, args, math.prod(what.burst())


def adapters_of(x: jax.Array, layer: tuple) -> np.ndarray:
    """`(x A) B` of all adapters side by side, in fp32 but for `x A`, which is rounded to bf16."""
    _, a, expand = layer
    ranks = np.cumsum([b.shape[0] for b in expand])[:-1]
    wide = (np.asarray(x, np.float32) @ np.asarray(a, np.float32)).astype(jnp.bfloat16).astype(np.float32)
    parts = zip(np.split(wide, ranks, axis=1), expand, strict=True)
    return np.concatenate([t @ np.asarray(b, np.float32) for t, b in parts], axis=1)


def _layers(start, stack, products: bool):
    """(residual stream, what is added to it, gate and up of each layer) -> what depends on every operation, [1, 1]."""
    (x, delta, gates), every = start, jnp.float32(0)
    scale = jnp.ones(x.shape[1])
    norm = functools.partial(rms_norm_prologue, eps=1e-6, dtype=jnp.bfloat16)
    of = functools.partial(prologue_arguments, x.shape[0])
    for (qkv, o, up, down), gate_up in zip(stack, gates, strict=True):
        x, y, t = norm(x, delta, scale, **of(qkv, norm=True))
        delta = y
        if products:
            out = with_adapters(y, qkv, t)
            every += out[0, 0]
            y, _ = jax.lax.optimization_barrier((y, out))  # else XLA puts the qkv of all layers behind all else
            before = of(o)
            t = None if before["a"] is None else lora_prologue(y, **before)
            delta = with_adapters(y, o, t)
        x, y, t = norm(x, delta, scale, **of(up, norm=True))
        h, t = silu_mul_prologue(with_adapters(y, up, t) if products else gate_up, **of(down))
        delta = with_adapters(h, down, t) if products else y
        every += h[0, 0] + delta[0, 0]
    return (every + x[0, 0])[None, None]


def rival_rows(anchors: pathlib.Path | None, library: pathlib.Path | None) -> list[dict]:
    """Rows of rivals, marked with their source; timed by a process of its own, whose memory on the GPU is then free."""
    if library is None:
        return [{**row, "source": anchors.name} for row in json.loads(anchors.read_text())["rows"]] if anchors else []
    script = pathlib.Path(__file__).parent / "time_rivals.py"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "rivals.json"
        subprocess.run([sys.executable, script, library, "--out", out], check=True)
        found = json.loads(out.read_text())
    return [{**row, "source": f"time_rivals.py, torch {found['meta']['torch']}"} for row in found["rows"]]


def stored_rows(path: pathlib.Path, commit: str) -> tuple[list[dict], list[str]]:
    """Our rows of a commit that a run left behind, and the commands that made them."""
    if commit == "unknown" or not path.exists():
        return [], []
    stored = json.loads(path.read_text())
    rows = [row for row in stored["rows"] if row["impl"] == "qerl" and row.get("commit") == commit]
    return rows, [stored["meta"]["command"]] if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rivals = parser.add_mutually_exclusive_group()
    rivals.add_argument("--anchors", type=pathlib.Path, help="JSON rows of rivals measured on the same kind of GPU")
    rivals.add_argument("--library", type=pathlib.Path, help="vLLM's _C.abi3.so; needs torch with CUDA")
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS))
    parser.add_argument("--rank", type=int, default=32, help="of the adapters timed for up to 64 tokens; 0 for none")
    parser.add_argument("--layers", type=int, default=28, help="of the decode steps; 0 to leave them out")
    parser.add_argument("--batch-invariant", action="store_true", help="also that mode, at 8, 64 and 4096 tokens")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/matmul.json"))
    args = parser.parse_args()
    copied = rival_rows(args.anchors, args.library)
    about = meta(args.commit)
    rows, commands = stored_rows(args.out, about["commit"])
    about["command"] = "; ".join(dict.fromkeys([*commands, about["command"]]))
    kinds = [(0, False), (0, True), (args.rank, True)] if args.layers and args.rank else []
    few = [m for m in args.tokens if m <= 64]
    steps = [Step(m, rank, args.layers, products) for m in few for rank, products in kinds]
    products = [what for case in args.cases for what in wanted(case, args.tokens, args.rank, args.batch_invariant)]
    missing = without([*steps, *products], rows)
    programs = [(what, rounds) for what in missing for rounds in rounds_of(what)]
    bench = Bench(dict(ahead.compile_all(build, programs, args.jobs, ONE_BY_ONE)), rivals_of(copied))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for several in turns(missing):
        try:  # the others are worth having
            found = bench.measure(several, max(args.tokens))
            rows += [{**row, "commit": about["commit"]} for row in found]
        except (SystemExit, jax.errors.JaxRuntimeError) as error:
            failed.append(f"{', '.join(map(str, several))}: {str(error)[:300]}")
            print(failed[-1], flush=True)
            continue
        args.out.write_text(json.dumps({"meta": about, "rows": rows + copied}, indent=0) + "\n")
    print(summary(rows + copied))
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(missing)} failed:", *failed]))


def turns(programs: list[Product | Step]) -> list[list[Product | Step]]:
    """What is timed together: the steps of so many tokens, each product by itself."""
    together = itertools.groupby(programs, lambda what: what.m if isinstance(what, Step) else what)
    return [list(some) for _, some in together]


def without(programs: list[Product | Step], rows: list[dict]) -> list[Product | Step]:
    """The programs that `rows` do not tell of, in their order: the longest to compile first."""
    known = [{key: value for key, value in row.items() if key not in ("us", "us_at_places", "commit")} for row in rows]
    return [what for what in programs if what.row() not in known]


if __name__ == "__main__":
    main()
