"""Rollouts of the published shapes with random weights: decode time a step, tokens/s with prefill, time by kind of
kernel, peak memory.

    python tools/bench_rollout.py 7B --batch 8 32 128 --out tools/results/nvidia-h200 [--tensor-parallel-size 2]

Prompts are distinct, completions have a fixed length (no EOS), temperature 1, log-probabilities on, adapters on all
seven projections. Decode milliseconds a step: the time of a long rollout minus that of a 32-token one, divided by the
difference in tokens; medians of `--repeats` after a first run. `--new-tokens 1` measures the prefill and one decode
step.

After it was timed, each rollout is profiled for two tokens, and a row is written only where exactly the kernels of the
implementation that it names have run.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from as_gpu import add_as_arch, assume
from make_checkpoint import SIZES
from qerl_kernels.decode_prologue.api import max_tokens
from qerl_kernels.kernel_times import profiled
from qerl_kernels.peer_sum import api as peers
from random_policy import random_policy
from record import add_commit, write_rows
from timing import peak_bytes, timed_warm

from qerl_jax import Engine, LoraConfig, Policy, Prompts, Sampling, generate, keys

SHORT = 32
KINDS = (  # the first pattern that a kernel's name matches
    ("nvfp4 matmul", r"nvfp4"),
    ("attention", r"attention|fmha|flash"),
    ("other matmul", r"gemm|nvjet|cublas|cutlass|splitK|xmma|dot"),
    ("cache write", r"scatter|dynamic_update_slice|dynamic-update-slice"),
    ("copy", r"[Mm]emcpy|[Mm]emset|copy"),
    ("norm, rotary, silu, sampling", r""),
)


OURS = {  # our kernels, by their names in a profile
    "nvfp4_matmul": r"nvfp4_",
    "decode_prologue": r"decode_prologue_",
    "decode_attention": r"decode_attention_",
    "rope_cache": r"rope_and_cache",
    "peer_sum": r"peer_sum",
}


class Case:
    """One policy and batch of distinct prompts."""

    def __init__(self, args: argparse.Namespace, policy: Policy, batch: int, new_tokens: int) -> None:
        if batch % args.group:
            raise SystemExit(f"--group {args.group} does not divide a batch of {batch}")
        self.policy, self.batch, self.new_tokens = policy, batch, new_tokens
        shape = batch // args.group, args.prompt_len
        self.prompts = Prompts.from_lists(
            np.random.default_rng(0).integers(policy.config.vocab_size, size=shape).tolist()
        )
        self.sampling = Sampling(new_tokens, num_generations=args.group)
        self.engine = Engine(slots=batch, batch_invariant=args.batch_invariant)

    def run(self, i: int, tokens: int | None = None):
        """A rollout with its own key, of `tokens` tokens where that is given."""
        limits = None if tokens is None else np.full(self.prompts.tokens.shape[0], tokens)
        key = keys.for_step(0, keys.Purpose.SAMPLE, i)
        return generate(self.policy, self.prompts, self.sampling, key, self.engine, limits)

    def seconds(self, repeats: int, tokens: int | None = None) -> float:
        """Median seconds over `repeats` rollouts, all compiled."""
        return timed_warm(lambda i: self.run(i, tokens), repeats)[1]


def expected_kernels(matmul_kernel: str, batch: int, batch_invariant: bool, sums: bool) -> set[str]:
    """Those of `OURS` that a rollout of bf16 activations on a Hopper GPU runs, and no others; `sums`: over several GPUs
    by a kernel.
    """
    expected = {"decode_attention", "rope_cache"}
    if matmul_kernel == "mosaic_gpu":
        expected.add("nvfp4_matmul")
        if batch <= max_tokens() and not batch_invariant:
            expected |= {"decode_prologue", "peer_sum"} if sums else {"decode_prologue"}
    return expected


def refuse_other_kernels(names: Iterable[str], expected: set[str]) -> list[str]:
    """`expected`, sorted, where just these of `OURS` are among the names of the kernels that ran; else SystemExit."""
    ran = {ours for name in names for ours, pattern in OURS.items() if re.search(pattern, name)}
    if ran != expected:
        raise SystemExit(f"of our kernels {sorted(ran)} ran, not {sorted(expected)}: no row is written")
    return sorted(ran)


def time_by_kind(case: Case) -> dict[str, float]:
    """Milliseconds of GPU kernels a decode step by kind, without the prefill: a profile of 64 tokens minus one of 32.
    Command buffers are off while profiling.
    """
    short, long = by_name(case, SHORT), by_name(case, 2 * SHORT)
    step = {name: (ms - short[name]) / SHORT for name, ms in long.items()}
    for name, ms in sorted(step.items(), key=lambda item: -item[1])[:40]:
        print(f"    {1e3 * ms:8.1f} us a step  {name[:90]}")
    total: dict[str, float] = collections.Counter()
    for name, ms in step.items():
        total[next(kind for kind, pattern in KINDS if re.search(pattern, name))] += ms
    return dict(total)


def by_name(case: Case, tokens: int) -> dict[str, float]:
    """Milliseconds of each GPU kernel over a rollout of `tokens` tokens."""
    names: dict[str, float] = collections.Counter()
    for kernel in profiled(lambda: case.run(99, tokens)):
        names[kernel.name] += kernel.duration_ns * 1e-6
    return names


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--format", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--matmul-kernel", choices=("xla", "mosaic_gpu"), default="mosaic_gpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs over which the layers are divided")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--batch-invariant", action="store_true", help="batch-invariant mode")
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    add_as_arch(parser)
    add_commit(parser)
    args = parser.parse_args()
    args.seen_as = assume(args.as_arch)
    if args.batch != sorted(args.batch) or args.new_tokens != sorted(args.new_tokens):
        parser.error("--batch and --new-tokens must rise: peak memory is that of the process so far")
    if args.profile and args.new_tokens[0] < 2 * SHORT:
        parser.error(f"--profile needs at least {2 * SHORT} --new-tokens")
    if args.format == "bf16":
        args.matmul_kernel = "xla"
    settings = args.size, args.format, LoraConfig(rank=args.lora_rank), args.matmul_kernel
    policy = random_policy(*settings, tensor_parallel=args.tensor_parallel_size)
    jax.block_until_ready(policy.frozen)
    for batch, new_tokens in itertools.product(args.batch, args.new_tokens):
        row, line = measure(args, Case(args, policy, batch, new_tokens))
        write_rows(args.out / "rollout.json", [row], args.commit)
        print(line, flush=True)


def measure(args: argparse.Namespace, case: Case) -> tuple[dict, str]:
    """A row of results and a line of text."""
    batch, new_tokens = case.batch, case.new_tokens
    started = time.perf_counter()
    rollout = jax.block_until_ready(case.run(0))
    first = time.perf_counter() - started
    seconds = case.seconds(args.repeats)
    tokens = int(np.asarray(rollout.lengths - rollout.prompt_lengths).sum())
    row = {
        "model": args.size.lower(),
        "format": args.format,
        "impl": "qerl_xla" if args.format == "nvfp4" and args.matmul_kernel == "xla" else "qerl",
        "batch": batch,
        "prompt_len": args.prompt_len,
        "new_tokens": new_tokens,
        "lora_rank": args.lora_rank,
        "tensor_parallel": args.tensor_parallel_size,
        "group": args.group,
        "lengths": "fixed",
        "batch_invariant": args.batch_invariant,
        "tokens_per_s": tokens / seconds,
        "peak_bytes": peak_bytes(),
        "first_call_s": first,
        **args.seen_as,
    }
    line = f"{args.size} {args.format} batch {batch:4d}, {new_tokens} tokens: {seconds:.3f} s"
    line += f", {row['tokens_per_s']:.0f} tokens/s, first call {first:5.1f} s, peak {row['peak_bytes'] / 1e9:.1f} GB"
    if new_tokens > SHORT:
        short = case.seconds(args.repeats, SHORT)
        row["decode_ms_per_step"] = 1e3 * (seconds - short) / (new_tokens - SHORT)
        line += f", decode {row['decode_ms_per_step']:.3f} ms a step, {SHORT} tokens {short:.3f} s"
    count, features = args.tensor_parallel_size, case.policy.config.hidden_size
    sums = (
        count > 1
        and not peers.missing(features, case.policy.dtype, count)
        and batch <= peers.most_rows(features, count)
    )
    expected = expected_kernels(args.matmul_kernel, batch, args.batch_invariant, sums)
    row["kernels"] = refuse_other_kernels(by_name(case, min(2, new_tokens)), expected)
    if args.profile:
        row["kernel_ms_per_step"] = time_by_kind(case)
        line += "\n    " + ", ".join(f"{kind} {ms:.3f}" for kind, ms in row["kernel_ms_per_step"].items())
    return row, line


if __name__ == "__main__":
    main()
