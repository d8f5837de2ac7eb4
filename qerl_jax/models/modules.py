"""Parts of a decoder layer as Flax NNX modules: the variable types, `Projection` and `RMSNorm`.

Axes: D model, K input features, N output features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32
from qerl_kernels.batch_invariant import in_blocks
from qerl_kernels.nvfp4_matmul.lora_input import LoraX
from qerl_kernels.nvfp4_matmul.route import Route
from qerl_kernels.ops import rms_norm

from qerl_jax import partition
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.linear import linear
from qerl_jax.models.lora import Lora


class Frozen(nnx.Variable):
    """A weight that no update changes. Not an `nnx.Param`."""


class Norm(nnx.Variable):
    """The fp32 weight of a layer norm, which AQN perturbs and `train_norms` trains."""


class Adapter(nnx.Variable):
    """The `Lora` of one of the seven projections."""


class Projection(nnx.Module):
    """One (possibly fused) projection: a frozen weight, a bias or None, and its LoRA adapters by projection name.

    Args:
      frozen: "weight", a `Weight`, and "bias" where there is one.
      adapters: {"lora": {projection: Lora}}, or {} for none.
      division: which features are divided over devices, where these are one device's part; None: this is whole.
    """

    def __init__(
        self,
        frozen: Mapping[str, Any],
        adapters: Mapping[str, Mapping[str, Lora]],
        division: partition.Division | None = None,
    ):
        self.division = division
        self.weight = Frozen(frozen["weight"])
        self.bias = Frozen(frozen["bias"]) if "bias" in frozen else None
        self.lora = nnx.Dict({name: Adapter(lora) for name, lora in adapters.get("lora", {}).items()})

    def adapters(self) -> list[Lora]:
        """The adapters by output offset. NNX returns a split module's dictionary in the order of the names."""
        return sorted((adapter.get_value() for adapter in self.lora.values()), key=lambda lora: lora.offset)

    def __call__(
        self,
        x: Float[Array, "*B K"],
        batch_invariant: bool = False,
        route: Route | None = None,
        lora_x: LoraX | None = None,
        summed: bool = True,
    ) -> Float[Array, "*B N"]:
        """`linear` with this projection's weight, bias and adapters. Where input features are divided, the devices'
        results, in x's dtype, are summed in fp32 and rounded once more; not `summed`: that is left to the caller.
        """
        bias = None if self.bias is None else self.bias.get_value()
        weight, adapters = self.weight.get_value(), self.adapters()
        if self.division is partition.Division.OUTPUTS:
            x = partition.enter(x)
            adapters = [dataclasses.replace(lora, a=partition.enter(lora.a)) for lora in adapters]
        elif self.division is partition.Division.INPUTS:
            adapters = [dataclasses.replace(lora, b=partition.enter(lora.b)) for lora in adapters]
        y = linear(x, weight, bias, adapters, batch_invariant=batch_invariant, route=route, lora_x=lora_x)
        return partition.leave(y) if summed and self.division is partition.Division.INPUTS else y


def final_norm(config: ModelConfig, weight: Float32[Array, " D"], dtype: jnp.dtype) -> RMSNorm:
    """The norm behind the last layer."""
    return RMSNorm(Frozen(weight), config.rms_norm_eps, dtype)


class RMSNorm(nnx.Module):
    """`w ⊙ x / sqrt(mean(x²) + eps)` in fp32, rounded once to the compute dtype."""

    def __init__(self, variable: nnx.Variable, eps: float, dtype: jnp.dtype):
        self.weight = variable
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float32[Array, "*B D"], batch_invariant: bool = False) -> Float[Array, "*B D"]:
        """The norm of each row; `batch_invariant`: with bits that do not depend on the number of rows."""

        def norm(rows: Array) -> Array:
            return rms_norm(rows, self.weight.get_value(), self.eps, self.dtype)

        if not batch_invariant:
            return norm(x)
        return in_blocks(norm, x.reshape(-1, x.shape[-1])).reshape(x.shape)
