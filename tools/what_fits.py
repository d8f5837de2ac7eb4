"""What fits on GPUs of 24 to 141 GB, by the estimator behind `--dry-run`, as a Markdown table.

    python tools/what_fits.py [--prompt-len 256] [--completion-len 1024] [--batch 64] [--format nvfp4]

A cell says how the update is divided (tokens of a micro-batch, layers that are recomputed) and how many
completions are decoded at a time. Nothing is loaded; no GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import unittest.mock

import jax
from make_checkpoint import SIZES, hf_config
from qerl_kernels import dispatch

from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.config import Config
from qerl_jax.rl.plan import recomputation
from qerl_jax.rollout.shapes import choose_shapes
from qerl_jax.run.abstract import abstract_trees, tree_bytes
from qerl_jax.run.memory import estimate_memory

GIGABYTES = (24, 48, 80, 141)
SHARE = 0.94  # share of a device for weights, state and caches


def cell(size: str, stored: str, gigabytes: int, args: argparse.Namespace) -> str:
    """How a run goes on a device; – where it does not."""
    config = Config(
        model=size,
        weight_format=stored,
        batch_size=args.batch,
        max_prompt_length=args.prompt_len,
        max_completion_length=args.completion_len,
    )
    with unittest.mock.patch.object(dispatch, "missing_for_mosaic_gpu", lambda dtype: None):
        policy, state = abstract_trees(parse_config(hf_config(size), {}, size), stored, config)
    free = SHARE * gigabytes * 1e9 - tree_bytes((policy.frozen, state))
    decode_bytes = 12 * policy.config.vocab_size * args.batch
    engine = dataclasses.replace(config.engine, memory_gb=max(free - decode_bytes, 1) / 1e9)
    lengths = args.prompt_len, args.completion_len
    try:
        plan = estimate_memory(policy, state, config, gigabytes * 1e9).update_plan
        slots = choose_shapes(policy, config.num_prompts, config.num_generations, *lengths, engine).slots
    except ValueError:
        return "–"
    if plan.lacking_bytes or free <= 0:
        return "–"
    keeps_all = plan.recomputed == plan.recomputed_gate_up == 0
    again = "" if keeps_all else f", {recomputation(plan)}"
    return f"{plan.pack.tokens} tokens{again}; {slots} decoded"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--completion-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--format", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print("| " + " | ".join(["", *(f"{gigabytes} GB" for gigabytes in GIGABYTES)]) + " |")
    print("|" + "---|" * (1 + len(GIGABYTES)))
    for size in args.sizes:
        cells = [cell(size, args.format, gigabytes, args) for gigabytes in GIGABYTES]
        print("| " + " | ".join([size, *cells]) + " |")


if __name__ == "__main__":
    main()
