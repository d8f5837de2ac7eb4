"""Times decode attention with the heads of Qwen2.5 and writes tools/results/<device>/attention.json.

    python tools/bench_attention.py [--cases 7b:8x256+256 ...] [--ctas 1 2 4] [--rivals CASE ...] [--out FILE.json]

A case is MODEL:ROWSxPROMPT+OWN[/GROUP][~]: rows that decode together, tokens of a prompt, own tokens of a row, rows
that share a prompt (8 unless said); with ~ the own lengths are spread evenly over 1 to OWN. A figure is the wall time
of one jitted call that runs attention in a loop over many caches (200 MB or more in all, so that the L2 does not help),
each with the result of the one before as its queries, divided by their number: the smallest of five repetitions.
`bytes` counts keys and values once, those of a prompt once for its group. Every result is checked first, against XLA in
fp32.

Implementations: "qerl" (the Mosaic GPU kernel; `ctas` that share a pair, `forced` by --ctas or as it chooses) and, for
the cases named by --rivals, "xla" (the reference).
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from qerl_kernels.decode_attention import cases
from qerl_kernels.decode_attention.api import decode_attention
from record import add_commit, write_rows

ROTATE_BYTES = 200e6
LOOP = 10  # rounds in one call, so that what the host does for each array of a call does not count
CALLS = 40  # at least, in a round, so that the loop's own time does not count: some 30 us a round
MAX_ERROR = 3e-3
COPY_BYTES_PER_S = 4.30e12  # read + write of a device-to-device copy on an H200
CASES = (
    "7b:1x256+256", "7b:8x256+256", "7b:8x256+1024", "7b:8x256+4096", "7b:16x256+1024~", "7b:32x256+256",
    "7b:32x256+1024~", "7b:32x256+4096", "7b:64x256+1024~", "7b:128x256+256", "7b:128x256+1024~", "0.5b:8x256+256",
    "3b:8x256+256", "14b:8x256+256", "14b:32x256+1024~", "72b:32x256+4096",
)  # fmt: skip


def parse(case: str) -> dict:
    """The fields of a row that describe a case."""
    found = re.fullmatch(r"([\w.]+):(\d+)x(\d+)\+(\d+)(?:/(\d+))?(~?)", case)
    if not found or found[1] not in cases.MODELS:
        raise SystemExit(f"{case}: not MODEL:ROWSxPROMPT+OWN[/GROUP][~], MODEL one of {', '.join(cases.MODELS)}")
    model, rows, prompt, own, group, spread = found.groups()
    return {
        "model": model, "batch": int(rows), "group": min(int(group or 8), int(rows)), "prompt_len": int(prompt),
        "own_len": int(own), "lengths": "spread" if spread else "fixed",
        "cache": "bfloat16",
    }  # fmt: skip


def arguments(about: dict) -> tuple[jax.Array, list[tuple], int]:
    """Queries, sets of the remaining arguments (200 MB or more in all), and the bytes that one call must read."""
    rows, prompt, own = about["batch"], about["prompt_len"], about["own_len"]
    heads, _, width = cases.MODELS[about["model"]]
    index = np.arange(rows) // about["group"]
    spread = 1 + np.arange(rows) * own // rows
    lengths = np.random.default_rng(0).permutation(spread) if about["lengths"] == "spread" else np.full(rows, own)
    slots, own_slots = -(-max(prompt, 8) // 8) * 8, -(-own // 8) * 8
    rest = [jnp.asarray(a, jnp.int32) for a in (index, np.full(rows, prompt), lengths)]
    prompts = int(index[-1]) + 1
    needed = cases.cache_bytes(about["model"], prompts * prompt, int(lengths.sum()))
    sets = []
    for i in range(max(2, min(40, math.ceil(ROTATE_BYTES / needed)))):
        cache = cases.random_caches(jax.random.key(i), about["model"], rows, prompts, slots, own_slots)
        sets.append((*cache[:2], *rest[:2], *cache[2:], rest[2]))
    return jax.random.normal(jax.random.key(99), (rows, heads, width), jnp.bfloat16), sets, needed


def microseconds(call, q: jax.Array, sets: list[tuple], repeats: int = 5) -> float:
    """Time of one `call(q, *set)`, from one jitted function that chains all sets."""

    times = math.ceil(CALLS / len(sets))

    @jax.jit
    def every(q, sets):
        chain = lambda _, q: functools.reduce(lambda q, one: call(q, *one), sets * times, q)  # noqa: E731
        return jax.lax.fori_loop(0, LOOP, chain, q)

    jax.block_until_ready([every(q, sets) for _ in range(2)])
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(every(q, sets))
        best = min(best, time.perf_counter() - start)
    return best / LOOP / times / len(sets) * 1e6


def relative_error(y: jax.Array, q: jax.Array, one: tuple) -> float:
    """‖y − reference‖ / ‖reference‖ over at most 16 rows, the reference in fp32."""
    few = lambda a: a[:16].astype(jnp.float32) if a.ndim > 1 else a[:16]  # noqa: E731
    wide = [a.astype(jnp.float32) for a in one[:2]]
    expected = decode_attention(few(q), *wide, *map(few, one[2:]), implementation="xla")
    return float(jnp.linalg.norm(few(y) - expected) / jnp.linalg.norm(expected))


def measure(case: str, forced: list[int], rivals: bool, emit) -> None:
    from qerl_kernels.decode_attention import config, kernel

    about = parse(case)
    q, sets, needed = arguments(about)
    ours = functools.partial(kernel.decode_attention, scale=q.shape[-1] ** -0.5)
    _, kv_heads, width = cases.MODELS[about["model"]]
    chosen = config.ctas_for(about["batch"] * kv_heads)
    runs = [({"impl": "qerl", "ctas": chosen, "forced": False}, ours)]
    for ctas in forced:
        how = config.AttentionConfig(ctas, config.stages_for(width, ctas))
        runs.append(({"impl": "qerl", "ctas": ctas, "forced": True}, functools.partial(ours, config=how)))
    if rivals:
        runs.append(({"impl": "xla"}, functools.partial(decode_attention, implementation="xla")))
    for name, call in runs:
        error = relative_error(jax.jit(call)(q, *sets[0]), q, sets[0])
        if not error <= MAX_ERROR:
            raise SystemExit(f"{case}, {name}: relative error {error:.2e} is above {MAX_ERROR:.1e}")
        emit({**about, **name, "us": round(microseconds(call, q, sets), 2), "bytes": needed})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--ctas", nargs="*", type=int, default=[], help="also time these numbers of CTAs")
    parser.add_argument("--rivals", nargs="*", default=[], metavar="CASE", help="also time XLA on these")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/attention.json"))
    add_commit(parser)
    args = parser.parse_args()

    def emit(row: dict) -> None:
        write_rows(args.out, [row], args.commit)
        rate = row["bytes"] / row["us"] / 1e6
        name = f"{row['model']}:{row['batch']}x{row['prompt_len']}+{row['own_len']}/{row['group']}"
        name += f" {row['lengths']} {row['cache']}"
        impl = f"{row['impl']} {row.get('ctas', '')}{'!' if row.get('forced') else ''}"
        print(f"{name:44s} {impl:20s} {row['us']:9.2f} us  {rate:5.2f} TB/s "
              f"({rate * 1e12 / COPY_BYTES_PER_S:4.0%} of a copy)", flush=True)  # fmt: skip

    for case in args.cases:
        measure(case, args.ctas, case in args.rivals, emit)


if __name__ == "__main__":
    main()
