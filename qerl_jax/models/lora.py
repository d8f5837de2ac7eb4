"""Low-rank adapters (LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732).

Axes: K input features, N output features, R rank, C columns of an A array.
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
from jaxtyping import Array, Float, Float32

from qerl_jax.models.config import PROJECTIONS


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["scale", "offset", "column"])
@dataclasses.dataclass(frozen=True)
class Lora:
    """One LoRA adapter: adds `scale · (x A) B` to output features `offset : offset + N` of a projection.

    Attributes:
      a: LoRA A, fp32 master or its copy in the compute dtype; C = R columns, or those of all adapters of the projection
        (`fuse_lora_a`). PEFT's `lora_A.weight` transposed.
      b: LoRA B, likewise. PEFT's `lora_B.weight` transposed.
      scale: LoRA scale, `alpha / R`, or `alpha / sqrt(R)` for rsLoRA.
      offset: first output feature of this adapter within a fused projection.
      column: first column of this adapter in a fused `a`; None where `a` is its own.
    """

    a: Float[Array, "K C"]
    b: Float[Array, "R N"]
    scale: float
    offset: int = 0
    column: int | None = None

    @property
    def own_a(self) -> Float[Array, "K R"]:
        """The columns of `a` that belong to this adapter."""
        return self.a if self.column is None else self.a[:, self.column : self.column + self.b.shape[0]]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Shape and scale of the adapters of a policy.

    Attributes:
      rank: R; 0 for no adapters.
      alpha: numerator of the scale; None for the rank.
      use_rslora: scale `alpha / sqrt(R)` in place of `alpha / R`.
      target_modules: the projections that have an adapter; kept as a tuple.
      dropout: dropout of an imported adapter, kept for the export. Training refuses a value above 0.

    Raises ValueError for a negative rank or an unknown projection.
    """

    rank: int = 32
    alpha: float | None = None
    use_rslora: bool = False
    target_modules: Sequence[str] = PROJECTIONS
    dropout: float = 0.0

    def __post_init__(self):
        given = self.target_modules  # PEFT has a list, which has no hash
        object.__setattr__(self, "target_modules", (given,) if isinstance(given, str) else tuple(given))
        if self.rank < 0:
            raise ValueError(f"lora_rank must be 0 or more, got {self.rank}")
        unknown = sorted(set(self.target_modules) - set(PROJECTIONS))
        if unknown:
            raise ValueError(f"lora_target_modules {unknown} are not among the projections {list(PROJECTIONS)}")

    @property
    def effective_alpha(self) -> float:
        """`alpha`, or the rank where alpha is None."""
        return float(self.rank if self.alpha is None else self.alpha)

    @property
    def scale(self) -> float:
        """LoRA scale: the factor of `(x A) B`."""
        return self.effective_alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def draw_lora_a(in_features: int, rank: int, keys: Array) -> Float32[Array, "n K R"]:
    """LoRA A of n fresh adapters: uniform in ±1/sqrt(K) (PEFT's Kaiming uniform with a = sqrt(5)), of each its own key.

    Args:
      in_features: K.
      rank: R.
      keys: n random keys.
    """
    bound = 1.0 / math.sqrt(in_features)
    return jax.vmap(lambda key: jax.random.uniform(key, (in_features, rank), jnp.float32, -bound, bound))(keys)


def fuse_lora_a(lora: Any) -> Any:
    """The tree of adapters with one A array for all adapters of a projection, as `concat_lora_a` makes it. A decode
    loop then computes one `x A` a projection, without concatenating A in every step.
    """

    def fuse(adapters: dict[str, Lora]) -> dict[str, Lora]:
        ordered = sorted(adapters, key=lambda name: adapters[name].offset)
        fused = jnp.concatenate([adapters[name].a for name in ordered], axis=1)
        starts = np.cumsum([0] + [adapters[name].a.shape[1] for name in ordered]).tolist()
        return {
            name: dataclasses.replace(adapters[name], a=fused, column=start)
            for name, start in zip(ordered, starts, strict=False)
        }

    def is_projection(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and all(isinstance(adapter, Lora) for adapter in node.values())

    return jax.tree.map(fuse, lora, is_leaf=is_projection)


def concat_lora_a(adapters: Sequence[Lora]) -> Float[Array, "K C"]:
    """A of all adapters of a projection side by side; no copy after `fuse_lora_a`."""
    return adapters[0].a if adapters[0].column is not None else jnp.concatenate([lora.a for lora in adapters], axis=1)


def without_adapter(lora: Any) -> Any:
    """The tree of adapters with B = 0, so that the policy equals its base: the reference of the KL term."""

    def zero(adapter: Lora) -> Lora:
        return dataclasses.replace(adapter, b=jnp.zeros_like(adapter.b))

    return jax.tree.map(zero, lora, is_leaf=lambda node: isinstance(node, Lora))
