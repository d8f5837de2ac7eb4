"""Low-rank adapters (LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732).

Axes: K input features, N output features, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["scale", "offset", "column"])
@dataclasses.dataclass(frozen=True)
class Lora:
    """One adapter: adds `scale · (x A) B` to the output features `offset : offset + N` of a (possibly fused)
    projection.

    Attributes:
      a: A, fp32 master (or its bf16 compute copy), C = R columns. PEFT's `lora_A.weight` transposed.
      b: B, likewise. PEFT's `lora_B.weight` transposed.
      scale: `alpha / R`, or `alpha / sqrt(R)` for rsLoRA.
      offset: first output feature of this part within a fused projection.
      column: None; or the first column of this part in an A that holds those of all parts (`side_by_side`).
    """

    a: Float[Array, "K C"]
    b: Float[Array, "R N"]
    scale: float
    offset: int = 0
    column: int | None = None

    @property
    def own_a(self) -> Float[Array, "K R"]:
        """A of this part alone."""
        return self.a if self.column is None else self.a[:, self.column : self.column + self.b.shape[0]]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What an adapter looks like.

    Attributes:
      rank: R; 0 means no adapter.
      alpha: numerator of the scale; None means equal to the rank.
      use_rslora: scale `alpha / sqrt(R)` in place of `alpha / R`.
      target_modules: which of the seven projections carry one.
      dropout: dropout of an imported adapter, kept so that an export names it again. RL refuses a value above 0.
    """

    rank: int = 32
    alpha: float | None = None
    use_rslora: bool = False
    target_modules: tuple[str, ...] = PROJECTIONS
    dropout: float = 0.0

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"lora_rank must be 0 or more, got {self.rank}")
        unknown = sorted(set(self.target_modules) - set(PROJECTIONS))
        if unknown:
            raise ValueError(f"lora_target_modules {unknown} are not among the projections {list(PROJECTIONS)}")

    @property
    def effective_alpha(self) -> float:
        """`alpha`, or the rank where none is given."""
        return float(self.rank if self.alpha is None else self.alpha)

    @property
    def scale(self) -> float:
        """What multiplies `(x A) B`."""
        return self.effective_alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def init_lora(config: LoraConfig, in_features: int, out_features: int, offset: int, key: Array) -> Lora:
    """A drawn as PEFT draws it (Kaiming uniform with a = sqrt(5): ±1/sqrt(K)), B zero, both fp32: the adapted policy
    starts as the base.
    """
    bound = 1.0 / math.sqrt(in_features)
    a = jax.random.uniform(key, (in_features, config.rank), jnp.float32, -bound, bound)
    return Lora(a, jnp.zeros((config.rank, out_features), jnp.float32), config.scale, offset)


def side_by_side(lora: Any) -> Any:
    """The tree of adapters with one A for all parts of a projection, so that a loop over tokens multiplies x by all of
    them at once without putting them together in every turn.
    """

    def join(parts: dict[str, Lora]) -> dict[str, Lora]:
        ordered = sorted(parts, key=lambda name: parts[name].offset)
        shared = jnp.concatenate([parts[name].a for name in ordered], axis=1)
        starts = np.cumsum([0] + [parts[name].a.shape[1] for name in ordered]).tolist()
        return {
            name: dataclasses.replace(parts[name], a=shared, column=start)
            for name, start in zip(ordered, starts, strict=False)
        }

    def of_one_projection(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(isinstance(part, Lora) for part in node.values())

    return jax.tree.map(join, lora, is_leaf=of_one_projection)


def together(parts: Sequence[Lora]) -> Float[Array, "K C"]:
    """A of all parts of a projection side by side; no copy after `side_by_side`."""
    return parts[0].a if parts[0].column is not None else jnp.concatenate([part.a for part in parts], axis=1)


def without_adapter(lora: Any) -> Any:
    """The same tree with B = 0, so that the policy equals its base (for the reference of the KL term)."""

    def zero(adapter: Lora) -> Lora:
        return dataclasses.replace(adapter, b=jnp.zeros_like(adapter.b))

    return jax.tree.map(zero, lora, is_leaf=lambda node: isinstance(node, Lora))
