"""Times configurations of the decode prologues (`qerl_kernels.decode_prologue.config`) on an H200 and compares the one
that `config.predicted_us` puts first with the best.

    python tools/tune_decode_prologue.py [--cases qkv_7b ...] [--tokens 8 16 ...] [--most 9] [--out FILE.json]

Each prologue is timed in the configurations that the model puts first: with adapters, with `x A` as split-K partials
where the kernel can leave them, and without adapters. A figure is the median duration of the kernel by the profiler. A
comes from HBM, as in a decode step (160 MB pass through the L2 between two calls), the activations from the L2. The
constants of `config.predicted_us` were fitted to such times.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
from qerl_kernels.decode_prologue import cases, config
from qerl_kernels.kernel_times import kernel_medians, profiled
from record import add_commit, meta

CALLS, SKIPPED = 24, 4  # calls of a configuration; the first ones are not counted
FIELDS = ("cluster", "token_tiles", "column_splits", "k_splits", "warps", "prefetch")
SETS = 4  # sets of arguments, in turn
FLUSH_FLOATS = 40_000_000


class Trial(NamedTuple):
    """A configuration of a prologue; `rank` 0: without adapters."""

    case: str
    m: int
    rank: int
    partials: bool
    config: config.PrologueConfig

    def spec(self) -> config.PrologueSpec:
        """The problem that is solved."""
        return spec_of(self.case, self.m, self.rank, self.partials)

    def row(self) -> dict:
        """The row of the result, without its time."""
        fields = {name: getattr(self.config, name) for name in FIELDS}
        return {"case": self.case, "m": self.m, "rank": self.rank, "partials": self.partials, **fields}


def spec_of(case: str, m: int, rank: int, partials: bool) -> config.PrologueSpec:
    """The prologue of a projection."""
    kind, features, adapters = cases.SHAPES[case]
    norm = kind == "norm"
    ranks = (rank,) * adapters if rank else ()
    return config.PrologueSpec(kind, m, features, ranks, eps=1e-6 if norm else 0.0, residual=norm, partials=partials)


def wanted(names: list[str], tokens: list[int], rank: int, most: int, clusters: list[int] | None) -> list[Trial]:
    """The configurations to be timed: for each prologue, those that the model puts first."""
    found = []
    for case in names:
        kind, *_ = cases.SHAPES[case]
        kinds = [(rank, False), *([] if kind == "norm" else [(rank, True)]), *([] if kind == "plain" else [(0, False)])]
        for m in tokens:
            for with_rank, partials in kinds:
                spec = spec_of(case, m, with_rank, partials)
                for cluster in clusters or [None]:
                    every = config.candidate_configs(spec, cluster=cluster)
                    every = sorted(every, key=functools.partial(config.predicted_us, spec))
                    found += [Trial(case, m, with_rank, partials, each) for each in every[:most]]
    return found


def shapes_of(spec: config.PrologueSpec) -> tuple[list, jax.ShapeDtypeStruct | None]:
    """Inputs and A."""
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    x = bf16(spec.tokens, spec.features * (2 if spec.kind == "silu" else 1))
    inputs = [f32(spec.tokens, spec.features), x, f32(spec.features)] if spec.kind == "norm" else [x]
    return inputs, bf16(spec.features, spec.columns) if spec.columns else None


def compiled(trial: Trial) -> Callable:
    """The kernel, compiled for the default device."""
    from qerl_kernels.decode_prologue import kernel  # jax ≥ 0.11: imported where it runs

    spec = trial.spec()
    return jax.jit(functools.partial(kernel.fused_prologue, spec, trial.config)).lower(*shapes_of(spec)).compile()


def draw(shapes: tuple, seed: int) -> tuple:
    """Random arrays."""
    return jax.tree.map(lambda s: jax.random.normal(jax.random.key(seed), s.shape).astype(s.dtype), shapes)


def durations(trials: list[Trial]) -> list[float]:
    """Microseconds of each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(compiled, trials))
    sets_of = [[draw(shapes_of(trial.spec()), seed) for seed in range(SETS)] for trial in trials]
    calls = list(zip(programs, sets_of, strict=True))
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
    counts = [(SKIPPED, CALLS - SKIPPED)] * len(trials)
    return kernel_medians(profiled(run), lambda name: "decode_prologue" in name, counts)


def regrets(rows: list[dict]) -> dict[tuple, tuple[float, float | None]]:
    """(case, tokens, rank, partials) -> the best time of all configurations, and the time of the one that decode takes,
    None where it was not timed."""
    found: dict[tuple, tuple[float, float | None]] = {}
    for row in rows:
        key = row["case"], row["m"], row["rank"], row["partials"]
        taken = config.best_config(spec_of(*key))
        best, chosen = found.get(key, (row["us"], None))
        same = all(row[name] == getattr(taken, name) for name in FIELDS)
        found[key] = min(best, row["us"]), row["us"] if same else chosen
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(cases.LAYER_7B), choices=list(cases.SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 16, 32, 64, 96, 128])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--most", type=int, default=9, help="configurations of a prologue")
    parser.add_argument("--clusters", nargs="*", type=int, help="CTAs of a cluster; without: those that decode takes")
    add_commit(parser)
    default = pathlib.Path("tools/results/nvidia-h200/decode_prologue_configs.json")
    parser.add_argument("--out", type=pathlib.Path, default=default)
    args = parser.parse_args()
    trials = wanted(args.cases, args.tokens, args.rank, args.most, args.clusters)
    times = durations(trials)
    rows = [{**trial.row(), "us": round(us, 2)} for trial, us in zip(trials, times, strict=True)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.out.write_text(f'{{"meta": {json.dumps(meta(args.commit))},\n"rows": [\n{lines}\n]}}\n')
    for trial, us in zip(trials, times, strict=True):
        print(f"{trial.row()} {us:.2f} us, by the model {config.predicted_us(trial.spec(), trial.config):.2f}")
    for key, (best, taken) in regrets(rows).items():
        print(*key, f"best {best:.2f} us, taken", "not timed" if taken is None else f"{taken:.2f}")


if __name__ == "__main__":
    main()
