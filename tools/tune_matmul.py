"""Finds the config of each GEMM by trying many, and stores the table that `qerl_kernels.nvfp4_matmul.tuning` reads.

    python tools/tune_matmul.py [--cases gate_up_7b ...] [--tokens 8 16 ...] [--direction forward dx] [--write]

Of all configs that fit an SM, those that a rough model of the kernel (`matmul_model`) puts first are compiled by
processes that do not touch the GPU (`ahead`), then checked (relative error) and timed one after the other; the table's
present config is always among them. For m up to 32 so are as many configs of the skinny kernel, by a model of their
own, and as many that compute `x A` themselves, where the model sees a gain in that. Forward GEMMs carry adapters, as
they do in rollouts and training. Where configs differ in their LoRA input (`lora_form`), the decode prologue is timed
too, and counted (`Prologue`). A time is the median duration of the kernel itself as the profiler has it, over weights
that outgrow the L2: some 0.8 µs less than in a loop. Run it under a time limit: a kernel with a wrong barrier does not
return. `--write` replaces the rows of the GEMMs that were tried and leaves the others; with `--untimed` it stores the
model's choice, for GEMMs that nobody has timed.
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
from matmul_programs import Gemm, adapters, weights_of
from qerl_kernels.decode_prologue import config as prologue_config
from qerl_kernels.decode_prologue import reference
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul import cases, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm, split_lora_x
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul
from qerl_kernels.ops import fp32_matmul
from record import kernel_medians, meta

TABLE = pathlib.Path(tuning.__file__).parent / tuning.TABLE
TOKENS = (8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)
FEW_CALLS = 24  # timed calls where m is below 1024
OURS = re.compile("nvfp4|decode_prologue")  # names of the kernels that are timed
LAUNCH_US = 0.8  # what a kernel takes in a loop over its duration by the profiler (tools/results/notes/measuring.md)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A config tried for a GEMM."""

    case: str
    m: int
    direction: str
    config: GemmConfig | SkinnyConfig

    def call(self, x: jax.Array, lora_x: jax.Array, layer: tuple) -> jax.Array:
        """The GEMM. `layer`: the weight, A of its adapters side by side and B of each."""
        weight, a, lora_b = layer
        if self.direction == "dx":
            return gemm_dx(x, weight, self.config)
        form = lora_form(self.case, self.m, self.config)
        if form == "a":
            return skinny_matmul(x, weight, self.config, lora_a=a, lora_b=lora_b)
        if form == "partials":  # as many as there are in decode, all but one of them zeros
            whole = jnp.concatenate(split_lora_x(lora_x, [RANK] * len(lora_b)), axis=1)
            more = partials_of(self.case, self.m) - 1
            lora_x = jnp.pad(whole[None].astype(jnp.float32), ((0, more), (0, 0), (0, 0)))
        if isinstance(self.config, SkinnyConfig):
            return skinny_matmul(x, weight, self.config, lora_x=lora_x, lora_b=lora_b)
        config = tuning.fit_lora(self.config, weight.shape[0], [b.shape for b in lora_b])
        return gemm(x, weight, config, lora_x=lora_x, lora_b=lora_b)


def prologue_kind(case: str) -> str:
    """Kind of a projection's decode prologue."""
    return {"qkv": "norm", "gate": "norm", "down": "silu", "o": "plain"}[case.split("_")[0]]


def lora_form(case: str, m: int, config: GemmConfig | SkinnyConfig) -> str:
    """LoRA input of this GEMM in decode: "whole", "partials" or "a" (the GEMM computes `x A`)."""
    n, _ = cases.SHAPES[case]
    adapters = [(RANK, width) for width in cases.parts(case)]
    if isinstance(config, GemmConfig):
        takes_partials = tuning.fit_lora(config, n, adapters).takes_partials(m, adapters)
    elif config.computes_lora_x:
        return "a"
    else:
        takes_partials = True
    return "partials" if takes_partials and prologue_kind(case) != "norm" else "whole"


def partials_of(case: str, m: int) -> int:
    """Number of split-K partials that the decode prologue leaves."""
    ranks = (RANK,) * len(cases.parts(case))
    spec = prologue_config.PrologueSpec(prologue_kind(case), m, cases.SHAPES[case][1], ranks, partials=True)
    return prologue_config.best_config(spec).k_splits


@dataclasses.dataclass(frozen=True)
class Prologue:
    """The decode prologue of a GEMM: a norm, SiLU, or `x A` alone, with the LoRA input that it gives (`lora_form`)."""

    case: str
    m: int
    form: str

    @property
    def kind(self) -> str:
        """norm, silu or plain."""
        return prologue_kind(self.case)

    def inputs(self, seed: int) -> tuple:
        """(inputs of the operation, A); another set for each of the calls, so that none of it is in the L2."""
        _, k = cases.SHAPES[self.case]
        key = jax.random.key(seed)
        width = 2 * k if self.kind == "silu" else k
        x = jax.random.normal(key, (self.m, width), jnp.float32 if self.kind == "norm" else jnp.bfloat16)
        rest = (x.astype(jnp.bfloat16), jnp.ones(k)) if self.kind == "norm" else ()
        return (x, *rest), None if self.form == "a" else adapters(self.case, RANK, seed)[0]

    def call(self, layer: tuple) -> tuple:
        """The operation. `layer`: from `inputs`."""
        inputs, a = layer
        ranks = () if a is None else (RANK,) * len(cases.parts(self.case))
        if self.kind == "norm":
            return rms_norm_prologue(*inputs, 1e-6, a, ranks, dtype=jnp.bfloat16, implementation="mosaic_gpu")
        form = LoraForm.PARTIALS if self.form == "partials" else LoraForm.WHOLE
        more = {"lora_form": form, "implementation": "mosaic_gpu"}
        if self.kind == "silu":
            return silu_mul_prologue(*inputs, a, ranks, **more)
        return lora_prologue(*inputs, a, ranks, **more)


def prologues(group: Sequence[Trial]) -> list[Prologue]:
    """The prologues of some trials, where they are not the same for all of them."""
    found = []
    for m in dict.fromkeys(trial.m for trial in group):
        forms = dict.fromkeys(lora_form(trial.case, m, trial.config) for trial in group if trial.m == m)
        found += [Prologue(group[0].case, m, form) for form in forms] if len(forms) > 1 else []
    return [prologue for prologue in found if (prologue.kind, prologue.form) != ("plain", "a")]


def counted_prologue(trial: Trial, times: dict) -> float | None:
    """Microseconds of this GEMM's prologue, from those of each `Prologue`; None where it is the same for all. A launch
    that one of them does without is counted for the others."""
    if not any(isinstance(key, Prologue) and key.m == trial.m for key in times):
        return None
    prologue = Prologue(trial.case, trial.m, lora_form(trial.case, trial.m, trial.config))
    if prologue.kind != "plain":
        return times[prologue]
    return 0.0 if prologue.form == "a" else times[prologue] + LAUNCH_US


def layers_of(case: str, m: int) -> list[tuple]:
    """Weights as `weights_of` has them, each with A of its adapters side by side and B of each."""
    return [(weight, *adapters(case, RANK, i)) for i, weight in enumerate(weights_of(case, m))]


def activations(case: str, direction: str, m: int) -> jax.Array:
    """x (or dy)."""
    return jax.random.normal(jax.random.key(0), (m, Gemm(case, m, direction).width()), jnp.bfloat16)


# Autotuning would take longer than all else here.
@functools.partial(jax.jit, static_argnums=2, compiler_options={"xla_gpu_autotune_level": 0})
def _lora_x(x: jax.Array, a: jax.Array, adapters: int) -> jax.Array:
    """`x A` of the adapters as the kernels take it: zeros past the rank."""
    return reference.lora_x(x, a, (RANK,) * adapters)


def lora_x_of(x: jax.Array, layer: tuple, direction: str) -> jax.Array | None:
    """`x A` of a layer's adapters; None for dx, which has none."""
    return None if direction == "dx" else _lora_x(x, layer[1], len(layer[2]))


def build(trial: Trial | Prologue) -> tuple:
    """For `ahead.compile_all`."""
    if isinstance(trial, Prologue):
        return trial.call, (jax.eval_shape(lambda: trial.inputs(0)),)
    x = jax.eval_shape(lambda: activations(trial.case, trial.direction, trial.m))
    layer = jax.eval_shape(lambda: layers_of(trial.case, trial.m)[0])
    lora_x = jax.ShapeDtypeStruct((trial.m, MAX_RANK * len(layer[2])), x.dtype)
    return trial.call, (x, None if trial.direction == "dx" else lora_x, layer)


def present(m: int, n: int, k: int, transposed: bool, widths: tuple[int, ...]) -> GemmConfig | SkinnyConfig:
    """The table's choice, with as many stages as it has without adapters."""
    adapted = tuning.config_for(m, n, k, transposed=transposed, adapters=[(RANK, width) for width in widths])
    return adapted if isinstance(adapted, SkinnyConfig) else tuning.config_for(m, n, k, transposed=transposed)


def trials(case: str, tokens: list[int], directions: list[str], most: int, lookahead: list[int]) -> list[Trial]:
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
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--direction", nargs="*", choices=["forward", "dx"], default=["forward", "dx"])
    parser.add_argument("--most", type=int, default=16, help="configs tried for each GEMM")
    parser.add_argument(
        "--lookahead", nargs="*", type=int, default=[0, 1, 2], choices=[0, 1, 2], help="of the configs tried"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--untimed", action="store_true", help="no GPU: take the first choice of the model")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--write", type=pathlib.Path, nargs="?", const=TABLE, help="store the rows found")
    args = parser.parse_args()
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


def guesses(case: str, tokens: list[int], directions: list[str], lookahead: list[int]) -> list[dict]:
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
