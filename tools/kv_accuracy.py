"""Mismatch between rollout and trainer with FP8 keys and values, at sigma = 0.

    python tools/kv_accuracy.py MODEL [--dtype float32] [--key-bias 0 32 300] [--all-layers]

MODEL: a directory or "tiny". Prompts: arithmetic problems; without a tokenizer, token 1.
Prints for each `kv_cache_dtype` the mean |Δ logprob| and KL(sampled ‖ trainer) of the sampled tokens (the estimator
`expm1(d) − d` that training logs), with the standard error over the completions. `--key-bias` sets one low-frequency
element of each key head's bias in layer 0, and that of each query head to 4, in rollout and trainer alike, similar to
Qwen2.5's biases. Beyond 3 √(head dim) that layer keeps the compute dtype; `--all-layers` forces e4m3.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import Engine, LoraConfig, Policy, Sampling, generate, keys, load_policy, token_logprobs
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.prompts import encode
from qerl_jax.io.assets import model_path
from qerl_jax.rollout import shapes
from qerl_jax.types import KV_CACHE_DTYPES

QUERY_BIAS = 4.0


def with_key_bias(policy: Policy, value: float) -> Policy:
    """The policy with one element of each head's bias in layer 0 set: `value` for keys, `QUERY_BIAS` for queries. It is
    the last of the head's first half, which has the lowest rotary frequency.
    """
    config = policy.config
    frozen = jax.tree.map(lambda leaf: leaf, policy.frozen)
    projection = frozen["layers"][0]["self_attn"]["qkv_proj"]
    heads = np.arange(config.num_heads + config.num_kv_heads)
    places = heads * config.head_dim + config.head_dim // 2 - 1
    values = jnp.where(heads < config.num_heads, QUERY_BIAS, value).astype(policy.dtype)
    projection["bias"] = projection["bias"].at[places].set(values)
    return policy.replace(frozen=frozen)


def prompts_of(policy: Policy, count: int) -> list[list[int]]:
    """Token lists: arithmetic problems, or [1] without a tokenizer."""
    if policy.tokenizer is None:
        return [[1]] * count
    problems = load_dataset("arithmetic", "test", "question", "answer", limit=count).problems
    return encode(problems, policy.tokenizer, "")


def measure(policy: Policy, prompts: list[list[int]], sampling: Sampling, engine: Engine) -> str:
    """Compare the log-probabilities of a rollout with the trainer's."""
    rollout = generate(policy, prompts, sampling, keys.for_step(0, keys.Purpose.SAMPLE, 0), engine)
    trainer = jax.jit(token_logprobs)(policy, rollout.tokens, rollout.attention_mask)
    mask = np.asarray(rollout.completion_mask)[:, 1:]
    d = np.where(mask, np.asarray(trainer) - np.asarray(rollout.logprobs)[:, 1:], 0.0).astype(np.float64)
    parts = []
    for name, each in (("mean |Δ logprob|", np.abs(d)), ("KL", np.expm1(d) - d)):
        total, weight = each.sum(axis=1), mask.sum(axis=1)
        mean = total.sum() / weight.sum()
        error = (
            np.sqrt(((total - mean * weight) ** 2).sum()) / weight.sum()
        )  # standard error of a ratio of sums over independent rows
        parts.append(f"{name} {mean:.2e} ± {error:.0e}")
    return f"{', '.join(parts)}, {int(mask.sum())} tokens"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help='model directory, or "tiny"')
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--key-bias", type=float, nargs="+", default=[0.0], help="0: the model's own")
    parser.add_argument("--all-layers", action="store_true")
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=200)
    args = parser.parse_args()
    policy = load_policy(model_path(args.model), lora=LoraConfig(rank=0), dtype=jnp.dtype(args.dtype))
    prompts = prompts_of(policy, args.completions)
    if args.all_layers:
        shapes.max_key_bias = lambda _: float("inf")
    for bias in args.key_bias:
        biased = with_key_bias(policy, bias) if bias else policy
        for name in KV_CACHE_DTYPES:
            line = measure(biased, prompts, Sampling(args.new_tokens), Engine(slots=32, kv_cache_dtype=name))
            note = shapes.cache_note(biased, name)
            about = f"{args.model} {args.dtype}, key bias {bias:g}, {name}"
            print(f"{about}: {line}" + (f" ({note})" if note else ""), flush=True)


if __name__ == "__main__":
    main()
