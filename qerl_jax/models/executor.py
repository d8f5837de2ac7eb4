"""How the operations of a decoder layer run: the plain executor, whose methods others override.

The layer (`qwen2.DecoderLayer`) states the order of the operations once. An executor groups them into programs and owns
the form of the residual stream. `PlainExecutor` runs the modules one by one, in any shape and with gradients;
`fused_decode.FusedDecodeExecutor` merges them into fewer kernels for decode on packed weights.

Axes: D model, K input features, N output features, E = 2 F: gate and up side by side.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from qerl_kernels.ops import silu_mul

from qerl_jax.models.modules import Projection, RMSNorm

Residual = Any
"""Pytree: the residual stream in the form of the executor."""


@dataclasses.dataclass(frozen=True)
class PlainExecutor:
    """The operations of a decoder layer, as `DecoderLayer` and `Qwen2` call them. Runs each module by itself; the
    residual stream is an array.

    The stream is fp32 also where all else is bf16: rounding it twice a layer is half of what makes rollout and trainer
    disagree (a last bit that differs in a GEMM becomes a whole bf16 step of the stream, and stays).

    Attributes:
      batch_invariant: a row's bits do not depend on the number of rows or on the other rows; slower.
    """

    batch_invariant: bool = False

    def start(self, x: Float32[Array, "*B D"]) -> Residual:
        """The residual stream before the first layer: x itself."""
        return x

    def norm_project(
        self, norm: RMSNorm, projection: Projection, residual: Residual
    ) -> tuple[Residual, Float[Array, "*B N"]]:
        """The residual stream in the form that the next operation reads, here unchanged, and `projection(norm(x))`."""
        return residual, projection(norm(residual, self.batch_invariant), self.batch_invariant)

    def project(self, projection: Projection, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """`projection(x)`."""
        return projection(x, self.batch_invariant)

    def swiglu_project(self, projection: Projection, gate_up: Float[Array, "*B E"]) -> Float[Array, "*B N"]:
        """`projection(silu(gate) · up)`."""
        return self.project(projection, silu_mul(gate_up))

    def add(self, residual: Residual, delta: Float[Array, "*B D"]) -> Residual:
        """The residual stream plus `delta`."""
        return residual + delta

    def normalize(self, norm: RMSNorm, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """`norm(x)`, of x in fp32."""
        return norm(x.astype(jnp.float32), self.batch_invariant)

    def finish(self, norm: RMSNorm, residual: Residual) -> Float[Array, "*B D"]:
        """`norm` of the residual stream behind the last layer."""
        return norm(residual, self.batch_invariant)


PLAIN_EXECUTOR = PlainExecutor()


@dataclasses.dataclass(frozen=True)
class RecordingExecutor(PlainExecutor):
    """The plain executor, which keeps what a layer computes for others: q, k and v side by side, what attention adds to
    the residual stream, gate and up, and what the MLP adds.
    """

    results: list[Array] = dataclasses.field(default_factory=list)

    def norm_project(
        self, norm: RMSNorm, projection: Projection, residual: Residual
    ) -> tuple[Residual, Float[Array, "*B N"]]:
        """As `PlainExecutor`."""
        residual, y = super().norm_project(norm, projection, residual)
        self.results.append(y)
        return residual, y

    def add(self, residual: Residual, delta: Float[Array, "*B D"]) -> Residual:
        """As `PlainExecutor`."""
        self.results.append(delta)
        return super().add(residual, delta)
