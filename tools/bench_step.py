"""A rollout and its update on a GPU: seconds, compile seconds, fractions of the matrix peak, peak memory, and how well
rollout and trainer agree.

    python tools/bench_step.py 7B [--format nvfp4] [--batch 8] [--prompt-len 256] [--completion-len 128]
        [--lengths fixed|gsm8k] [--update-only] [--profile] [--tensor-parallel-size 1]

Random weights of the published shapes, temperature 1, log-probabilities on, adapters on all seven projections. Lengths
are fixed (no EOS), or drawn as GSM8K has them: prompts log-normal around 120 tokens, completions around 210 (twice a
reference solution), cut at the limits. Medians of `--repeats` after one warm-up; a run's time is a wall clock around
work that is waited for. Writes rows of update.json into `--out`.

`model_fraction_of_peak` counts useful work alone, (4 N_proj + 4 V D) a real token + 3.5 x causal attention's forward
pass, over seconds and the TFLOP/s of a bf16 product of 8192^3 in the same process; real tokens are those of the
completions and, once a group, of the prompt. `fraction_of_peak` counts what was executed: all tokens of the
micro-batches, projections that ran forward twice, the head on completions alone. `tokens_per_s` counts all sequences.
Bytes are those of one GPU, TFLOP/s those of all.

`--update-only` makes up the rollout, so that the peak is the update's own; `--profile` prints the update's GPU kernels
and the times without one.
`--fp32` also compares both with the same weights computed in fp32: how far bf16 by itself takes either from the exact
log-probabilities. Rollout and trainer cannot agree better than their distances from there, if those are independent.
"""

from __future__ import annotations

import argparse
import collections
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from as_gpu import add_as_arch, assume
from make_checkpoint import SIZES
from qerl_kernels.kernel_times import profiled
from random_policy import random_policy
from record import add_commit, write_rows
from timing import COPIES, compile_calls, gaps, peak_bytes, timed

from qerl_jax import (
    Config,
    Engine,
    LoraConfig,
    Policy,
    Prompts,
    Rollout,
    device_bytes,
    generate,
    group_advantages,
    grpo_step,
    init_state,
    keys,
    make_batch,
    make_update_plan,
    token_logprobs,
)
from qerl_jax.compilation import committed
from qerl_jax.models.config import ModelConfig
from qerl_jax.partition import bytes_on_device
from qerl_jax.programs import shapes_of
from qerl_jax.rl.plan import UpdatePlan, recomputation
from qerl_jax.rl.step import assigned
from qerl_jax.rollout.engine import rehearse


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--format", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--matmul-kernel", choices=("xla", "mosaic_gpu"), default="mosaic_gpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--completion-len", type=int, default=128)
    parser.add_argument("--lengths", choices=("fixed", "gsm8k"), default="fixed")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs over which the layers are divided")
    parser.add_argument("--num-iterations", type=int, default=1)
    parser.add_argument("--tokens-per-micro-batch", type=int)
    parser.add_argument("--update-memory-gb", type=float)
    parser.add_argument("--logprob-chunk-size", type=int, default=Config.logprob_chunk_size)
    parser.add_argument("--update-only", action="store_true", help="no rollout; its peak is the update's")
    parser.add_argument("--profile", action="store_true", help="print the kernels of an update")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fp32", action="store_true", help="also the distance from the model in fp32")
    parser.add_argument("--out", type=Path, required=True)
    add_as_arch(parser)
    add_commit(parser)
    args = parser.parse_args()
    seen_as = assume(args.as_arch)

    started, count = time.perf_counter(), args.tensor_parallel_size
    # Committed to a device, as that of a run is.
    settings = args.size, args.format, LoraConfig(rank=args.lora_rank), args.matmul_kernel
    policy = committed(random_policy(*settings, tensor_parallel=count), count)
    jax.block_until_ready(policy.frozen)
    load_seconds, weight_bytes = time.perf_counter() - started, bytes_on_device(policy.frozen, count)
    config = Config(
        batch_size=args.batch,
        num_generations=args.group,
        max_prompt_length=args.prompt_len,
        max_completion_length=args.completion_len,
        num_iterations=args.num_iterations,
        max_steps=200 * args.num_iterations,
        lora_rank=args.lora_rank,
        tokens_per_micro_batch=args.tokens_per_micro_batch,
        update_memory_gb=args.update_memory_gb,
        logprob_chunk_size=args.logprob_chunk_size,
    )
    rng = np.random.default_rng(0)
    prompts, limits = draw(args, args.batch, policy.config.vocab_size, rng)
    sampled, rollout_compile, rollout_seconds = roll_out(args, policy, config, prompts, limits)
    rollout_peak = peak_bytes()
    rewards = rng.random(args.batch).astype(np.float32)
    batch = jax.block_until_ready(make_batch(sampled, group_advantages(rewards, args.group)))
    state = init_state(policy, config)
    plan = make_update_plan(state, policy.frozen, device_bytes(), batch.tokens.shape[1])
    started = time.perf_counter()
    programs = compile_calls(grpo_step, state, policy.frozen, shapes_of(batch), plan)
    update_compile = time.perf_counter() - started
    (_, metrics), update_seconds = timed(lambda i: grpo_step(state, policy.frozen, batch, plan), args.repeats)
    lengths, prompt_lengths = np.asarray(batch.lengths), np.asarray(batch.prompt_lengths)
    computed = [some.kind.tokens for some in assigned(plan, batch, needs_advantage=False)]
    useful, executed = operations(policy.config, lengths, prompt_lengths, args.group, plan, sum(computed))
    peak = count * matrix_peak()
    fractions = {
        "model_fraction_of_peak": args.num_iterations * useful / update_seconds / peak,
        "fraction_of_peak": args.num_iterations * executed / update_seconds / peak,
    }

    common = {
        "model": args.size.lower(),
        "format": args.format,
        "impl": "qerl" if args.matmul_kernel == "mosaic_gpu" else "qerl_xla",
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "lora_rank": args.lora_rank,
        "tensor_parallel": args.tensor_parallel_size,
        "lengths": args.lengths,
        "num_iterations": args.num_iterations,
        "tokens_per_micro_batch": plan.pack.tokens,
        "recomputed_layers": plan.recomputed,
        "recomputed_gate_up": plan.recomputed_gate_up,
        **seen_as,
    }
    real_tokens, new_tokens = int(lengths.sum()), int((lengths - prompt_lengths).sum())
    whole = rollout_seconds + update_seconds
    agreement = {}
    if not args.update_only:  # which has made-up log-probabilities
        agreement = {
            "kl": float(metrics["sampling/kl"]),
            "mean_abs_dlogp": float(metrics["sampling/sampling_logp_difference/mean"]),
            "token_mult_prob_error": float(metrics["sampling/token_mult_prob_error"]),
        }
    if args.fp32:
        agreement |= from_fp32(args, policy, sampled)
    update_rows = [
        common
        | {
            "completion_len": args.completion_len,
            "phase": phase,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "peak_bytes": peak_bytes(),
            "compile_s": compile_s,
        }
        | (fractions if phase == "update" else {"rollout_seconds": rollout_seconds, "rollout_peak_bytes": rollout_peak})
        | agreement
        for phase, seconds, tokens, compile_s in (
            ("update", update_seconds, real_tokens, update_compile),
            ("step", whole, new_tokens, rollout_compile + update_compile),
        )[: 1 if args.update_only else 2]
    ]
    write_rows(args.out / "update.json", update_rows, args.commit)
    print(
        f"load {load_seconds:.1f} s, weights {weight_bytes / 1e9:.2f} GB, programs of the rollout compiled in "
        f"{rollout_compile:.1f} s, {programs} of the update in {update_compile:.1f} s"
    )
    print(
        f"rollout {rollout_seconds:.3f} s = {new_tokens / max(rollout_seconds, 1e-9):.0f} tokens/s, "
        f"peak {rollout_peak / 1e9:.2f} GB"
    )
    packed_tokens = int((lengths - prompt_lengths).sum() + prompt_lengths[:: args.group].sum())
    filled = packed_tokens / sum(computed)
    print(
        f"update {update_seconds:.3f} s = {real_tokens / update_seconds:.0f} tokens/s, micro-batches of "
        f"{', '.join(map(str, computed))} tokens ({filled:.1%} real), {recomputation(plan)}"
    )
    print(
        f"{fractions['model_fraction_of_peak']:.3f} of {peak / 1e12:.0f} TFLOP/s, {fractions['fraction_of_peak']:.3f} "
        f"executed; step {whole:.3f} s, peak {peak_bytes() / 1e9:.2f} GB, of which planned for activations "
        f"{(plan.kept_bytes + plan.working_bytes) / 1e9:.2f}"
    )
    if agreement:
        print("rollout against trainer at σ = 0: " + ", ".join(f"{name} {v:.2e}" for name, v in agreement.items()))
    if args.profile:
        kernels: dict[str, list[float]] = collections.defaultdict(list)
        profile = profiled(lambda: grpo_step(state, policy.frozen, batch, plan))
        for kernel in profile:
            kernels[kernel.name].append(kernel.duration_ns * 1e-6)
        idle = gaps(profile)
        away = sum(sum(kernels[name]) for name in COPIES)
        busy, total = sum(map(sum, kernels.values())) - away, 1e3 * sum(gap.seconds for gap in idle)
        print(f"kernels: {busy:.1f} ms; copies to and from the host: {away:.1f} ms")
        print(f"without a kernel: {total:.1f} ms, the longest:")
        for gap in sorted(idle, reverse=True)[:10]:
            print(f"{1e3 * gap.seconds:9.2f} ms between {gap.before[:40]} and {gap.after[:40]}")
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:40]:
            print(f"{sum(times):9.2f} ms {len(times):6} calls {1e3 * statistics.median(times):9.1f} us  {name[:100]}")


def draw(args: argparse.Namespace, batch: int, vocab_size: int, rng: np.random.Generator) -> tuple[Prompts, np.ndarray]:
    """Prompts of `batch` completions, and the length of each of these."""
    count = batch // args.group
    lengths, limits = np.full(count, args.prompt_len), np.full(batch, args.completion_len)
    if args.lengths == "gsm8k":
        lengths = np.clip(rng.lognormal(math.log(120), 0.35, count), 16, args.prompt_len).astype(int)
        limits = np.clip(rng.lognormal(math.log(210), 0.45, batch), 16, args.completion_len).astype(int)
    tokens = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    return Prompts.from_lists(tokens, length=args.prompt_len), limits


def roll_out(
    args: argparse.Namespace, policy: Policy, config: Config, prompts: Prompts, limits: np.ndarray
) -> tuple[Rollout, float, float]:
    """(a rollout, seconds to compile its programs, seconds of one)."""
    if args.update_only:
        lengths = np.repeat(prompts.lengths, args.group)
        rng, width = np.random.default_rng(1), args.prompt_len + args.completion_len
        tokens = rng.integers(0, policy.config.vocab_size, (args.batch, width)).astype(np.int32)
        tokens[:, : args.prompt_len] = np.repeat(prompts.tokens, args.group, axis=0)
        flat = [lengths, lengths + limits, np.zeros(args.batch), np.arange(args.batch) // args.group]
        kinds = (np.int32, np.int32, np.int8, np.int32)
        arrays = [array.astype(kind) for array, kind in zip(flat, kinds, strict=True)]
        behaviour = np.full(tokens.shape, -np.log(policy.config.vocab_size), np.float32)
        return Rollout(*jax.device_put((tokens, behaviour, *arrays))), 0.0, 0.0
    engine = Engine()

    def key(i: int) -> jax.Array:
        return keys.for_step(0, keys.Purpose.SAMPLE, i)

    def once(i: int) -> Any:
        return generate(policy, prompts, config.sampling, key(i), engine, limits)

    started = time.perf_counter()
    count, width = prompts.tokens.shape
    compile_calls(rehearse, policy, count, width, config.sampling, key(0), engine)
    compiling = time.perf_counter() - started
    sampled, seconds = timed(once, args.repeats)
    return sampled, compiling, seconds


def operations(
    model: ModelConfig,
    lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    group: int,
    plan: UpdatePlan,
    computed: int,
) -> tuple[float, float]:
    """(useful, executed) floating-point operations of one update, whose micro-batches have so many tokens together."""
    shapes = {name: n * k for name, (n, k) in model.projection_shapes().items()}
    projections, gate_up = sum(shapes.values()), shapes["gate_proj"] + shapes["up_proj"]
    completions, prompts = (lengths - prompt_lengths).astype(float), prompt_lengths[::group].astype(float)
    pairs = (completions * prompt_lengths + completions * (completions + 1) / 2).sum() + (prompts**2 / 2).sum()
    causal = 4 * model.num_heads * model.head_dim * float(pairs)
    head, real = 4 * model.vocab_size * model.hidden_size, float(completions.sum() + prompts.sum())
    useful = (4 * model.num_layers * projections + head) * real + 3.5 * model.num_layers * causal
    passes = (4 * model.num_layers + 2 * plan.recomputed) * projections + 2 * plan.recomputed_gate_up * gate_up
    executed = passes * float(computed) + head * float(completions.sum())
    return useful, executed + (3.5 * model.num_layers + plan.recomputed) * causal


def matrix_peak() -> float:
    """FLOP/s of a bf16 product of 8192^3 by XLA's library."""
    a = jnp.ones((8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda a, b: (a @ b) * jnp.bfloat16(2**-13))

    def run(i: int) -> Any:
        b = a
        for _ in range(20):
            b = product(a, b)
        return b

    return 20 * 2 * 8192**3 / timed(run, 5)[1]


def from_fp32(args: argparse.Namespace, policy: Policy, rollout: Rollout) -> dict[str, float]:
    """Mean |Δ log-probability| of what was drawn between the model in fp32 and the rollout, and the trainer."""
    lora = LoraConfig(rank=args.lora_rank)
    exact = random_policy(args.size, args.format, lora, "xla", dtype=jnp.float32)
    expected, trained = (
        jax.jit(lambda p: token_logprobs(p, rollout.tokens, rollout.attention_mask, chunk=256))(p)
        for p in (exact, policy)
    )
    drawn = rollout.completion_mask[:, 1:]

    def distance(logprobs: jax.Array) -> float:
        return float(jnp.abs(logprobs - expected).mean(where=drawn))

    return {
        "rollout_abs_dlogp_fp32": distance(rollout.logprobs[:, 1:]),
        "trainer_abs_dlogp_fp32": distance(trained),
    }


if __name__ == "__main__":
    main()
