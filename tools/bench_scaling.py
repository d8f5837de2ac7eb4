"""Scaling of a step over the GPUs of one machine: rollout, gather, update and all-reduce, on 1 and on N of them.

    python tools/bench_scaling.py 7B --out DIR [--devices 1 2 4] [--weak 128] [--strong 128 1024]
        [--lengths fixed|gsm8k] [--limit 900]

Random weights of the published shapes, lengths and prompts as in bench_step.py. Weak scaling: so many completions for
each GPU, of the same lengths on each; strong scaling: in all. With one GPU both are the same. Each number of GPUs runs
in processes of its own, for at most `--limit` seconds; each case is written to scaling.json in `--out` as soon as it is
measured: one that fails or hangs loses only itself. scaling.png draws them.

Seconds are medians over `--repeats` steps after one of warm-up, each of the slowest process: rollout, update with its
all-reduces, whole step; `each` has those of the single steps. `gather_seconds` is that of the last process, which waits
for nobody; `all_reduce_seconds` is what a sum of the adapters' gradients, of `all_reduce_arrays` arrays and
`all_reduce_bytes`, adds to the end of the backward pass: from a replica's vector to the sum, where the host is ahead of
devices that work equally long. Each awaited alone: to `join` the arrays to a vector, the `collective`, the optimizer's
step from the vector (`optimizer`) and from the arrays, as on one GPU (`optimizer_alone`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from bench_step import draw
from make_checkpoint import SIZES
from random_policy import random_policy
from record import add_commit, write_rows
from timing import compile_calls

from qerl_jax import (
    Config,
    LoraConfig,
    Policy,
    Prompts,
    generate,
    group_advantages,
    init_state,
    keys,
    launch,
    make_batch,
)
from qerl_jax.compilation import committed, use_compilation_cache
from qerl_jax.parallel import Replicas
from qerl_jax.rl.experience import Experience, gather_experience
from qerl_jax.rl.metrics import empty_sums
from qerl_jax.rl.optimizer import apply_gradients, parts_of, zeros_like
from qerl_jax.rl.plan import make_update_plan
from qerl_jax.rl.reduction import check_same_state, flat_parts, in_one_vector
from qerl_jax.rl.state import trained_trees
from qerl_jax.rl.step import grpo_step, layers_of
from qerl_jax.rollout.shares import generate_share
from qerl_jax.run.devices import device_bytes, use_device_memory
from qerl_jax.run.hooks import Hooks
from qerl_jax.run.prepare import smallest
from qerl_jax.run.rehearsal import rehearse_step

FILE = "scaling.json"
PHASES = ("rollout", "gather", "update", "step")
RATIOS = ("rollout", "update", "step")  # that are compared with one device
SHAPE = ("model", "format", "group", "prompt_len", "completion_len", "lengths", "lora_rank")  # of a case
PARTS = ("join_seconds", "collective_seconds", "optimizer_seconds", "optimizer_alone_seconds")


def main() -> None:
    """Command line."""
    args = parse(sys.argv[1:])
    if args.process is not None:
        given = launch.Devices(
            devices=str(args.process),
            coordinator=args.coordinator,
            process_id=args.process_id,
            num_processes=args.num_processes,
        )
        use_device_memory()
        use_compilation_cache(None)
        program, sys.argv = sys.argv, sys.argv[: sys.argv.index("--process")]  # rows keep the command that was given
        sys.exit(launch.run(given, program, lambda replicas: measure_all(args, replicas)))
    codes = [within(args.limit, [*sys.argv, "--process", str(count)]) for count in args.devices]
    if (args.out / FILE).exists():
        found = compared(json.loads((args.out / FILE).read_text())["rows"])
        show(found)
        draw_curves(found, args.out)
    sys.exit(next((code for code in codes if code), 0))


def parse(words: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--format", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--weak", type=int, nargs="*", default=[128], help="completions of a step for each GPU")
    parser.add_argument("--strong", type=int, nargs="*", default=[128], help="completions of a step in all")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--completion-len", type=int, default=1024)
    parser.add_argument("--lengths", choices=("fixed", "gsm8k"), default="fixed")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900, help="seconds for each number of devices")
    parser.add_argument("--out", type=Path, required=True)
    add_commit(parser)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # with those of `launch`: of the processes
    for flag, kind in (("--coordinator", str), ("--process-id", int), ("--num-processes", int)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def within(seconds: float, program: list[str]) -> int:
    """Exit code of `python PROGRAM`; 124 where it was stopped after so many seconds."""
    with subprocess.Popen([sys.executable, *program]) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"stopped after {seconds:.0f} s: {' '.join(program)}", file=sys.stderr, flush=True)
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            return 124


def measure_all(args: argparse.Namespace, replicas: Replicas) -> int:
    """Each kind of scaling on these replicas; the first writes each row."""
    with replicas:
        policy = committed(random_policy(args.size, args.format, LoraConfig(rank=args.lora_rank), "mosaic_gpu"))
        cases = [("weak", batch) for batch in args.weak] + [("strong", batch) for batch in args.strong]
        if replicas.count == 1:
            cases = [("one", batch) for batch in sorted({*args.weak, *args.strong})]
        for kind, batch in cases:
            row = measure(args, policy, replicas, kind, batch, compile_calls)
            if replicas.is_first:
                write_rows(args.out / FILE, [row], args.commit)
                print(json.dumps(row), flush=True)
    return 0


def measure(
    args: argparse.Namespace,
    policy: Policy,
    replicas: Replicas,
    kind: str,
    drawn: int,
    ahead: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """A row: seconds of the phases of a step of `drawn` completions, or for "weak" as many for each replica. `ahead`
    compiles programs side by side before; None: each is compiled at its first call.
    """
    copies = replicas.count if kind == "weak" else 1  # of what was drawn, one for each replica
    batch = drawn * copies
    config = Config(
        batch_size=batch,
        num_generations=args.group,
        max_prompt_length=args.prompt_len,
        max_completion_length=args.completion_len,
        lora_rank=args.lora_rank,
        max_steps=200,
        dtype=policy.dtype.name,
    )
    rng = np.random.default_rng(0)
    prompts, limits = draw(args, drawn, policy.config.vocab_size, rng)
    tokens, sizes = (np.repeat(array, copies, axis=0) for array in (prompts.tokens, prompts.lengths))
    prompts = Prompts(tokens, sizes, np.arange(len(sizes), dtype=np.int32))
    limits = np.repeat(limits.reshape(-1, args.group), copies, axis=0).ravel()
    rewards = rng.random(batch).astype(np.float32)
    groups = np.arange(batch).reshape(-1, args.group)[replicas.share(config.num_prompts)]
    own, pad = groups.ravel(), policy.config.pad_token_id
    state = init_state(policy, config)
    longest = args.prompt_len + args.completion_len
    plan = make_update_plan(
        state, policy.frozen, smallest(replicas.gather(device_bytes())), longest, replicas=replicas.count
    )

    def step(i: int) -> list[float]:
        key = keys.for_step(0, keys.Purpose.SAMPLE, i)
        replicas.agree()
        times = [time.perf_counter()]
        rollout = generate_share(
            replicas,
            prompts,
            lambda part: generate(policy, part, config.sampling, key, config.engine, limits[own].tolist()),
        )
        jax.block_until_ready(rollout)
        times.append(time.perf_counter())
        mine = rollout and Experience(list(range(config.num_prompts)), rollout, [""] * len(own), rewards[own], {}, 0, 0)
        whole = gather_experience(replicas, mine, range(config.num_prompts), pad) if replicas.count > 1 else mine
        data = make_batch(whole.rollout, group_advantages(jnp.asarray(whole.rewards), args.group))
        jax.block_until_ready(data)
        times.append(time.perf_counter())
        after, _ = grpo_step(state, policy.frozen, data, plan, replicas=replicas)
        jax.block_until_ready(after)
        check_same_state(replicas, after)
        times.append(time.perf_counter())
        return [*np.diff(times), times[-1] - times[0]]

    trained = [trained_trees(**layer, config=config) for layer in layers_of(state.lora, state.norms)]
    sums = empty_sums(["loss", "tokens", "trained_tokens"])

    def all_reduce(_: int) -> dict[str, float]:
        """Seconds of a sum of gradients, and of its parts."""
        parts = parts_of([zeros_like(each) for each in trained])
        times = {}

        def timed(name: str, function: Callable[[], Any]) -> Any:
            replicas.agree()
            began = time.perf_counter()
            result = jax.block_until_ready(function())
            times[name] = time.perf_counter() - began
            return result

        jax.block_until_ready(parts)
        vector = timed("join", lambda: in_one_vector(replicas, parts, sums))
        timed("collective", lambda: replicas.link.all_reduce(vector))
        as_long(replicas.sum(vector))  # all devices begin it together
        vector = in_one_vector(replicas, parts, sums)
        whole = replicas.sum(vector)
        jax.block_until_ready(vector)
        began = time.perf_counter()
        summed = flat_parts(parts, jax.block_until_ready(whole))
        times["all_reduce"] = time.perf_counter() - began
        timed("optimizer", lambda: apply_gradients(state, summed, sums))
        timed("optimizer_alone", lambda: apply_gradients(state, parts, sums))
        return times

    def sum_of_gradients() -> dict[str, Any]:
        """A row's columns."""
        each = replicas.gather([all_reduce(i) for i in range(args.repeats + 1)][1:])  # [replica][repeat]
        slowest = {
            name: [max(times[name] for times in some) for some in zip(*each, strict=True)] for name in each[0][0]
        }
        arrays = jax.tree.leaves(trained)
        return {
            **{f"{name}_seconds": statistics.median(times) for name, times in slowest.items()},
            "all_reduce_arrays": len(arrays),
            "all_reduce_bytes": sum(leaf.nbytes for leaf in arrays),
        }

    began = time.perf_counter()
    if ahead is not None:
        ahead(rehearse_step, config, Hooks(), policy, state, plan, replicas)
    step(0)
    first = time.perf_counter() - began
    steps = replicas.gather([step(i + 1) for i in range(args.repeats)])  # [replica][repeat][phase]
    slowest, fastest = np.max(steps, axis=0), np.min(steps, axis=0)
    seconds = {f"{name}_seconds": float(np.median(slowest[:, i])) for i, name in enumerate(PHASES)}
    seconds["gather_seconds"] = float(np.median(fastest[:, PHASES.index("gather")]))
    return {
        "model": args.size.lower(),
        "format": args.format,
        "kind": kind,
        "devices": replicas.count,
        "batch": batch,
        **{name: getattr(args, name) for name in SHAPE[2:]},
        "tokens_per_micro_batch": plan.pack.tokens,
        "each": {name: slowest[:, PHASES.index(name)].tolist() for name in RATIOS},
        "seconds": seconds["step_seconds"],
        **seconds,
        **(sum_of_gradients() if replicas.count > 1 else {"all_reduce_seconds": 0.0}),
        "first_call_s": first,
        "tokens_per_s": int(limits.sum()) / seconds["step_seconds"],
    }


@jax.jit
def as_long(vector: jax.Array) -> jax.Array:
    """In place of a backward pass: some 40 ms of an H200 for the gradients of a 7B."""
    return jax.lax.fori_loop(0, 512, lambda _, x: jnp.tanh(x) + vector, vector)


def compared(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row of several devices, with that of one device beside which it stands."""
    alone = {(row["batch"], *map(row.get, SHAPE)): row for row in rows if row["kind"] == "one"}
    found = []
    for row in rows:
        if row["kind"] in ("weak", "strong"):
            batch = row["batch"] // row["devices"] if row["kind"] == "weak" else row["batch"]
            if base := alone.get((batch, *map(row.get, SHAPE))):
                found.append((row, base))
    return found


def show(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Print the scaling of each case against one device: work a second a device for weak, and speed-up for strong."""
    for row, base in found:
        ratios = {name: base[f"{name}_seconds"] / row[f"{name}_seconds"] for name in RATIOS}
        print(
            f"{row['kind']}, {row['devices']} devices, batch {row['batch']}: "
            + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            + f"; gather {1e3 * row['gather_seconds']:.1f} ms, all-reduce {1e3 * row['all_reduce_seconds']:.1f} ms"
            + f" ({', '.join(f'{name} {1e3 * row[name]:.1f}' for name in PARTS if name in row)})"
        )


def draw_curves(found: list[tuple[dict[str, Any], dict[str, Any]]], out: Path) -> None:
    """scaling.png: a panel for each case of weak and of strong scaling, over the number of GPUs. Bars span the single
    steps, against the median of one GPU.
    """
    panels: dict[tuple, list[dict[str, Any]]] = {}
    for row, base in sorted(
        found, key=lambda pair: (pair[0]["kind"] == "strong", pair[1]["batch"], pair[0]["devices"])
    ):
        if "each" in row and "each" in base:  # not of older files
            panels.setdefault((row["kind"], base["batch"], *map(base.get, SHAPE)), [base]).append(row)
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), layout="constrained", squeeze=False)
    for axis, ((kind, *_), rows) in zip(axes[0], panels.items(), strict=True):
        base, counts = rows[0], [row["devices"] for row in rows]
        axis.plot(counts, np.ones(len(counts)) if kind == "weak" else counts, "k:", label="ideal")
        for name in RATIOS:
            ratios = [base[f"{name}_seconds"] / np.array(row["each"][name]) for row in rows]
            middle = [np.median(each) for each in ratios]
            spread = [[abs(m - end(each)) for m, each in zip(middle, ratios, strict=True)] for end in (np.min, np.max)]
            axis.errorbar(counts, middle, spread, marker="o", markersize=4, capsize=3, label=name)
        per_gpu = " a GPU" if kind == "weak" else ""
        model = f"{base['model']} {base['format']}".upper()
        axis.set_title(f"{model}, {base['batch']} completions{per_gpu}, {base['lengths']}", fontsize="medium")
        axis.set_xticks(counts)
        axis.set_xlabel("GPUs")
        axis.set_ylabel("of one GPU's work a second" if kind == "weak" else "times as fast as one GPU")
        low, high = axis.get_ylim()
        axis.set_ylim(*((min(0.8, low), max(1.05, high)) if kind == "weak" else (0, high)))
    axes[0][0].legend(fontsize="small")
    figure.savefig(out / "scaling.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
