"""How far noise on the layer norms and noise on the adapters move a policy: KL of clean and noisy policy.

    python tools/compare_noise.py [MODEL] [--dataset word_problems:2-6] [--weight-format nvfp4] [--out DIR]

MODEL samples completions of the dataset's training problems at temperature 1. On those, from logits in fp32,
KL(clean ‖ noisy) of the next token in nats is averaged over all completion tokens and several draws of the noise, for
each `noise_target` and σ, with fresh adapters; its standard error is over draws. KL grows with σ², so that the last
column, the root of KL(norms) / KL(target) at the same σ, is the factor of σ at which the target's KL is that of the
norms. Rewards are not looked at. Rows go to `noise.json` of tools/results/cpu, or of `--out`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from record import ROOT, add_commit, write_rows

from qerl_jax import LoraConfig, Policy, Sampling, aqn, generate, keys, load_policy
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.prompts import encode
from qerl_jax.io.rounding import kl_divergence
from qerl_jax.rl.logprobs import policy_logits
from qerl_jax.types import Rollout

SIGMAS = (3e-3, 1e-2, 3e-2, 1e-1)
BATCH = 8  # sequences of one forward pass


def mean_kl(policy: Policy, rollout: Rollout, target: str, sigma: float, key: Array) -> float:
    """Mean KL a completion token, in nats, under one draw of the noise."""
    noisy = policy.replace(**{target: jax.jit(aqn.PERTURBATIONS[target])(getattr(policy, target), sigma, key)})
    completion, found = np.asarray(rollout.completion_mask)[:, 1:], []  # the logits before a token predict it
    for first in range(0, len(rollout.tokens), BATCH):
        rows = slice(first, first + BATCH)
        inputs = rollout.tokens[rows], rollout.attention_mask[rows]
        logits = [np.asarray(policy_logits(each, *inputs))[:, :-1] for each in (policy, noisy)]
        found.append(kl_divergence(*logits)[completion[rows]])
    return float(np.concatenate(found).mean())


def compare(policy: Policy, rollout: Rollout, sigmas: list[float], draws: int) -> list[dict[str, Any]]:
    """A row for each target and σ."""
    found = []
    for sigma in sigmas:
        for target in aqn.PERTURBATIONS:
            own = [keys.for_step(0, keys.Purpose.AQN, draw) for draw in range(draws)]
            values = [mean_kl(policy, rollout, target, sigma, key) for key in own]
            row = {"noise_target": target, "sigma": sigma, "draws": draws, "kl": float(np.mean(values))}
            found.append(row | {"kl_standard_error": float(np.std(values, ddof=1) / draws**0.5)})
            of_norms = next(one["kl"] for one in found if (one["noise_target"], one["sigma"]) == ("norms", sigma))
            found[-1]["sigma_factor"] = (of_norms / found[-1]["kl"]) ** 0.5
            print("{noise_target} σ {sigma:g}: KL {kl:.3g} ± {kl_standard_error:.1g}".format(**found[-1]))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny", help='model directory, or "tiny"')
    parser.add_argument("--dataset", default="arithmetic")
    parser.add_argument("--weight-format", default=None, help="as in qerl_jax.train")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--sigmas", type=float, nargs="+", default=list(SIGMAS))
    parser.add_argument("--prompts", type=int, default=32, help="problems, one completion each")
    parser.add_argument("--max-completion-length", type=int, default=320)
    parser.add_argument("--draws", type=int, default=4, help="draws of the noise, at least 2")
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results" / "cpu", help="folder of noise.json")
    add_commit(parser)
    args = parser.parse_args()
    if args.draws < 2:
        parser.error(f"--draws {args.draws}: at least 2")
    policy = load_policy(args.model, args.weight_format, LoraConfig(args.rank), jnp.float32, matmul_kernel="xla")
    prompts = encode(load_dataset(args.dataset, "train", limit=args.prompts).problems, policy.tokenizer, "")
    sampling = Sampling(args.max_completion_length, temperature=1.0)
    rollout = generate(policy, prompts, sampling, keys.for_step(0, keys.Purpose.SAMPLE, 0))
    about = {"model": Path(args.model).name, "dataset": args.dataset, "format": args.weight_format, "rank": args.rank}
    about["compared_tokens"] = int(rollout.completion_mask.sum())
    rows = [about | row for row in compare(policy, rollout, args.sigmas, args.draws)]
    write_rows(args.out / "noise.json", rows, args.commit)


if __name__ == "__main__":
    main()
