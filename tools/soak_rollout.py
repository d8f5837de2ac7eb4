"""Rollouts for several minutes: does memory stay constant after the first ones?

    python tools/soak_rollout.py MODEL [--minutes 10] [--batch 32] [--new-tokens 64]

Every rollout has new prompts, in groups of four, and new lengths, so that slots are refilled and compacted. Prints
resident and device memory; exit code 1 if either ends more than 2 % above its value after a fifth of the time.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np

from qerl_jax import Engine, LoraConfig, Prompts, Sampling, generate, keys, load_policy
from qerl_jax.io.assets import model_path

GROUP = 4
ALLOWED = 1.02


def resident_bytes() -> int:
    """Resident memory of this process now (Linux), or its peak elsewhere."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_bytes() -> int:
    """Device memory in live arrays."""
    return sum(array.nbytes for array in jax.live_arrays())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help='model directory, or "tiny"')
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    policy = load_policy(model_path(args.model), lora=LoraConfig(rank=8))
    sampling, engine = Sampling(args.new_tokens, num_generations=GROUP), Engine(slots=args.batch)
    count = 2 * args.batch // GROUP
    rng = np.random.default_rng(0)
    started, done, tokens, baseline, last = time.monotonic(), 0, 0, None, -1
    while (elapsed := time.monotonic() - started) < 60 * args.minutes:
        prompts = [
            rng.integers(0, policy.config.vocab_size, rng.integers(1, args.prompt_len + 1)).tolist()
            for _ in range(count)
        ]
        rollout = generate(
            policy,
            Prompts.from_lists(prompts, length=args.prompt_len),
            sampling,
            keys.for_step(0, keys.Purpose.SAMPLE, done),
            engine,
            rng.integers(1, args.new_tokens + 1, count),
        )
        tokens += int(np.asarray(rollout.lengths - rollout.prompt_lengths).sum())
        del rollout
        done += 1
        now = resident_bytes(), device_bytes()
        if baseline is None and elapsed > 12 * args.minutes:
            baseline = now
        if int(elapsed // 30) > last:
            last = int(elapsed // 30)
            print(f"{elapsed:6.0f} s, {done} rollouts, {tokens} tokens: resident {now[0] / 1e6:.1f} MB, "
                  f"arrays {now[1] / 1e6:.3f} MB", flush=True)  # fmt: skip
    if baseline is None:
        parser.error(f"one rollout takes longer than a fifth of --minutes {args.minutes}: nothing to compare with")
    grown = [after / before for before, after in zip(baseline, now, strict=True)]
    print(f"{done} rollouts, {tokens} tokens: memory {grown[0]:.3f} and {grown[1]:.3f} of what it was after a fifth")
    return int(max(grown) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
