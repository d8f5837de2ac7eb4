"""A rollout and its update on a GPU: update and step seconds, peak memory so far, and how well rollout and trainer
agree.

    python tools/bench_step.py 7B [--format nvfp4] [--batch 8] [--prompt-len 256] [--completion-len 128]

Random weights of the published shapes. Sequences have a fixed length (no EOS), temperature 1, log-probabilities on,
adapters on all seven projections. Medians of `--repeats` after one warm-up; a run's time is a wall clock around work
that is waited for. Writes rows of update.json into `--out`.

`--fp32` also compares both with the same weights computed in fp32: how far bf16 by itself takes either from the exact
log-probabilities. Rollout and trainer cannot agree better than their distances from there, if those are independent.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make_checkpoint import SIZES
from random_policy import random_policy
from record import peak_bytes, shell, timed, write_rows

from qerl_jax import (
    Config,
    Engine,
    LoraConfig,
    Policy,
    Prompts,
    Rollout,
    generate,
    group_advantages,
    grpo_step,
    init_state,
    keys,
    make_batch,
    token_logprobs,
)


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
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fp32", action="store_true", help="also the distance from the model in fp32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=shell("git rev-parse --short HEAD"), help="for a copy without its .git")
    args = parser.parse_args()

    started = time.perf_counter()
    policy = random_policy(args.size, args.format, LoraConfig(rank=args.lora_rank), args.matmul_kernel)
    jax.block_until_ready(policy.frozen)
    load_seconds, weight_bytes = (
        time.perf_counter() - started,
        sum(leaf.nbytes for leaf in jax.tree.leaves(policy.frozen)),
    )
    config = Config(
        batch_size=args.batch,
        num_generations=args.group,
        max_prompt_length=args.prompt_len,
        max_completion_length=args.completion_len,
        num_iterations=1,
        lora_rank=args.lora_rank,
    )
    rng = np.random.default_rng(0)
    prompts = Prompts.from_lists(
        rng.integers(0, policy.config.vocab_size, (args.batch // args.group, args.prompt_len)).tolist()
    )

    engine = Engine(kv_cache_dtype=args.kv_cache_dtype)

    def rollout(i: int) -> Any:
        return generate(policy, prompts, config.sampling, keys.for_step(0, keys.Purpose.SAMPLE, i), engine)

    started = time.perf_counter()
    jax.block_until_ready(rollout(0))
    rollout_compile = time.perf_counter() - started
    sampled, rollout_seconds = timed(rollout, args.repeats)
    rollout_peak = peak_bytes()
    rewards = rng.random(args.batch).astype(np.float32)
    batch = make_batch(sampled, group_advantages(rewards, args.group))
    state = init_state(policy, config)
    started = time.perf_counter()
    jax.block_until_ready(grpo_step(state, policy.frozen, batch))
    update_compile = time.perf_counter() - started
    (_, metrics), update_seconds = timed(lambda i: grpo_step(state, policy.frozen, batch), args.repeats)

    common = {
        "model": args.size.lower(),
        "format": args.format,
        "impl": "qerl" if args.matmul_kernel == "mosaic_gpu" else "qerl_xla",
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "lora_rank": args.lora_rank,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    new_tokens = args.batch * args.completion_len
    whole = rollout_seconds + update_seconds
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
        }
        | agreement
        for phase, seconds, tokens in (
            ("update", update_seconds, args.batch * (args.prompt_len + args.completion_len)),
            ("step", whole, new_tokens),
        )
    ]
    write_rows(args.out / "update.json", update_rows, args.commit)
    print(
        f"load {load_seconds:.1f} s, weights {weight_bytes / 1e9:.2f} GB, "
        f"first rollout {rollout_compile:.1f} s, first update {update_compile:.1f} s"
    )
    print(
        f"rollout {rollout_seconds:.3f} s = {new_tokens / rollout_seconds:.0f} tokens/s, "
        f"peak {rollout_peak / 1e9:.2f} GB"
    )
    print(f"update {update_seconds:.3f} s, step {whole:.3f} s, peak {peak_bytes() / 1e9:.2f} GB")
    print("rollout against trainer at σ = 0: " + ", ".join(f"{name} {value:.2e}" for name, value in agreement.items()))


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
