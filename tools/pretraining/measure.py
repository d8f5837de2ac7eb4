"""What a pretrained policy can do on held-out problems, and how its weights take quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from qerl_kernels.nvfp4_matmul import reference

from qerl_jax import Engine, LoraConfig, Sampling, generate, keys, load_dataset, load_policy
from qerl_jax.data.prompts import completion_texts, encode_problems, to_prompts
from qerl_jax.data.word_problems import HIGH, LOW
from qerl_jax.evaluation.harness import ANSWER, graded_items
from qerl_jax.evaluation.statistics import ks, pass_at_k
from qerl_jax.evaluation.summary import Item, summarize
from qerl_jax.io.safetensors import open_checkpoint
from qerl_jax.models.formats import nvfp4

DATASET = "word_problems"
PROMPT_LENGTH, COMPLETION_LENGTH = 256, 288
SLOTS = 1024


def evaluate_policy(
    directory: Path, weight_format: str, dtype: jnp.dtype, problems: int, generations: int
) -> dict[str, Any]:
    """Figures at temperature 1 on the first held-out problems of `word_problems`.

    Returns pass@1 with its interval, pass@k, entropy (nats a token, mean over all completion tokens), the share of
    problems with both right and wrong among the first 8 completions, and pass@1 and pass@n by number of operations.
    """
    policy = load_policy(directory, weight_format, LoraConfig(rank=0), dtype)
    found = load_dataset(DATASET, "test", limit=problems)
    encoded, _ = encode_problems(found.problems, policy.tokenizer, "", PROMPT_LENGTH, "error")
    width = max(len(item.tokens) for item in encoded)
    prompts = to_prompts(encoded, width, policy.config.pad_token_id)
    sampling = Sampling(COMPLETION_LENGTH, temperature=1.0, num_generations=generations)
    key = keys.for_step(0, keys.Purpose.EVALUATE, 0)
    rollout = generate(policy, prompts, sampling, key, Engine(slots=min(SLOTS, problems * generations)))
    texts = completion_texts(rollout, policy.tokenizer)
    items = graded_items([item.problem for item in encoded], texts, rollout, ANSWER)
    whole = summarize(items)
    tokens = float(np.asarray(rollout.completion_mask).sum())
    return {
        "problems": problems,
        "generations": generations,
        "pass_at_1": whole.accuracy,
        "pass_at_1_interval": [whole.low, whole.high],
        **{f"pass_at_{k}": estimate(items, k) for k in ks(generations) if k > 1},
        "entropy": float(np.asarray(rollout.entropies, np.float64).sum() / tokens),
        "mean_length": whole.mean_length,
        "truncated": whole.truncated,
        "well_formed": whole.format,
        "mixed_groups": mixed_groups(items),
        **by_operations(items),
        "example": texts[problems // 2 * generations],
    }


def estimate(items: list[Item], k: int) -> float:
    """Mean pass@k."""
    return float(np.mean([pass_at_k(len(item.verdicts), item.correct, k) for item in items]))


def mixed_groups(items: list[Item], group: int = 8) -> float:
    """Share of groups, the first completions of each problem, in which some are correct and some are not: the others
    teach nothing.
    """
    correct = [item.verdicts[:group].count("correct") for item in items]
    return float(np.mean([0 < count < len(items[0].verdicts[:group]) for count in correct]))


def by_operations(items: list[Item]) -> dict[str, float]:
    """pass@1 and pass@n by number of operations, which `word_problems` gives in turn."""
    n, found = len(items[0].verdicts), {}
    for operations in range(LOW, HIGH + 1):
        part = [item for item in items if LOW + item.id % (HIGH - LOW + 1) == operations]
        if part:
            found[f"pass_at_1_of_{operations}"] = estimate(part, 1)
            found[f"pass_at_{n}_of_{operations}"] = estimate(part, n)
    return found


def weight_statistics(directory: Path) -> dict[str, float]:
    """Means over the projections' matrices: relative NVFP4 error ‖W' − W‖ / ‖W‖, largest magnitude over the standard
    deviation, excess kurtosis, and the mean over quantization blocks of their largest magnitude, over the standard
    deviation (2.08 for normal weights). `norm_spread` is the standard deviation of all layer norm weights, `norm_mean`
    their mean: noise of σ on a norm is a relative change of σ / weight.
    """
    tensors = open_checkpoint(directory)
    rows, norms = [], []
    for name in tensors:
        array = tensors[name]
        if name.endswith("layernorm.weight"):
            norms.append(array.astype(np.float64))
        if "_proj.weight" not in name:
            continue
        exact = array.astype(np.float64)
        divisor = nvfp4.global_scale(nvfp4.max_magnitude(array), array.dtype)
        stored = np.asarray(reference.dequantize(nvfp4.quantize(array, divisor)), np.float64)
        deviation = exact.std()
        rows.append(
            {
                "nvfp4_error": np.linalg.norm(stored - exact) / np.linalg.norm(exact),
                "largest": np.abs(exact).max() / deviation,
                "excess_kurtosis": np.mean((exact - exact.mean()) ** 4) / deviation**4 - 3,
                "block_amax": np.abs(exact).reshape(-1, 16).max(-1).mean() / deviation,
            }
        )
    spread = {"norm_mean": float(np.mean(norms)), "norm_spread": float(np.std(norms))}
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]} | spread
