"""One whole GRPO step on a GPU: rollout tokens/s, update and step seconds, peak memory, and how well rollout and
trainer agree.

    python tools/make_checkpoint.py 7B /data/qwen-7b --format nvfp4
    python tools/bench_step.py /data/qwen-7b --name 7b [--batch 8] [--prompt-len 256] [--completion-len 128]

Sequences have a fixed length (no EOS), temperature 1, log-probabilities on, adapters on all seven projections. Medians
of `--repeats` after one warm-up; a run's time is a wall clock around work that is waited for. Writes rows of
rollout.json and update.json into `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import (
    Config,
    LoraConfig,
    Prompts,
    aqn,
    generate,
    group_advantages,
    grpo_step,
    init_state,
    keys,
    load_policy,
    make_batch,
)


def timed(function: Callable[[int], Any], repeats: int) -> tuple[Any, float]:
    """Last result and median seconds of `function(i)`, the first call left out."""
    result, seconds = jax.block_until_ready(function(0)), []
    for i in range(1, repeats + 1):
        start = time.perf_counter()
        result = jax.block_until_ready(function(i))
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def peak_bytes() -> int:
    """Most device memory in use so far; 0 where the backend does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def shell(command: str) -> str:
    """Output of a command, empty if it fails."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()


def write_rows(path: Path, rows: list[dict], commit: str) -> None:
    """Add rows to a result file; rows of the same case are replaced."""
    meta = {
        "gpu": jax.local_devices()[0].device_kind,
        "date": str(date.today()),
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
        "jax": jax.__version__,
        "driver": shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
    }
    measured = {
        "us",
        "seconds",
        "tokens_per_s",
        "decode_ms_per_step",
        "peak_bytes",
        "commit",
        "kl",
        "mean_abs_dlogp",
        "token_mult_prob_error",
    }

    def case(row: dict) -> tuple:
        return tuple(sorted((k, str(v)) for k, v in row.items() if k not in measured))

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = [{**row, "commit": meta["commit"]} for row in rows]
    kept = [row for row in old if case(row) not in {case(row) for row in fresh}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "rows": kept + fresh}, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", required=True, help='model of the rows, "7b"')
    parser.add_argument("--weight-format", help="quantize while loading")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--completion-len", type=int, default=128)
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=shell("git rev-parse --short HEAD"), help="for a copy without its .git")
    args = parser.parse_args()

    started = time.perf_counter()
    policy = load_policy(args.model, args.weight_format, LoraConfig(rank=args.lora_rank), jnp.dtype(args.dtype))
    jax.block_until_ready(policy.frozen)
    load_seconds, weight_bytes = (
        time.perf_counter() - started,
        sum(leaf.nbytes for leaf in jax.tree.leaves(policy.frozen)),
    )
    policy = policy.replace(config=dataclasses.replace(policy.config, eos_token_ids=()))
    config = Config(
        batch_size=args.batch,
        num_generations=args.group,
        max_prompt_length=args.prompt_len,
        max_completion_length=args.completion_len,
        num_iterations=1,
        lora_rank=args.lora_rank,
        dtype=args.dtype,
    )
    rng = np.random.default_rng(0)
    prompts = Prompts.from_lists(
        rng.integers(0, policy.config.vocab_size, (args.batch // args.group, args.prompt_len)).tolist()
    )

    def rollout(i: int) -> Any:
        return generate(policy, prompts, config.sampling, keys.for_step(0, keys.Purpose.SAMPLE, i))

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
    noisy = jax.jit(aqn.perturb)(policy.norms, 1e-2, jax.random.key(0))
    assert aqn.count(noisy) == 2 * policy.config.num_layers

    stored = args.weight_format or (
        "nvfp4" if "quantization_config" in (args.model / "config.json").read_text() else "bf16"
    )
    common = {
        "model": args.name,
        "format": stored,
        "impl": "qerl",
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "lora_rank": args.lora_rank,
    }
    new_tokens = args.batch * args.completion_len
    whole = rollout_seconds + update_seconds
    rollout_row = common | {
        "new_tokens": args.completion_len,
        "lengths": "fixed",
        "tokens_per_s": new_tokens / rollout_seconds,
        "decode_ms_per_step": 1e3 * rollout_seconds / args.completion_len,
        "peak_bytes": rollout_peak,
    }
    agreement = {
        "kl": float(metrics["sampling/kl"]),
        "mean_abs_dlogp": float(metrics["sampling/sampling_logp_difference/mean"]),
        "token_mult_prob_error": float(metrics["sampling/token_mult_prob_error"]),
    }
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
    write_rows(args.out / "rollout.json", [rollout_row], args.commit)
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


if __name__ == "__main__":
    main()
