"""Times plans of the fused decode operations (`qerl_kernels.lora_shrink.plan`) on an H200 and says how good the one is
that `plan.cost` puts first.

    python tools/tune_shrink.py [--cases qkv_7b ...] [--tokens 8 16 ...] [--most 9] [--out FILE.json]

Of each operation the plans that the model puts first are timed: with adapters, with `x A` in parts where that may be,
and without adapters. All are compiled beforehand by processes that do not touch the GPU (`ahead`); a figure is the
median duration of the kernel by the profiler. A comes from the memory, as in a decode step (160 MB pass through the L2
between two calls), the activations from the L2. The constants of `plan.cost` were fitted to such times.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
from typing import NamedTuple

import ahead
import jax
import jax.numpy as jnp
from qerl_kernels.lora_shrink import cases, plan
from record import kernel_medians, meta

CALLS, SKIPPED = 24, 4  # of a plan; the first ones are not counted
SETS = 4  # of arguments, in turn
FLUSH_FLOATS = 40_000_000


class Trial(NamedTuple):
    """A plan of an operation; `rank` 0: without adapters."""

    case: str
    m: int
    rank: int
    in_parts: bool
    how: plan.Plan

    def task(self) -> plan.Task:
        """What is computed."""
        return task_of(self.case, self.m, self.rank, self.in_parts)

    def row(self) -> dict:
        """Of the result, without its time."""
        how = {name: getattr(self.how, name) for name in ("groups", "shares", "parts", "warps", "ahead")}
        return {"case": self.case, "m": self.m, "rank": self.rank, "in_parts": self.in_parts, **how}


def task_of(case: str, m: int, rank: int, in_parts: bool) -> plan.Task:
    """The operation before a projection."""
    kind, features, adapters = cases.SHAPES[case]
    norm = kind == "norm"
    ranks = (rank,) * adapters if rank else ()
    return plan.Task(kind, m, features, ranks, eps=1e-6 if norm else 0.0, residual=norm, in_parts=in_parts)


def wanted(names: list[str], tokens: list[int], rank: int, most: int) -> list[Trial]:
    """The plans to be timed: of each operation those that the model puts first."""
    found = []
    for case in names:
        kind, *_ = cases.SHAPES[case]
        kinds = [(rank, False), *([] if kind == "norm" else [(rank, True)]), *([] if kind == "plain" else [(0, False)])]
        for m in tokens:
            for with_rank, in_parts in kinds:
                task = task_of(case, m, with_rank, in_parts)
                first = sorted(plan.plans(task), key=lambda how, task=task: plan.cost(task, how))[:most]
                found += [Trial(case, m, with_rank, in_parts, how) for how in first]
    return found


def shapes_of(task: plan.Task) -> tuple[list, jax.ShapeDtypeStruct | None]:
    """Inputs and A."""
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    x = bf16(task.tokens, task.features * (2 if task.kind == "silu" else 1))
    inputs = [f32(task.tokens, task.features), x, f32(task.features)] if task.kind == "norm" else [x]
    return inputs, bf16(task.features, task.columns) if task.columns else None


def build(trial: Trial) -> tuple:
    """For `ahead.compile_all`."""
    from qerl_kernels.lora_shrink import mosaic_gpu  # jax ≥ 0.11: imported where it runs

    task = trial.task()
    return functools.partial(mosaic_gpu.fused, task, trial.how), shapes_of(task)


def draw(shapes: tuple, seed: int) -> tuple:
    """Random arrays."""
    return jax.tree.map(lambda s: jax.random.normal(jax.random.key(seed), s.shape).astype(s.dtype), shapes)


def durations(trials: list[Trial], jobs: int) -> list[float]:
    """Microseconds of each. Raises SystemExit where one does not compile."""
    found = dict(ahead.compile_all(build, [(trial,) for trial in trials], jobs))
    refused = [f"{trial}: {found[trial,]}" for trial in trials if isinstance(found[trial,], str)]
    if refused:
        raise SystemExit("\n".join(refused))
    calls = []
    for trial in trials:
        sets = [draw(shapes_of(trial.task()), seed) for seed in range(SETS)]
        calls.append((ahead.load(found[trial,], *sets[0]), sets))
    flush, one = jnp.ones(FLUSH_FLOATS), jnp.ones(())
    sweep = jax.jit(lambda x: x * 1.0000001)
    rewrite = jax.jit(lambda inputs, one: jax.tree.map(lambda x: x * one.astype(x.dtype), inputs))

    def run() -> list:
        for call, sets in calls:
            for i in range(CALLS):
                sweep(flush)
                inputs, a = sets[i % SETS]
                out = call(rewrite(inputs, one), a)
        return out

    jax.block_until_ready((sweep(flush), [rewrite(sets[0][0], one) for _, sets in calls]))
    return kernel_medians(run, lambda name: "lora_" in name, [(SKIPPED, CALLS - SKIPPED)] * len(trials))


def regrets(rows: list[dict]) -> dict[tuple, tuple[float, float | None]]:
    """(case, tokens, rank, in parts) -> the best time of its plans, and that of the plan which decode takes, None where
    it was not timed."""
    found: dict[tuple, tuple[float, float | None]] = {}
    for row in rows:
        key = row["case"], row["m"], row["rank"], row["in_parts"]
        taken = plan.plan_for(task_of(*key))
        best, chosen = found.get(key, (row["us"], None))
        same = all(row[name] == getattr(taken, name) for name in ("groups", "shares", "parts", "warps", "ahead"))
        found[key] = min(best, row["us"]), row["us"] if same else chosen
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.LAYER_7B), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 16, 32, 64, 96, 128])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--most", type=int, default=9, help="plans of an operation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/shrink_plans.json"))
    args = parser.parse_args()
    trials = wanted(args.cases, args.tokens, args.rank, args.most)
    times = durations(trials, args.jobs)
    rows = [{**trial.row(), "us": round(us, 2)} for trial, us in zip(trials, times, strict=True)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.out.write_text(f'{{"meta": {json.dumps(meta(args.commit))},\n"rows": [\n{lines}\n]}}\n')
    for trial, us in zip(trials, times, strict=True):
        print(f"{trial.row()} {us:.2f} us, by the model {plan.cost(trial.task(), trial.how):.2f}")
    for key, (best, taken) in regrets(rows).items():
        print(*key, f"best {best:.2f} us, taken", "not timed" if taken is None else f"{taken:.2f}")


if __name__ == "__main__":
    main()
