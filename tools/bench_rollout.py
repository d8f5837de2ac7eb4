"""Rollouts of the published shapes with random weights: decode time a step, tokens/s with prefill, time by kind of
kernel, peak memory, beside vLLM's rows where a file of them is given.

    python tools/bench_rollout.py 7B --batch 8 32 128 --out tools/results/nvidia-h200 [--rival vllm.json]
        [--tensor-parallel-size 2]

Prompts are distinct, completions have a fixed length (no EOS), temperature 1, log-probabilities on, adapters on all
seven projections. Decode milliseconds a step: the time of a long rollout minus that of a 32-token one, divided by the
difference in tokens; medians of `--repeats` after a first run. `--spread` draws the length of each completion between
1/8 and all of the longest, with four times as many sequences as slots, and reports tokens/s; as with EOS, the host does
not know these lengths beforehand. `--new-tokens 1` measures the prefill and one decode step.

After it was timed, each rollout is profiled for two tokens, and a row is written only where exactly the kernels of the
implementation that it names have run.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import time
import unittest.mock
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from as_gpu import add_as_arch, assume
from make_checkpoint import SIZES
from qerl_kernels.decode_prologue.api import MAX_TOKENS
from qerl_kernels.kernel_times import profiled
from random_policy import random_policy
from record import add_commit, write_rows
from timing import peak_bytes, timed_warm

from qerl_jax import Engine, LoraConfig, Policy, Prompts, Sampling, generate, keys
from qerl_jax.compilation import use_compilation_cache
from qerl_jax.rollout import engine
from qerl_jax.rollout.schedule import Schedule

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
}


class _UnknownLengths(engine._Decoder):
    """Completions end at their limits on the device; the host assumes the largest limit for all of them."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        slots = self.shapes.slots, self.shapes.prompt_slots
        self.schedule = Schedule([self.most] * len(self.limits), self.schedule.group, *slots)

    def _admit(self, admissions, stopped) -> None:
        super()._admit(admissions, stopped)
        self.budget[[admission.slot for admission in admissions]] = self.most


class Case:
    """One policy and batch: distinct prompts, or groups with completions of different lengths."""

    def __init__(self, args: argparse.Namespace, policy: Policy, batch: int, new_tokens: int) -> None:
        rows = 4 * batch if args.spread else batch
        if rows % args.group:
            raise SystemExit(f"--group {args.group} does not divide a batch of {rows}")
        self.policy, self.batch, self.new_tokens = policy, batch, new_tokens
        rng = np.random.default_rng(0)
        ends = args.prompt_len
        lengths = np.linspace(ends[0], ends[-1], rows // args.group).round().astype(int)
        tokens = [rng.integers(0, policy.config.vocab_size, length).tolist() for length in rng.permutation(lengths)]
        self.prompts = Prompts.from_lists(tokens)
        self.sampling = Sampling(new_tokens, num_generations=args.group)
        self.engine = Engine(slots=batch, batch_invariant=args.batch_invariant)
        shortest = max(1, new_tokens // 8)
        self.limits = np.random.default_rng(1).integers(shortest, new_tokens + 1, rows) if args.spread else None

    def run(self, i: int, limits: np.ndarray | int | None = None):
        """A rollout with its own key; `limits` as in `generate`, or one number for all."""
        if isinstance(limits, int):
            limits = np.full(self.prompts.tokens.shape[0], limits)
        key = keys.for_step(0, keys.Purpose.SAMPLE, i)
        decoder = engine._Decoder if self.limits is None else _UnknownLengths
        with unittest.mock.patch.object(engine, "_Decoder", decoder):
            return generate(self.policy, self.prompts, self.sampling, key, self.engine, limits)

    def seconds(self, repeats: int, limits: np.ndarray | int | None) -> float:
        """Median seconds over `repeats` rollouts, all compiled."""
        return timed_warm(lambda i: self.run(i, limits), repeats)[1]


def expected_kernels(matmul_kernel: str, batch: int, batch_invariant: bool) -> set[str]:
    """Those of `OURS` that a rollout of bf16 activations on a Hopper GPU runs, and no others."""
    expected = {"decode_attention", "rope_cache"}
    if matmul_kernel == "mosaic_gpu":
        expected.add("nvfp4_matmul")
        if batch <= MAX_TOKENS and not batch_invariant:
            expected.add("decode_prologue")
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
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[256], help="tokens, or two ends of a range")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs over which the layers are divided")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--spread", action="store_true", help="lengths from 1/8 to all, four sequences a slot")
    parser.add_argument("--batch-invariant", action="store_true", help="batch-invariant mode")
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel")
    parser.add_argument("--compile-only", action="store_true", help="run each once, to fill JAX's compilation cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rival", type=Path, help="rows of vLLM to compare with")
    parser.add_argument("--out", type=Path, required=True)
    add_as_arch(parser)
    add_commit(parser)
    args = parser.parse_args()
    args.seen_as = assume(args.as_arch)
    if len(args.prompt_len) > 2:
        parser.error(f"--prompt-len takes one length or two, not {len(args.prompt_len)}")
    if args.batch != sorted(args.batch) or args.new_tokens != sorted(args.new_tokens):
        parser.error("--batch and --new-tokens must rise: peak memory is that of the process so far")
    if args.profile and args.new_tokens[0] < 2 * SHORT:
        parser.error(f"--profile needs at least {2 * SHORT} --new-tokens")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # else a first call is measured cold
        use_compilation_cache(None)
    kernel = "xla" if args.format == "bf16" else args.matmul_kernel
    args.matmul_kernel = kernel
    lora = LoraConfig(rank=args.lora_rank)
    policy = random_policy(args.size, args.format, lora, kernel, tensor_parallel=args.tensor_parallel_size)
    jax.block_until_ready(policy.frozen)
    rival = json.loads(args.rival.read_text())["rows"] if args.rival else []
    rows, table = [], []
    for batch, new_tokens in itertools.product(args.batch, args.new_tokens):
        case = Case(args, policy, batch, new_tokens)
        if args.compile_only:
            jax.block_until_ready(case.run(0, case.limits if args.spread else 1))
            continue
        row, line = measure(args, case, rival)
        rows.append(row)
        table.append(line)
        write_rows(args.out / "rollout.json", rows, args.commit)
        print(line, flush=True)
    print("\n".join(table))


def measure(args: argparse.Namespace, case: Case, rival: list[dict]) -> tuple[dict, str]:
    """A row of results and a line of text."""
    batch, new_tokens = case.batch, case.new_tokens
    started = time.perf_counter()
    rollout = jax.block_until_ready(case.run(0, case.limits))
    first = time.perf_counter() - started
    seconds = case.seconds(args.repeats, case.limits)
    tokens = int(np.asarray(rollout.lengths - rollout.prompt_lengths).sum())
    row = {
        "model": args.size.lower(),
        "format": args.format,
        "impl": "qerl_xla" if args.format == "nvfp4" and args.matmul_kernel == "xla" else "qerl",
        "batch": batch,
        "prompt_len": args.prompt_len[0] if len(args.prompt_len) == 1 else args.prompt_len,
        "new_tokens": new_tokens,
        "lora_rank": args.lora_rank,
        "tensor_parallel": args.tensor_parallel_size,
        "group": args.group,
        "lengths": "spread" if args.spread else "fixed",
        "batch_invariant": args.batch_invariant,
        "tokens_per_s": tokens / seconds,
        "peak_bytes": peak_bytes(),
        "first_call_s": first,
        **args.seen_as,
    }
    line = f"{args.size} {args.format} batch {batch:4d}, {new_tokens} tokens: {seconds:.3f} s"
    line += f", {row['tokens_per_s']:.0f} tokens/s"
    line += f", first call {first:5.1f} s"
    line += f", peak {row['peak_bytes'] / 1e9:.1f} GB"
    if not args.spread and new_tokens > SHORT:
        short = case.seconds(args.repeats, SHORT)
        row["decode_ms_per_step"] = 1e3 * (seconds - short) / (new_tokens - SHORT)
        line += f", decode {row['decode_ms_per_step']:.3f} ms a step, {SHORT} tokens {short:.3f} s"
    same = ("model", "batch", "prompt_len", "lora_rank", "lengths")  # in any format: at batch 128 vLLM's bf16 is faster
    for other in rival if args.group == 1 else ():
        if all(other[name] == row[name] for name in same) and "decode_ms_per_step" in row:
            theirs = other["decode_ms_per_step"]
            line += f" (vLLM {other['format']} {theirs:.2f}: {theirs / row['decode_ms_per_step']:.2f} x"
            if other["new_tokens"] == row["new_tokens"]:
                line += f", tokens/s {row['tokens_per_s'] / other['tokens_per_s']:.2f} x"
            line += ")"
    expected = expected_kernels(args.matmul_kernel, batch, args.batch_invariant)
    row["kernels"] = refuse_other_kernels(by_name(case, min(2, new_tokens)), expected)
    if args.profile:
        row["kernel_ms_per_step"] = time_by_kind(case)
        line += "\n    " + ", ".join(f"{kind} {ms:.3f}" for kind, ms in row["kernel_ms_per_step"].items())
    return row, line


if __name__ == "__main__":
    main()
