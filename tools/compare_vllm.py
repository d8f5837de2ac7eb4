"""How far vLLM's rollouts and ours are apart: completions, log-probabilities, and the distribution that is sampled.

    python tools/compare_vllm.py MODEL [--adapter DIR] [--new-tokens 64] [--sigma 0.01] [--samples 16] [--out DIR]

MODEL: "tiny" or a directory, bf16 or NVFP4. Both engines share the GPU, vLLM (0.22.1) through `qerl_jax.backends` as in
a training run. Compared are the base, with `--adapter` the adapter on it, and that policy under noise of standard
deviation `--sigma` on its layer norms, which are read back from vLLM's model. Prompts are 16 arithmetic problems.

- `equal`: greedy completions that are the same in both engines.
- |Δ log p| of `--samples` completions of each prompt at temperature 1, each engine's own beside those of the trainer's
  forward pass over the same tokens.
- `z`: whether a sampler draws from the distribution of its log-probabilities, which those alone do not show. The sum of
  −log p of the sampled tokens less the entropy at each (`surprisal_of`) is so many standard deviations off 0.

A report goes to `vllm-NAME.json` in `--out`. The exit code is 1 where |z| of vLLM's samples is beyond 4 (by chance 6
times in 100,000).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import ROOT, add_commit, meta

from qerl_jax import LoraConfig, Policy, Prompts, Rollout, Sampling, aqn, generate, keys, load_policy, policy_logits
from qerl_jax.backends.vllm_engine import VllmEngine, Weights
from qerl_jax.backends.vllm_settings import check, engine_options
from qerl_jax.checkpoint.adapter import norm_tensors
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.config import Config
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.prompts import encode
from qerl_jax.models.lora import without_adapter
from qerl_jax.run.devices import use_device_memory
from qerl_jax.types import completion_ids

COUNT = 16  # prompts
ROWS = 16  # completions whose logits exist at one time
BEYOND_CHANCE = 4.0  # |z|


def variants(policy: Policy, has_adapter: bool, sigma: float) -> list[tuple[str, Policy, Weights]]:
    """(name, policy, what vLLM gets for it)."""
    plain = policy.replace(lora=without_adapter(policy.lora), norms=policy.base_norms or policy.norms)
    found = [("base", plain, Weights(LoraConfig(rank=0), {}, norm_tensors(plain)))]
    if has_adapter:
        found.append(("adapter", policy, Weights.of_policy(policy)))
    if sigma > 0:
        name, last, weights = found[-1]
        noisy = last.replace(norms=aqn.perturb(last.norms, sigma, keys.for_step(0, keys.Purpose.AQN, 0)))
        found.append((f"{name}, sigma {sigma:g}", noisy, Weights(weights.config, weights.lora, norm_tensors(noisy))))
    return found


@jax.jit
def moments(policy: Policy, rollout: Rollout) -> dict[str, jax.Array]:
    """Over the completions' tokens, under the policy: the sums of −log p − H, of the variance of −log p and of the
    rollout's |Δ log p|, and the largest of these; H is the entropy, in nats, of the distribution p that the token was
    drawn from.
    """
    logp = jax.nn.log_softmax(policy_logits(policy, rollout.tokens, rollout.attention_mask)[:, :-1])
    p, drawn = jnp.exp(logp), rollout.completion_mask[:, 1:]
    entropy = -(p * logp).sum(-1)
    variance = (p * logp**2).sum(-1) - entropy**2
    own = jnp.take_along_axis(logp, rollout.tokens[:, 1:, None], axis=-1)[..., 0]
    delta = jnp.where(drawn, jnp.abs(rollout.logprobs[:, 1:] - own), 0)
    excess, variance = (jnp.where(drawn, x, 0).sum() for x in (-own - entropy, variance))
    return {"excess": excess, "variance": variance, "delta": delta.sum(), "largest": delta.max()}


def surprisal_of(policy: Policy, rollout: Rollout) -> dict[str, float]:
    """How surprised the policy is by tokens that were drawn at temperature 1, and how far the rollout's
    log-probabilities are from its own. Where each token was drawn from the policy, given those before it, the
    differences −log p − H have mean 0 and are uncorrelated, so that z = Σ (−log p − H) / √(Σ variance) has mean 0 and
    variance 1.
    """
    rows = range(0, rollout.tokens.shape[0], ROWS)
    parts = [jax.device_get(moments(policy, jax.tree.map(lambda x, at=at: x[at : at + ROWS], rollout))) for at in rows]
    excess, variance, delta = (sum(float(part[name]) for part in parts) for name in ("excess", "variance", "delta"))
    tokens = int(rollout.completion_mask[:, 1:].sum())
    return {
        "tokens": tokens,
        "mean_excess": excess / tokens,
        "z": excess / np.sqrt(variance),
        "mean_abs_dlogp": delta / tokens,
        "max_abs_dlogp": float(max(part["largest"] for part in parts)),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Roll out by both engines; the report without its `meta`."""
    base, share = model_path(args.model), args.vllm_gpu_memory_utilization
    config = Config(model=args.model, rollout_backend="vllm", vllm_gpu_memory_utilization=share)
    use_device_memory(config.vllm_share)
    check(config, base)
    lora = None if args.adapter else LoraConfig(rank=0)
    policy = load_policy(base, lora=lora, dtype=jnp.dtype(config.dtype), adapter=args.adapter)
    problems = load_dataset("arithmetic", "test", "question", "answer", limit=COUNT).problems
    prompts = Prompts.from_lists(encode(problems, policy.tokenizer, ""))
    greedy = Sampling(args.new_tokens, temperature=0.0)
    sampled = Sampling(args.new_tokens, num_generations=args.samples)
    width, sequences = prompts.tokens.shape[1] + args.new_tokens, COUNT * args.samples
    options = engine_options(config, base, width, sequences, policy.lora_config.rank, config.vllm_share)
    rows, key = [], keys.for_step(0, keys.Purpose.SAMPLE, 0)
    with VllmEngine(options, policy.config) as engine:
        for name, actor, weights in variants(policy, args.adapter is not None, args.sigma):
            engine.set_weights(weights)
            theirs = completion_ids(engine.sample(prompts, greedy, key))
            ours = completion_ids(generate(actor, prompts, greedy, key))
            drawn = {"vllm": engine.sample(prompts, sampled, key), "ours": generate(actor, prompts, sampled, key)}
            equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
            row = {"variant": name, "layer_norms_read_back": len(weights.norms), "completions": COUNT, "equal": equal}
            rows.append(row | {sampler: surprisal_of(actor, rollout) for sampler, rollout in drawn.items()})
        version = engine.version
    return {
        "model": Path(args.model).name,
        "adapter": args.adapter and str(args.adapter),
        "vllm": version,
        "rows": rows,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapter", type=Path, help="PEFT directory")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=0.01, help="of the noise; 0: none")
    parser.add_argument("--samples", type=int, default=16, help="completions of a prompt at temperature 1")
    parser.add_argument("--vllm-gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--name", help="of the report; by default the model's")
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results" / "nvidia-h200")
    add_commit(parser)
    args = parser.parse_args()
    report = run(args)
    for row in report["rows"]:
        print(f"{row['variant']}: {row['equal']} of {row['completions']} greedy completions equal")
        for sampler in ("vllm", "ours"):
            found = row[sampler]
            delta = f"|Δ log p| {found['mean_abs_dlogp']:.3g} (at most {found['max_abs_dlogp']:.3g})"
            print(f"  {sampler}: {delta}, z {found['z']:+.1f} over {found['tokens']} tokens")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"vllm-{args.name or report['model']}.json"
    path.write_text(json.dumps({"meta": meta(args.commit), **report}, indent=1) + "\n")
    print(path)
    return int(any(abs(row["vllm"]["z"]) > BEYOND_CHANCE for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
