"""Pretrain a policy of 30 or 100 million parameters on generated word problems, from scratch, for experiments in
reinforcement learning.

    python tools/pretrain.py --size 30M --out DIR                       # one GPU
    python tools/pretrain.py --size smoke --out DIR --steps 60 --rows 8 --problems 9 --generations 2   # a CPU, a minute

The corpus (`tools/pretraining`) holds worked solutions of problems like those of the dataset `word_problems`, most of
them short and some with a mistake. The policy resembles a base model: it solves short problems often, long ones
rarely, in many wordings. What it can do is set by the corpus (`--care`: share of authors who make no mistake;
`--decay`: how rare long problems are) and by the length of training (`--steps`, or `--seconds` on a machine of unknown
speed: the learning rate falls to zero over either).

DIR becomes a Hugging Face directory with bf16 weights and `pretraining.json`: recipe, SHA-256 of the weights, loss,
pass@k and entropy on held-out problems by number of operations, error of the weights in NVFP4. `--keep 0.5 0.75`
leaves the checkpoints after those shares of training in DIR-50 and DIR-75, measured likewise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32
from pretraining.corpus import WIDTH, Recipe, Rows, batches, texts
from pretraining.measure import evaluate_policy, weight_statistics
from pretraining.model import LONGEST, SIZES, Params, Size, forward, init_params, save
from pretraining.tokenizer import make_tokenizer
from record import add_commit, write_rows

TOKENIZER_DOCUMENTS = 4000
TIMED_STEPS = 20
"""Steps that are timed before `--seconds` settles the number of all."""


def is_matrix(params: Params) -> Params:
    """True on projections and the embedding: the weights that decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key.endswith(("_proj", "embed")), params)


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98), optax.add_decayed_weights(0.1, is_matrix)
)


class State(NamedTuple):
    """fp32 weights and the optimizer's moments."""

    params: Params
    moments: Any


def start(size: Size, seed: int) -> State:
    """Random weights."""
    params = init_params(size, jax.random.key(seed))
    return State(params, OPTIMIZER.init(params))


@functools.partial(jax.jit, static_argnames=("size", "dtype"), donate_argnums=0)
def train_step(
    state: State, rows: Rows, rate: Float32[Array, ""], size: Size, dtype: jnp.dtype
) -> tuple[State, Float32[Array, ""]]:
    """One AdamW update on the mean next-token loss of the solutions' tokens, in nats."""

    def loss_of(params: Params) -> Float32[Array, ""]:
        tokens, segments = rows.tokens.astype(jnp.int32), rows.segments.astype(jnp.int32)
        logits = forward(params, tokens, segments, size, dtype)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        targets = rows.targets[:, 1:]
        return jnp.sum(losses * targets) / jnp.sum(targets)

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    direction, moments = OPTIMIZER.update(gradient, state.moments, state.params)
    params = jax.tree.map(lambda weight, step: weight - rate * step, state.params, direction)
    return State(params, moments), loss


def rate_at(step: int, steps: int | None, args: argparse.Namespace) -> float:
    """Learning rate: a linear warm-up, then a cosine to 0 at `steps` (None: not known yet)."""
    if step < args.warmup or steps is None:
        return args.learning_rate * min(1.0, (step + 1) / args.warmup)
    return args.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (steps - args.warmup)))


def pretrain(
    args: argparse.Namespace, size: Size, source: Iterator[Rows], keep: Callable[[float, Params], None]
) -> dict:
    """Train; `keep` is called with (share of training, weights) after each share of `--keep` and at the end. Returns
    the last mean loss and the speed.
    """
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    state, steps, losses = start(size, args.seed), args.steps, []
    compiled = began = time.perf_counter()
    for step in itertools.count():
        rate = jnp.float32(rate_at(step, steps, args))
        state, loss = train_step(state, next(source), rate, size, dtype)
        losses.append(loss)
        if step == 0:
            loss.block_until_ready()
            compiled = time.perf_counter()
            print(f"compiled in {compiled - began:.0f} s, loss {float(loss):.3f}", flush=True)
        if steps is None and step == TIMED_STEPS:
            loss.block_until_ready()
            steps = max(2 * args.warmup, int(args.seconds * TIMED_STEPS / (time.perf_counter() - compiled)))
            print(f"{args.seconds} s are {steps} steps", flush=True)
            if early := [share for share in args.keep if round(share * steps) <= step + 1]:
                raise SystemExit(f"--keep {early}: {steps} steps are settled after {step + 1}")
        if steps and (step + 1) % max(1, steps // 20) == 0:
            mean = float(np.mean(losses[-50:]))
            print(f"step {step + 1}/{steps}: loss {mean:.4f}, {time.perf_counter() - compiled:.0f} s", flush=True)
        for share in (*args.keep, 1.0) if steps else ():
            if step + 1 == round(share * steps):
                keep(share, state.params)
        if step + 1 == steps:
            break
    seconds = time.perf_counter() - compiled
    return {
        "steps": steps,
        "loss": float(np.mean(losses[-50:])),
        "seconds": seconds,
        "tokens_per_s": (steps - 1) * args.rows * WIDTH / seconds,
    }


def main() -> None:
    """Command line."""
    args = arguments()
    began, size = time.perf_counter(), SIZES[args.size]
    recipe = Recipe(args.seed, args.care, args.decay)
    args.out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(args.out, texts(recipe, TOKENIZER_DOCUMENTS), size.vocabulary, LONGEST)
    directories: dict[float, Path] = {}
    sums: dict[float, str] = {}

    def keep(share: float, params: Params) -> None:
        directories[share] = args.out if share == 1.0 else args.out.with_name(f"{args.out.name}-{round(100 * share)}")
        if share < 1.0:
            shutil.copytree(args.out, directories[share], dirs_exist_ok=True)
        sums[share] = save(params, size, directories[share])

    with contextlib.closing(batches(str(args.out / "tokenizer.json"), recipe, args.rows, args.processes)) as source:
        trained = pretrain(args, size, source, keep)
    about = {
        "size": args.size,
        "parameters": size.parameters(),
        "without_embedding": size.parameters(embedding=False),
        **dataclasses.asdict(recipe),
        "rows": args.rows,
        "learning_rate": args.learning_rate,
        "warmup": args.warmup,
        **trained,
    }
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    found = []
    for share, directory in sorted(directories.items(), reverse=True):
        for weight_format in args.formats if share == 1.0 else args.formats[:1]:
            heldout = evaluate_policy(directory, weight_format, dtype, args.problems, args.generations)
            found.append({**about, "share": share, "format": weight_format, "sha256": sums[share], "heldout": heldout})
            print(json.dumps(found[-1]), f"at {time.perf_counter() - began:.0f} s", flush=True)
            write_rows(args.out / "pretraining.json", found, args.commit)
    found[0]["weights"] = weight_statistics(args.out)
    write_rows(args.out / "pretraining.json", found, args.commit)
    print(table(found), json.dumps(found[0]["weights"]), sep="\n")


def table(found: list[dict]) -> str:
    """The checkpoints' figures as Markdown."""
    last = f"pass_at_{found[0]['heldout']['generations']}"
    lines = [
        f"| share | format | pass@1 | {last} | entropy | truncated | pass@1 by operations |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        figures = row["heldout"]
        each = [f"{100 * figures[name]:.0f}" for name in figures if name.startswith("pass_at_1_of_")]
        shown = f"{100 * figures['pass_at_1']:.1f} | {100 * figures[last]:.1f} | {figures['entropy']:.3f}"
        lines.append(f"| {row['share']} | {row['format']} | {shown} | {figures['truncated']:.3f} | {' '.join(each)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--size", choices=SIZES, default="30M")
    parser.add_argument("--seed", type=int, default=0)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="updates")
    length.add_argument("--seconds", type=float, default=300, help="or as many as this takes, without compilation")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {WIDTH} tokens in an update")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100, help="updates")
    parser.add_argument("--care", type=float, default=Recipe.care, help="share of authors who make no mistake")
    parser.add_argument(
        "--decay", type=float, default=Recipe.decay, help="frequency of n + 1 operations over that of n"
    )
    parser.add_argument("--keep", type=float, nargs="*", default=[], help="shares of training to keep checkpoints of")
    parser.add_argument(
        "--formats", nargs="+", default=["bf16"], help="weight formats that the last one is measured in"
    )
    parser.add_argument("--problems", type=int, default=252, help="held-out problems")
    parser.add_argument("--generations", type=int, default=64, help="completions of each")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="that make the corpus; 0: none of its own"
    )
    add_commit(parser)
    args = parser.parse_args()
    if args.steps is not None and args.steps <= args.warmup:
        parser.error(f"--steps {args.steps} is not above --warmup {args.warmup}")
    if not all(0 < share < 1 for share in args.keep):
        parser.error(f"--keep {args.keep}: shares lie between 0 and 1")
    return args


if __name__ == "__main__":
    main()
