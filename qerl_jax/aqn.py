"""Adaptive Quantization Noise (QeRL, arXiv 2510.11696, §3.3, eq. 7–12, Alg. 1): the schedule and the perturbation,
both pure functions, of L layers.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from qerl_jax.programs import program


@runtime_checkable
class NoiseConfig(Protocol):
    """Fields that `sigma` reads; `qerl_jax.config.Config` has them, and refuses what cannot be computed."""

    num_iterations: int
    sigma_start: float
    sigma_end: float
    num_stages: int
    noise_schedule: str
    noise_formula: str


def sigma(config: NoiseConfig, step: int, total_steps: int) -> float:
    """Standard deviation of the noise at rollout `step` of M = `total_steps`.

    A run has K = `num_stages` stages, `k = min(u · K // (M I), K − 1)`, where I = `num_iterations` and u = step · I + 1
    counts the first update made from the rollout (QeRL: `update_step` is raised before a batch is made, then
    `get_sigma_by_step`). Stage 0 has no noise. With s = `sigma_start`, e = `sigma_end` and x = `(k − 1) / (K − 2)`
    (formula `qerl`, the released code: the last stage reaches `sigma_end` exactly) or x = `(k − 1) / (K − 1)` (formula
    `paper`, eq. 11):

      exponential  s (e / s)^x
      linear       s − (s − e) x
      cosine       e + (s − e) (1 + cos πx) / 2
      logarithmic  s − (s − e) ln(1 + x (e₀ − 1)), e₀ Euler's number

    Departures from QeRL: stages in integer arithmetic, because its float `//` misplaces some stage borders, and u runs
    on through all epochs, where QeRL's starts again in each. The paper names linear, cosine and logarithmic schedules
    without a formula.

    Raises ValueError for a step outside the run.
    """
    stages, start, end = config.num_stages, config.sigma_start, config.sigma_end
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step} lies outside a run of {total_steps} steps")
    updates = config.num_iterations
    stage = min((step * updates + 1) * stages // (total_steps * updates), stages - 1)
    if stage == 0 or start == 0:
        return 0.0
    x = (stage - 1) / (stages - 2 if config.noise_formula == "qerl" else stages - 1)
    match config.noise_schedule:
        case "exponential":
            return start * (end / start) ** x
        case "linear":
            return start - (start - end) * x
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * x)) / 2
        case "logarithmic":
            return start - (start - end) * math.log(1 + x * (math.e - 1))
    raise AssertionError(config.noise_schedule)


def note(config: NoiseConfig, total_steps: int) -> str | None:
    """One sentence where a run is too short for the stage without noise; None elsewhere."""
    if total_steps * config.num_iterations > config.num_stages or config.sigma_start == 0:
        return None  # the first rollout has noise where num_stages // updates, the stage of u = 1, is above 0
    return (
        f"WARNING: {total_steps * config.num_iterations} updates are no more than num_stages {config.num_stages}: no "
        f"stage is without noise, the first rollout has sigma {sigma(config, 0, total_steps):.4g}; take fewer "
        "stages or more steps"
    )


def perturb(norms: Any, sigma: float | Float[Array, ""], key: Array) -> Any:
    """Noisy norm weights `w + Z`, `Z ~ N(0, σ² I)`: one vector for each layer norm, in fp32, from the clean weights.

    The noise acts on the input of q/k/v and of gate/up, as if column j of those weights were multiplied by
    `1 + Z_j / w_j` (eq. 12). fp32, because in bf16 a σ below 3.2e-4 would not change weights near 1. σ = 0 returns the
    same bits.

    Args:
      norms: the 2 L layer norms of a policy.
      sigma: standard deviation, from `sigma(...)`.
      key: one key for each rollout; the noise of norm i uses `fold_in(key, i)`.
    """
    leaves, treedef = jax.tree.flatten(norms)
    of_shape: dict[tuple[int, ...], list[int]] = {}
    for i, weight in enumerate(leaves):
        if weight.dtype != jnp.float32:
            raise ValueError(f"layer norm {i} is {weight.dtype}: noise must be added in float32")
        of_shape.setdefault(weight.shape, []).append(i)
    noisy = list(leaves)
    for shape, indices in of_shape.items():  # drawn together: one generator for each norm would compile for 16 s
        normal = jax.vmap(lambda i, shape=shape: jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32))
        for i, noise in zip(indices, normal(jnp.asarray(indices)), strict=True):
            noisy[i] = jnp.where(sigma == 0, leaves[i], leaves[i] + sigma * noise)
    return jax.tree.unflatten(treedef, noisy)


@program
def count_perturbed(clean: Any, noisy: Any) -> Int32[Array, ""]:
    """Number of layer norms that differ: 2 L under noise, 0 at σ = 0. The released QeRL silently changes none, because
    vLLM's model has another class of norms than the one it looks for.
    """
    pairs = zip(*map(jax.tree.leaves, (clean, noisy)), strict=True)
    return sum((jnp.any(a != b).astype(jnp.int32) for a, b in pairs), start=jnp.int32(0))
