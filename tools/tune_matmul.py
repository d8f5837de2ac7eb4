"""Finds the config of each GEMM by trying many, and stores the table that `qerl_kernels.nvfp4_matmul.tuning` reads.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward dx] [--write]

Of all configs that fit an SM, those that a rough model of the kernel (`matmul_model`) puts first are compiled by
processes that do not touch the GPU (`ahead`), then checked (relative error) and timed one after the other; the table's
present config is always among them. For m up to 32 so are as many configs of the skinny kernel, by a model of their
own, and as many that compute `x A` themselves, where the model sees a gain in that. Forward GEMMs carry adapters, as
they do in rollouts and training. Where configs differ in their LoRA input, the decode prologue is timed too, and
counted (`matmul_trials`). A time is the median duration of the kernel itself by the profiler, over weights that outgrow
the L2: some 0.8 µs less than in a loop. Run it under a time limit: a kernel with a wrong barrier does not return.
`--write` replaces the rows of the GEMMs that were tried and leaves the others; with `--untimed` it stores the model's
choice, for GEMMs that nobody has timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence

import ahead
import jax
import jax.numpy as jnp
from bench_matmul import exact, refuse_if_wrong
from matmul_model import RANK, candidates, model, skinny_candidates, worth_trying
from matmul_trials import Prologue, Trial, activations, build, counted_prologue, layers_of, lora_x_of, prologues
from qerl_kernels.nvfp4_matmul import cases, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.lora_input import split_lora_x
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.ops import fp32_matmul
from record import add_commit, meta
from timing import kernel_medians

TABLE = pathlib.Path(tuning.__file__).parent / tuning.TABLE
TOKENS = (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)
FEW_CALLS = 24  # timed calls where m is below 1024
OURS = re.compile("nvfp4|decode_prologue")  # names of the kernels that are timed


def present(m: int, n: int, k: int, transposed: bool, widths: tuple[int, ...]) -> GemmConfig | SkinnyConfig:
    """The table's choice, with as many stages as it has without adapters."""
    adapted = tuning.config_for(m, n, k, transposed=transposed, adapters=[(RANK, width) for width in widths])
    return adapted if isinstance(adapted, SkinnyConfig) else tuning.config_for(m, n, k, transposed=transposed)


def trials(case: str, tokens: list[int], directions: list[str], most: int, lookahead: list[bool]) -> list[Trial]:
    """All trials of one shape, the table's present choice first."""
    n, k = cases.SHAPES[case]
    found = []
    for m, direction in itertools.product(tokens, directions):
        transposed = direction == "dx"
        if transposed and m < 1024:
            continue
        shape = (k, n) if transposed else (n, k)
        widths = () if transposed else cases.parts(case)
        wanted = [
            present(m, n, k, transposed, widths),
            *candidates(m, *shape, transposed, most, widths, lookahead),
        ]
        wanted += [] if transposed else worth_trying(m, n, k, most, widths)
        found += [Trial(case, m, direction, config) for config in dict.fromkeys(wanted)]
    return found


def tune_case(group: list[Trial], executables: dict) -> list[dict]:
    """Rows of the table for the trials of one shape and direction; prints all measurements."""
    case, direction = group[0].case, group[0].direction
    x = activations(case, direction, max(trial.m for trial in group))
    layers = {large: layers_of(case, 1024 if large else 1) for large in {trial.m >= 1024 for trial in group}}
    weight, _, lora_b = next(iter(layers.values()))[0]
    lora_x = lora_x_of(x, next(iter(layers.values()))[0], direction)
    expected = exact(x[:256], weight, direction == "dx")
    if direction == "forward":
        of_each = split_lora_x(lora_x[:256], [b.shape[0] for b in lora_b])
        expected += jnp.concatenate([fp32_matmul(t, b) for t, b in zip(of_each, lora_b, strict=True)], axis=1)
    calls, results = [], {}
    for trial in group:
        found, some = executables[(trial,)], layers[trial.m >= 1024]
        if isinstance(found, str):
            results[trial] = found
            continue
        inputs = x[: trial.m], None if lora_x is None else lora_x[: trial.m]
        call = functools.partial(ahead.load(found, *inputs, some[0]), *inputs)
        try:  # keep the rest of the sweep
            refuse_if_wrong(call(some[0]), expected[: trial.m], str(trial))
        except (SystemExit, jax.errors.JaxRuntimeError) as error:
            results[trial] = f"WRONG: {str(error)[:200]}"
            continue
        calls.append((trial, call, some))
    for prologue in prologues(group):
        found = executables[(prologue,)]
        if isinstance(found, str):
            raise SystemExit(f"{prologue} does not compile: {found}")
        sets = [prologue.inputs(seed) for seed in range(FEW_CALLS)]
        calls.append((prologue, ahead.load(found, sets[0]), sets))
    times = durations(calls)
    return best_of(group, {trial: times.get(trial, results.get(trial)) for trial in group}, times)


def best_of(group: list[Trial], results: dict[Trial, float | str], times: dict) -> list[dict]:
    """The row of each m; prints all results. `times`: those of `prologues` among them."""
    for prologue in prologues(group):
        made = {"whole": "with x A", "partials": "with partials of x A", "a": "without x A"}[prologue.form]
        about = f"{prologue.case} m {prologue.m} prologue: {prologue.kind} {made}"
        print(f"{about} {times[prologue]:.2f} us", flush=True)
    case, direction, rows = group[0].case, group[0].direction, []
    n_k = cases.SHAPES[case]
    for m in dict.fromkeys(trial.m for trial in group):
        of_m = [trial for trial in group if trial.m == m]
        prologue = {trial: counted_prologue(trial, times) for trial in of_m}
        whole = {t: results[t] if isinstance(results[t], str) else results[t] + (prologue[t] or 0.0) for t in of_m}
        for trial in sorted(of_m, key=lambda trial: (isinstance(whole[trial], str), whole[trial])):
            us, kind = results[trial], type(trial.config).__name__
            expects = model(trial.config, m, *(n_k if direction == "forward" else n_k[::-1]))
            measured = us if isinstance(us, str) else f"{us:.2f} us"
            about = f"(model {expects:.1f}){' present' * (trial == of_m[0])}"
            about = about if prologue[trial] is None else f"+ {prologue[trial]:.2f} prologue {about}"
            print(f"{case} {direction} m {m} {kind} {dataclasses.astuple(trial.config)} {measured} {about}", flush=True)
        timed = [trial for trial in of_m if not isinstance(results[trial], str)]
        if timed:
            best = min(timed, key=whole.__getitem__)
            counted = None if prologue[best] is None else round(prologue[best], 2)
            rows.append(tuning.to_json(tuning.Row(direction, *n_k, m, best.config, round(results[best], 2), counted)))
    return rows


def durations(calls: Sequence[tuple[Trial | Prologue, Callable, list]]) -> dict[Trial | Prologue, float]:
    """Median microseconds of each call's kernel, called with all weights in turn. Calls that heat the GPU have warm-up
    calls, so that they are timed at the clock that its power allows."""
    counts = [(0, FEW_CALLS) if trial.m < 1024 else (8, 6) for trial, _, _ in calls]

    def run() -> None:
        for (_, call, layers), count in zip(calls, counts, strict=True):
            for i in range(sum(count)):
                y = call(layers[i % len(layers)])
            jax.block_until_ready(y)

    times = kernel_medians(run, lambda name: OURS.search(name) is not None, counts)
    return {trial: us for (trial, _, _), us in zip(calls, times, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.TIMED), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS), help="rows of x")
    parser.add_argument("--direction", nargs="*", choices=["forward", "dx"], default=["forward", "dx"])
    parser.add_argument("--most", type=int, default=16, help="configs tried for each GEMM")
    parser.add_argument(
        "--lookahead", nargs="*", type=int, default=[0, 1], choices=[0, 1], help="whether the configs tried have it"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--untimed", action="store_true", help="no GPU: take the first choice of the model")
    add_commit(parser)
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=TABLE, help="store the rows found")
    args = parser.parse_args()
    args.lookahead = [bool(has) for has in args.lookahead]
    stored = json.loads(TABLE.read_text())
    best = []
    if args.untimed:
        for case in args.cases:
            keep(stored, best, guesses(case, args.tokens, args.direction, args.lookahead), over_timed=False)
        for row in best:
            print(*row.values())
        if args.write:
            args.write.write_text(in_lines(stored))
        return
    stored["meta"] = meta(args.commit) | {"note": stored["meta"].get("note", "")}
    groups = [
        trials(case, args.tokens, [direction], args.most, args.lookahead)
        for case, direction in itertools.product(args.cases, args.direction)
    ]
    wanted = [trial for group in groups for trial in (*group, *prologues(group))]
    executables = dict(ahead.compile_all(build, [(trial,) for trial in wanted], args.jobs))
    for group in filter(None, groups):
        keep(stored, best, tune_case(group, executables))
        if args.write:
            args.write.write_text(in_lines(stored))
    for row in sorted(best, key=lambda row: (row["direction"], row["m"], row["n"], row["k"])):
        config = tuple(row["config"].values())
        print(f"best {row['direction']} n {row['n']} k {row['k']} m {row['m']} {config} {row['us']} us", flush=True)


def guesses(case: str, tokens: list[int], directions: list[str], lookahead: list[bool]) -> list[dict]:
    """Rows of the table for one shape by the model's choice, without a time."""
    n, k = cases.SHAPES[case]
    rows = []
    for m, direction in itertools.product(tokens, directions):
        transposed = direction == "dx"
        if transposed and m < 1024:
            continue
        widths = () if transposed else cases.parts(case)
        shape = (k, n) if transposed else (n, k)
        firsts = candidates(m, *shape, transposed, 1, widths, lookahead)
        firsts += [] if transposed else skinny_candidates(m, n, k, 1)
        best = min(firsts, key=lambda config: model(config, m, *shape))
        rows.append(tuning.to_json(tuning.Row(direction, n, k, m, best, None)))
    return rows


def keep(stored: dict, best: list[dict], rows: list[dict], over_timed: bool = True) -> None:
    """Puts rows into the table in place of those of the same GEMMs; a timed one stays unless `over_timed`."""
    for row in rows:
        key = [row[name] for name in ("direction", "n", "k", "m")]
        same = [r for r in stored["rows"] if [r[name] for name in ("direction", "n", "k", "m")] == key]
        if over_timed or not any(r["us"] is not None for r in same):
            stored["rows"] = [*(r for r in stored["rows"] if r not in same), row]
            best.append(row)


def in_lines(stored: dict) -> str:
    """JSON with one row a line."""
    rows = ",\n".join(
        json.dumps(row) for row in sorted(stored["rows"], key=lambda r: (r["direction"], r["n"], r["k"], r["m"]))
    )
    return '{\n"meta": ' + json.dumps(stored["meta"]) + ',\n"rows": [\n' + rows + "\n]\n}\n"


if __name__ == "__main__":
    main()
