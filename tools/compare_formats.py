"""What the weight formats lose: NVFP4, MXFP4, NF4 and BF16 made from the same weights.

    python tools/compare_formats.py [MODEL]

MODEL: an unquantized directory, or "tiny" (default). The seven projections of each layer are quantized, as in training;
all arithmetic is fp32, so that nothing but the format differs from the stored weights. Two kinds of errors:

- of weights, ‖W' − W‖ / ‖W‖ (Frobenius): mean over projections, and the worst;
- of logits, over the tokens that the unquantized model writes greedily after 64 prompts (arithmetic problems; random
  tokens where the model has no tokenizer): mean |Δ logit|, mean KL(unquantized ‖ quantized) of the next token in nats,
  its standard error over the sequences, and the share of tokens at which both have the same most likely token.

`bits_per_weight` counts codes and block scales; NVFP4 has one fp32 global scale for each tensor in addition. A format
whose blocks do not fit the input features is left out, with a line that says so. Rows go to `formats.json` of
tools/results/cpu, or of `--out`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from qerl_kernels.formats import Nvfp4
from record import ROOT, add_commit, write_rows

from qerl_jax import LoraConfig, Policy, Sampling, generate, keys, load_policy
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.prompts import encode
from qerl_jax.models.formats import WEIGHT_FORMATS, Dense, Weight, format_of
from qerl_jax.rl.logprobs import policy_logits
from qerl_jax.types import Rollout

PROMPTS, NEW_TOKENS = 64, 128
RANDOM_PROMPT_LENGTH = 16
logits_of = jax.jit(policy_logits)


def is_weight(node: object) -> bool:
    """Whether a node of the frozen tree is a projection's weight."""
    return isinstance(node, Weight)


def dequantize(weight: Weight) -> np.ndarray:
    """The fp32 matrix that a weight stands for."""
    return np.asarray(format_of(weight).values(weight))


def stored_bits(weight: Weight) -> int:
    """Bits of codes and block scales."""
    leaves = [weight.codes, weight.scales] if isinstance(weight, Nvfp4) else jax.tree.leaves(weight)
    return 8 * sum(leaf.nbytes for leaf in leaves)


def in_format(model: str, weight_format: str) -> tuple[Policy, float]:
    """The model in fp32 arithmetic with its projections in a format, and bits a weight."""
    policy = load_policy(model, weight_format, LoraConfig(rank=0), jnp.float32, matmul_kernel="xla")
    if weight_format == "bf16":  # an fp32 policy has the weights as stored
        rounded = jax.tree.map(
            lambda node: Dense(node.values.astype(jnp.bfloat16)) if is_weight(node) else node,
            policy.frozen,
            is_leaf=is_weight,
        )
        policy = policy.replace(frozen=rounded)
    weights = [node for node in jax.tree.leaves(policy.frozen, is_leaf=is_weight) if is_weight(node)]
    return policy, sum(map(stored_bits, weights)) / sum(np.prod(weight.shape) for weight in weights)


def matrices(policy: Policy) -> Iterator[tuple[str, np.ndarray]]:
    """(name, fp32 matrix) of every projection; those that are fused at run time one by one."""
    for layer in range(policy.config.num_layers):
        modules = policy.frozen["layers"][layer]
        for spec in policy.config.projections():
            (block, name, _), parts = spec.path, spec.part_rows()
            ends = np.cumsum(list(parts.values()))
            for part, rows in zip(parts, np.split(dequantize(modules[block][name]["weight"]), ends[:-1]), strict=True):
                yield f"{layer}.{part}", rows


def weight_errors(exact: Policy, policy: Policy) -> dict[str, float | str]:
    """Relative Frobenius norms of the projections' differences: their mean, the worst and its name."""
    errors = {}
    for (name, expected), (_, found) in zip(matrices(exact), matrices(policy), strict=True):
        errors[name] = relative_error(expected, found)
    worst = max(errors, key=errors.get)
    mean = float(np.mean(list(errors.values())))
    return {"weight_error_mean": mean, "weight_error_worst": errors[worst], "worst_projection": worst}


def relative_error(expected: np.ndarray, found: np.ndarray) -> float:
    """‖found − expected‖ / ‖expected‖, Frobenius, in float64."""
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def logit_errors(expected: np.ndarray, found: np.ndarray) -> dict[str, np.ndarray]:
    """Mean |Δ logit|, KL(expected ‖ found) in nats and equality of the argmax, for each row of logits [tokens, V]."""
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    p, q = (x - x.max(-1, keepdims=True) for x in (expected, found))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return {
        "mean_abs_dlogit": np.abs(found - expected).mean(-1),
        "kl": (np.exp(p) * (p - q)).sum(-1),
        "top1_agreement": (expected.argmax(-1) == found.argmax(-1)).astype(np.float64),
    }


def prompts_of(policy: Policy) -> list[list[int]]:
    """Arithmetic problems, or random tokens without a tokenizer."""
    if policy.tokenizer is None:
        tokens = np.random.default_rng(0).integers(policy.config.vocab_size, size=(PROMPTS, RANDOM_PROMPT_LENGTH))
        return tokens.tolist()
    problems = load_dataset("arithmetic", "test", "question", "answer", limit=PROMPTS).problems
    return encode(problems, policy.tokenizer, "")


def compare_logits(exact: Policy, policy: Policy, rollout: Rollout) -> dict[str, float | int]:
    """Means of `logit_errors` over all completion tokens, one sequence at a time."""
    mask, attended = np.asarray(rollout.completion_mask), np.asarray(rollout.attention_mask)
    found: dict[str, list[np.ndarray]] = {}
    for row in range(len(mask)):
        tokens, real = rollout.tokens[row : row + 1], attended[row : row + 1]
        before = np.flatnonzero(mask[row]) - 1  # the logits before a token predict it
        both = (np.asarray(logits_of(each, tokens, real))[0, before] for each in (exact, policy))
        for name, values in logit_errors(*both).items():
            found.setdefault(name, []).append(values)
    means = {name: float(np.concatenate(values).mean()) for name, values in found.items()}
    deviations = [(values - means["kl"]).sum() for values in found["kl"]]  # sequences are independent
    tokens = int(mask.sum())
    return {**means, "kl_standard_error": float(np.linalg.norm(deviations)) / tokens, "compared_tokens": tokens}


def compare(model: str) -> list[dict]:
    """A row for each format that fits the model."""
    exact = load_policy(model, "bf16", LoraConfig(rank=0), jnp.float32, matmul_kernel="xla")
    prompts = prompts_of(exact)
    greedy = Sampling(NEW_TOKENS, temperature=0.0)
    rollout = generate(exact, prompts, greedy, keys.for_step(0, keys.Purpose.SAMPLE, 0))
    rows = []
    for weight_format in WEIGHT_FORMATS:
        try:
            policy, bits = in_format(model, weight_format)
        except ValueError as error:
            print(f"{weight_format} is left out: {error}")
            continue
        about = {"model": Path(model).name, "format": weight_format, "bits_per_weight": bits}
        rows.append({**about, **weight_errors(exact, policy), **compare_logits(exact, policy, rollout)})
    return rows


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| format | bits a weight | weights, mean | weights, worst | mean abs. Δ logit | KL | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        worst = f"{row['weight_error_worst']:.3g} ({row['worst_projection']})"
        kl = f"{row['kl']:.2g} ± {row['kl_standard_error']:.1g}"
        errors = f"{row['weight_error_mean']:.3g} | {worst} | {row['mean_abs_dlogit']:.3g} | {kl}"
        lines.append(
            f"| {row['format']} | {row['bits_per_weight']:.4g} | {errors} | {100 * row['top1_agreement']:.2f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny", help='model directory, or "tiny"')
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results" / "cpu", help="folder of formats.json")
    add_commit(parser)
    args = parser.parse_args()
    rows = compare(args.model)
    print(f"{args.model}, {PROMPTS} prompts, {rows[0]['compared_tokens']} tokens\n{table(rows)}")
    write_rows(args.out / "formats.json", rows, args.commit)


if __name__ == "__main__":
    main()
