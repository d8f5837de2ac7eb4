"""Times the NVFP4 GEMM on the projections of Qwen2.5 and writes tools/results/<device>/matmul.json.

    python tools/bench_matmul.py [--anchors ROWS.json] [--cases qkv_7b ...] [--tokens 1 8 ...] [--out FILE.json]

A time is the difference of two jitted loops that run the GEMM over many weights (`matmul_programs`, `bursts`): the
median wall time of the longer one less that of the shorter one, over the number of GEMMs between them. So the work of
the host once a call (for hundreds of arrays 0.1 to 2 ms) does not count. Every GEMM is checked first, against the exact
weights in fp32. All loops are compiled beforehand, by processes that do not touch the GPU (`ahead`); one process times
them, one after the other.

Rivals, for the ratios: `--anchors` names rows of Marlin and cuBLAS that `time_rivals.py` wrote, in the same bursts and
best on the same GPU minutes before. They are copied into the result, marked with the file's name, the date and the
commit.

The result is written after every row. A run continues an interrupted one of the same commit: stored rows are not timed
again. `matmul_report.py` prints the summary of a stored result.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import time

import ahead
import bursts
import jax
import jax.numpy as jnp
import numpy as np
from matmul_programs import DecodeStep, Gemm, build, first_x, rounds_of, weights_of
from matmul_report import describe, rivals_of, summary
from qerl_kernels.nvfp4_matmul import cases, packing
from record import add_commit, meta

MAX_ERROR = 2.5e-3
# Independent GEMMs must not run at the same time within a captured graph.
ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


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
    """x · W for at most 256 rows, with the exact weights in fp32."""
    return jax.block_until_ready(_exact(x, weight, transposed))


def refuse_if_wrong(y, expected, what: str) -> None:
    """Raises SystemExit where ‖y − expected‖ / ‖expected‖ is above the bound or NaN."""
    error = float(_distance(y, expected))
    if not error <= MAX_ERROR:
        raise SystemExit(f"{what}: relative error {error:.2e} is above {MAX_ERROR:.1e}")


class Bench:
    """Times programs on this machine's GPU, one by one, and checks their outputs."""

    def __init__(self, executables: dict, rivals: dict) -> None:
        self.executables, self.rivals = executables, rivals
        self.inputs = functools.lru_cache(1)(self._inputs)
        # With adapters and without, the same weights at the same place: see `bursts.PLACES`.
        self.weights = functools.lru_cache(bursts.PLACES)(
            lambda layers, place: DecodeStep(1, 0, layers, True).weights()
        )

    def _inputs(self, case: str, direction: str, most: int) -> tuple[jax.Array, np.ndarray]:
        """x with the most rows that a case has, and the exact output for the first 256."""
        what = Gemm(case, most, direction)
        x = jax.random.normal(jax.random.key(9), (most, what.width()), jnp.bfloat16)
        return x, np.asarray(exact(x[:256], weights_of(case, most)[0], direction == "dx"))

    def measure(self, several: list[Gemm | DecodeStep], most: int) -> list[dict]:
        """Result rows of `several`, which take turns; for steps the mean over the places of their arrays. `most`: rows
        of x of the largest GEMM. Raises SystemExit where one does not compile or is wrong."""
        steps = isinstance(several[0], DecodeStep)
        times, held = [], []
        for place in range(bursts.PLACES if steps else 1):
            programs = [self._prepared(what, most, place) for what in several]
            times.append(microseconds(programs))
            # Held, so that the next arrays and the temporaries of the programs lie elsewhere.
            held += [programs, *(jnp.zeros(1 << size, jnp.uint8) for size in range(16, 27))]
        rows = []
        for what, us in zip(several, zip(*times, strict=True), strict=True):
            places = {"us_at_places": [round(one, 2) for one in us]} if steps else {}
            rows.append({**what.row(), "us": round(statistics.mean(us), 2), **places})
            print(describe(rows[-1], self.rivals), flush=True)
        return rows

    def _prepared(self, what: Gemm | DecodeStep, most: int, place: int) -> tuple:
        """(short, long, args, count) for `microseconds`, run once and checked."""
        both = [self.executables[what, rounds] for rounds in rounds_of(what)]
        for found in both:
            if isinstance(found, str):
                raise SystemExit(f"{what} does not compile: {found}")
        if isinstance(what, DecodeStep):
            x, expected = jax.random.normal(jax.random.key(9), (what.m, what.width()), jnp.bfloat16), None
        else:
            x, expected = self.inputs(what.case, what.direction, most)
        shared = [self.weights(what.layers, place)] if isinstance(what, DecodeStep) and what.has_gemms else []
        args = what.arguments(x[: what.m], *shared)
        short, long = (ahead.load(found, *args) for found in both)
        _, first = long(*args)
        if expected is not None:
            expected = expected[: what.m]
            expected = expected + lora_term(first_x(args[0]), args[1][0]) if what.lora_rank else expected
            refuse_if_wrong(first, expected, str(what))
        return short, long, args, math.prod(what.burst())


def lora_term(x: jax.Array, layer: tuple) -> np.ndarray:
    """`(x A) B` of all adapters side by side, in fp32 but for `x A`, which is rounded to bf16."""
    _, a, lora_b = layer
    ranks = np.cumsum([b.shape[0] for b in lora_b])[:-1]
    lora_x = (np.asarray(x, np.float32) @ np.asarray(a, np.float32)).astype(jnp.bfloat16).astype(np.float32)
    parts = zip(np.split(lora_x, ranks, axis=1), lora_b, strict=True)
    return np.concatenate([t @ np.asarray(b, np.float32) for t, b in parts], axis=1)


def gemms_of(case: str, tokens: list[int], rank: int, batch_invariant: bool) -> list[Gemm]:
    """The GEMMs of one case that are timed."""
    found = [Gemm(case, m) for m in tokens]
    found += [Gemm(case, m, batch_invariant=True) for m in tokens if batch_invariant and m in (8, 64, 4096)]
    found += [Gemm(case, m, lora_rank=rank) for m in tokens if rank and m <= 64]
    return found + [Gemm(case, m, "dx") for m in tokens if m >= 4096]


def rival_rows(anchors: pathlib.Path | None) -> list[dict]:
    """Rows of rivals, marked with the file's name and, of its `meta`, the date and the commit."""
    if anchors is None:
        return []
    found = json.loads(anchors.read_text())
    source = {"source": anchors.name, **{name: found["meta"][name] for name in ("date", "commit")}}
    return [{**row, **source} for row in found["rows"]]


def stored_rows(path: pathlib.Path, commit: str) -> tuple[list[dict], list[str]]:
    """Our stored rows of a commit, and the commands that made them."""
    if commit == "unknown" or not path.exists():
        return [], []
    stored = json.loads(path.read_text())
    rows = [row for row in stored["rows"] if row["impl"] == "qerl" and row.get("commit") == commit]
    return rows, [stored["meta"]["command"]] if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=pathlib.Path, help="a result of time_rivals.py")
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS), help="rows of x")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank timed for up to 64 rows of x; 0 for none")
    parser.add_argument("--layers", type=int, default=28, help="layers of a decode step; 0 for no decode steps")
    parser.add_argument("--batch-invariant", action="store_true", help="also time this mode, at 8, 64 and 4096 rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    add_commit(parser)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/matmul.json"))
    args = parser.parse_args()
    copied = rival_rows(args.anchors)
    about = meta(args.commit)
    rows, commands = stored_rows(args.out, about["commit"])
    about["command"] = "; ".join(dict.fromkeys([*commands, about["command"]]))
    kinds = [(0, False), (0, True), (args.rank, True)] if args.layers and args.rank else []
    few = [m for m in args.tokens if m <= 64]
    steps = [DecodeStep(m, rank, args.layers, has_gemms) for m in few for rank, has_gemms in kinds]
    gemms = [what for case in args.cases for what in gemms_of(case, args.tokens, args.rank, args.batch_invariant)]
    missing = not_in([*steps, *gemms], rows)
    programs = [(what, rounds) for what in missing for rounds in rounds_of(what)]
    bench = Bench(dict(ahead.compile_all(build, programs, args.jobs, ONE_BY_ONE)), rivals_of(copied))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for several in turns(missing):
        try:  # keep the results of the others
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


def turns(programs: list[Gemm | DecodeStep]) -> list[list[Gemm | DecodeStep]]:
    """Programs that are timed together: the steps of the same m; each GEMM by itself."""
    together = itertools.groupby(programs, lambda what: what.m if isinstance(what, DecodeStep) else what)
    return [list(some) for _, some in together]


def not_in(programs: list[Gemm | DecodeStep], rows: list[dict]) -> list[Gemm | DecodeStep]:
    """The programs without a row, in their order: the longest to compile first."""
    known = [{key: value for key, value in row.items() if key not in ("us", "us_at_places", "commit")} for row in rows]
    return [what for what in programs if what.row() not in known]


if __name__ == "__main__":
    main()
