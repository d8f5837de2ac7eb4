"""Where vLLM's greedy completions and ours part ways, and how far the log-probabilities are apart.

    python tools/compare_vllm.py MODEL [--adapter DIR] [--new-tokens 64] [--sigma 0.01] [--samples 16] [--out DIR]

MODEL: "tiny" or a directory, bf16 or NVFP4. Both engines share the GPU, vLLM (0.22.1) through `qerl_jax.backends` as in
a training run. Compared are the base, with `--adapter` the adapter on it, and that policy under noise of standard
deviation `--sigma` on its layer norms, which are read back from vLLM's model.

Prompts are arithmetic problems, or random tokens without a tokenizer. Our log-probabilities are those of the trainer's
forward pass, over our completions and over vLLM's; vLLM's are those it returns while it decodes.

- `gap`: at the first token that differs, how much more likely each engine finds its own token than the other's. The two
  gaps add up to the differences of both tokens' log-probabilities between the engines, so they are rounding, and no
  other model, where their sum is at most twice the largest |Δ log p| over all of vLLM's tokens: `explained`. vLLM tells
  its 20 most likely tokens; if ours is not among them, its gap is a lower bound (`>`), and nothing is explained.
- |Δ log p| of vLLM's tokens, by position.
- `surprisal`: whether a sampler draws from the distribution of its log-probabilities, which those alone do not show.
  With `--samples` completions of each prompt at temperature 1, the sum of −log p of their tokens less the entropy at
  each (`surprisal_of`) is as many standard deviations off 0 as `z` says, for vLLM and for ours.

A report goes to `vllm-NAME.json` in `--out`. The exit code is 1 where a difference is not explained, or z of vLLM's
samples beyond 4 (by chance 6 times in 100,000).
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
from compare_formats import prompts_of
from record import ROOT, add_commit, meta
from rich.console import Console
from rich.table import Table

from qerl_jax import (
    LoraConfig,
    Policy,
    Prompts,
    Rollout,
    Sampling,
    aqn,
    generate,
    keys,
    load_policy,
    policy_logits,
    token_logprobs,
)
from qerl_jax.backends.vllm_engine import VllmEngine, Weights
from qerl_jax.backends.vllm_rollout import Completion, sampling_arguments
from qerl_jax.backends.vllm_settings import check, engine_options
from qerl_jax.config import Config
from qerl_jax.io.adapter import norm_tensors
from qerl_jax.io.assets import model_path
from qerl_jax.models.lora import without_adapter
from qerl_jax.run.devices import use_device_memory
from qerl_jax.types import completion_ids

COUNT, TOLD = 16, 20  # prompts; log-probabilities that vLLM tells at each position
ROWS = 16  # completions whose logits exist at one time
BEYOND_CHANCE = 4.0  # |z|
BORDERS = (1, 4, 16, 64, 256, 1024, 4096)  # positions, of the table
logprobs_of = jax.jit(token_logprobs)


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


def by_trainer(policy: Policy, prompts: list[list[int]], completions: list[list[int]]) -> list[np.ndarray]:
    """Log-probabilities of completions' tokens by the trainer's forward pass."""
    rows = Prompts.from_lists([[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)])
    mask = np.arange(rows.tokens.shape[1]) < np.asarray(rows.lengths)[:, None]
    found = np.asarray(logprobs_of(policy, rows.tokens, mask))
    return [
        found[row, len(prompt) - 1 : len(prompt) - 1 + len(ids)]
        for row, (prompt, ids) in enumerate(zip(prompts, completions, strict=True))
    ]


@jax.jit
def moments(policy: Policy, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """Sums over the completions' tokens of −log p − H and of the variance of −log p, under the policy; H is the
    entropy, in nats, of the distribution p that the token was drawn from.
    """
    logp = jax.nn.log_softmax(policy_logits(policy, rollout.tokens, rollout.attention_mask)[:, :-1])
    p, drawn = jnp.exp(logp), rollout.completion_mask[:, 1:]
    entropy = -(p * logp).sum(-1)
    variance = (p * logp**2).sum(-1) - entropy**2
    own = jnp.take_along_axis(logp, rollout.tokens[:, 1:, None], axis=-1)[..., 0]
    return tuple(jnp.where(drawn, x, 0).sum() for x in (-own - entropy, variance))


def surprisal_of(policy: Policy, rollout: Rollout) -> dict[str, float]:
    """How surprised the policy is by tokens that were drawn at temperature 1. Where each was drawn from the policy,
    given those before it, the differences −log p − H have mean 0 and are uncorrelated, so that
    z = Σ (−log p − H) / √(Σ variance) has mean 0 and variance 1.
    """
    rows = range(0, rollout.tokens.shape[0], ROWS)
    parts = [jax.device_get(moments(policy, jax.tree.map(lambda x, at=at: x[at : at + ROWS], rollout))) for at in rows]
    excess, variance = np.sum(parts, axis=0, dtype=np.float64)
    tokens = int(rollout.completion_mask[:, 1:].sum())
    return {"tokens": tokens, "mean_excess": float(excess / tokens), "z": float(excess / np.sqrt(variance))}


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token in which two completions differ; None where they are equal."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def compare(
    ours: list[list[int]], our_logps: list[np.ndarray], theirs: list[Completion], their_logps: list[np.ndarray]
) -> dict[str, Any]:
    """The row of a variant.

    Args:
      ours: our completions.
      our_logps: the trainer's log-probabilities of our tokens.
      theirs: vLLM's completions.
      their_logps: the trainer's log-probabilities of vLLM's tokens.
    """
    deltas = [
        np.asarray([told[token] for token, told in zip(ids, by_token, strict=True)]) - trainer
        for (ids, by_token, _), trainer in zip(theirs, their_logps, strict=True)
    ]
    largest = float(max(np.abs(delta).max() for delta in deltas))
    differences = []
    for number, (own, (ids, by_token, _)) in enumerate(zip(ours, theirs, strict=True)):
        at = first_difference(own, ids)
        if at is None:
            continue
        told, is_told = by_token[at], own[at] in by_token[at]
        gap = told[ids[at]] - (told[own[at]] if is_told else min(told.values()))
        own_gap = float(our_logps[number][at] - their_logps[number][at])
        differences.append(
            {
                **{"prompt": number, "position": at, "ours": own[at], "vllm": ids[at]},
                **{"our_gap": own_gap, "vllm_gap": gap, "vllm_gap_is_lower_bound": not is_told},
                "explained": is_told and own_gap + gap <= 2 * largest,
            }
        )
    positions = []
    for low, high in zip((0, *BORDERS), BORDERS, strict=False):
        values = np.abs(np.concatenate([delta[low:high] for delta in deltas]))
        if len(values):
            mean, most = float(values.mean()), float(values.max())
            positions.append({"from": low, "to": high - 1, "tokens": len(values), "mean": mean, "max": most})
    every = np.concatenate(deltas)
    return {
        "completions": len(ours),
        "equal": len(ours) - len(differences),
        "tokens": len(every),
        "mean_abs_dlogp": float(np.abs(every).mean()),
        "mean_dlogp": float(every.mean()),
        "max_abs_dlogp": largest,
        "by_position": positions,
        "first_differences": differences,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Roll out by both engines; the report without its `meta`."""
    base = model_path(args.model)
    config = Config(
        model=args.model, rollout_backend="vllm", vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization
    )
    use_device_memory(config.vllm_share)
    check(config, base)
    lora = None if args.adapter else LoraConfig(rank=0)
    policy = load_policy(base, lora=lora, dtype=jnp.dtype(config.dtype), adapter=args.adapter)
    prompts = prompts_of(policy)[:COUNT]
    width = max(map(len, prompts)) + args.new_tokens
    greedy = Sampling(args.new_tokens, temperature=0.0)
    asked = Prompts.from_lists(prompts), Sampling(args.new_tokens, num_generations=args.samples)
    arguments = sampling_arguments(greedy, policy.config.eos_token_ids) | {"logprobs": TOLD}
    options = engine_options(config, base, width, COUNT, policy.lora_config.rank, config.vllm_share)
    rows = []
    with VllmEngine(options, policy.config) as engine:
        for name, actor, weights in variants(policy, args.adapter is not None, args.sigma):
            engine.set_weights(weights)
            theirs = engine.complete(prompts, [arguments] * len(prompts))
            ours = completion_ids(generate(actor, prompts, greedy, keys.for_step(0, keys.Purpose.SAMPLE, 0)))
            our_logps, their_logps = (by_trainer(actor, prompts, ids) for ids in (ours, [ids for ids, *_ in theirs]))
            row = compare(ours, our_logps, theirs, their_logps)
            key = keys.for_step(0, keys.Purpose.SAMPLE, 1)
            drawn = {"vllm": engine.sample(actor, *asked, key), "ours": generate(actor, *asked, key)}
            row["surprisal"] = {sampler: surprisal_of(actor, rollout) for sampler, rollout in drawn.items()}
            rows.append({"variant": name, "layer_norms_read_back": len(weights.norms), **row})
        version = engine.version
    return {
        "model": Path(args.model).name,
        "adapter": args.adapter and str(args.adapter),
        "vllm": version,
        "rows": rows,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report."""
    for row in report["rows"]:
        title = (
            f"{report['model']}, {row['variant']}: {row['equal']} of {row['completions']} greedy completions equal, "
            f"|Δ log p| {row['mean_abs_dlogp']:.3g} (at most {row['max_abs_dlogp']:.3g}) over {row['tokens']} tokens"
        )
        console.print(title, markup=False, soft_wrap=True)
        for sampler, found in row["surprisal"].items():
            line = f"samples of {sampler}: −log p − H {found['mean_excess']:+.2g} nats a token, z {found['z']:+.1f}"
            console.print(f"{line} over {found['tokens']} tokens", markup=False, soft_wrap=True)
        table = Table("positions", "tokens", "mean |Δ log p|", "max")
        for part in row["by_position"]:
            numbers = (str(part["tokens"]), f"{part['mean']:.3g}", f"{part['max']:.3g}")
            table.add_row(f"{part['from']}–{part['to']}", *numbers)
        console.print(table)
        if row["first_differences"]:
            table = Table("prompt", "position", "ours", "vLLM", "our gap", "vLLM's gap", "explained")
            for found in row["first_differences"]:
                bound = ">" if found["vllm_gap_is_lower_bound"] else ""
                gaps = f"{found['our_gap']:.3g}", f"{bound}{found['vllm_gap']:.3g}"
                tokens = (str(found[name]) for name in ("prompt", "position", "ours", "vllm"))
                table.add_row(*tokens, *gaps, "yes" if found["explained"] else "NO")
            console.print(table)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapter", type=Path, help="PEFT directory")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=0.01, help="of the noise; 0: none")
    parser.add_argument("--samples", type=int, default=16, help="completions of a prompt, for the surprisal")
    parser.add_argument("--vllm-gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--name", help="of the report; by default the model's")
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results" / "nvidia-h200")
    add_commit(parser)
    return parser


def main() -> int:
    """Command line."""
    args = parser().parse_args()
    report = run(args)
    show(report, Console(highlight=False))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"vllm-{args.name or report['model']}.json"
    path.write_text(json.dumps({"meta": meta(args.commit), **report}, indent=1) + "\n")
    print(path)
    unexplained = [found for row in report["rows"] for found in row["first_differences"] if not found["explained"]]
    return int(bool(unexplained) or any(abs(row["surprisal"]["vllm"]["z"]) > BEYOND_CHANCE for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
