"""The fused executor: decode on packed weights in fewer kernels than `PlainExecutor`; a projection that is left
unquantized among them is multiplied by XLA.

One prologue kernel computes the residual add, the RMSNorm and the LoRA input `x A` of the projection behind it (or
SiLU·mul and `x A`, or `x A` alone; no `x A` where the GEMM computes it itself). What a projection adds to the residual
stream is added by the next norm's prologue, with the arithmetic of `PlainExecutor`. Where layers are divided over
devices and there is a mailbox, one more kernel sums that over them before.

Axes: B sequences, D model, K input features, N output features, E = 2 F: gate and up side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Float32
from qerl_kernels.decode_prologue.api import lora_prologue, max_tokens, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm
from qerl_kernels.nvfp4_matmul.route import Route, route

from qerl_jax.models.executor import PlainExecutor
from qerl_jax.models.formats import Dense, PackedNvfp4
from qerl_jax.models.lora import concat_lora_a
from qerl_jax.models.modules import Projection, RMSNorm
from qerl_jax.partition import Mailbox


class DeferredResidual(NamedTuple):
    """The residual stream `x + delta`.

    Attributes:
      x, delta: its parts; delta is None where nothing waits to be added.
      mailbox: for the next sum over devices; None: projections sum by themselves.
    """

    x: Float32[Array, "B D"]
    delta: Float[Array, "B D"] | None
    mailbox: Mailbox | None


def can_fuse_decode(projections: Iterable[Projection], batch: int) -> bool:
    """Whether `FusedDecodeExecutor` takes a batch of that size and these projections: packed weights, some of them
    perhaps dense, and adapters of a rank that the kernels take."""
    projections = list(projections)
    weights = [projection.weight.get_value() for projection in projections]
    ranks = (lora.b.shape[0] for projection in projections for lora in projection.adapters())
    return (
        batch <= max_tokens()
        and any(isinstance(weight, PackedNvfp4) for weight in weights)
        and all(isinstance(weight, PackedNvfp4 | Dense) for weight in weights)
        and all(rank <= MAX_RANK for rank in ranks)
    )


@dataclasses.dataclass(frozen=True)
class FusedDecodeExecutor(PlainExecutor):
    """Runs one token a sequence; x is [B, features]. No gradients, not batch-invariant.

    Attributes:
      mailbox: for the first sum over devices, from `start` on in the residual stream; None: projections sum by
        themselves.
    """

    mailbox: Mailbox | None = None

    def start(self, x: Float32[Array, "B D"]) -> DeferredResidual:
        """x with nothing to add."""
        return DeferredResidual(x, None, self.mailbox)

    def norm_project(
        self, norm: RMSNorm, projection: Projection, residual: DeferredResidual
    ) -> tuple[DeferredResidual, Float[Array, "B N"]]:
        """Residual add, norm and `x A` in one kernel, then the GEMM."""
        x, delta, mailbox = residual
        chosen, a, ranks = _route(projection, x.shape[0], norm.dtype)
        x, y, lora_x = rms_norm_prologue(x, delta, norm.weight.get_value(), norm.eps, a, ranks, dtype=norm.dtype)
        return DeferredResidual(x, None, mailbox), projection(y, route=chosen, lora_x=lora_x)

    def project(self, projection: Projection, x: Float[Array, "B K"]) -> Float[Array, "B N"]:
        """`x A` in one kernel (where there is any to compute), then the GEMM."""
        chosen, a, ranks = _route(projection, x.shape[0], x.dtype)
        lora_x = None if a is None else lora_prologue(x, a, ranks, lora_form=chosen.lora_form)
        return projection(x, route=chosen, lora_x=lora_x, summed=self.mailbox is None)

    def swiglu_project(self, projection: Projection, gate_up: Float[Array, "B E"]) -> Float[Array, "B N"]:
        """SiLU·mul and `x A` in one kernel, then the GEMM."""
        chosen, a, ranks = _route(projection, gate_up.shape[0], gate_up.dtype)
        lora_form = LoraForm.NONE if chosen is None else chosen.lora_form
        x, lora_x = silu_mul_prologue(gate_up, a, ranks, lora_form=lora_form)
        return projection(x, route=chosen, lora_x=lora_x, summed=self.mailbox is None)

    def add(self, residual: DeferredResidual, delta: Float[Array, "B D"]) -> DeferredResidual:
        """The stream with `delta`, summed over devices, apart, for the next norm's kernel to add; nothing else may be
        waiting.
        """
        x, waiting, mailbox = residual
        assert waiting is None
        delta, mailbox = (delta, None) if mailbox is None else mailbox.leave(delta)
        return DeferredResidual(x, delta, mailbox)

    def finish(self, norm: RMSNorm, residual: DeferredResidual) -> Float[Array, "B D"]:
        """`norm(x + delta)`."""
        x, delta, _ = residual
        return norm(x + delta)


def _route(
    projection: Projection, m: int, dtype: jax.typing.DTypeLike
) -> tuple[Route | None, Array | None, tuple[int, ...]]:
    """(route of the projection's GEMM for m rows, A of the adapters side by side for its prologue, their ranks).

    The route is None for a dense weight. A is None without adapters, and where the GEMM, or `linear` of a dense weight,
    computes `x A` itself.
    """
    loras, weight = projection.adapters(), projection.weight.get_value()
    if isinstance(weight, Dense):
        return None, None, ()
    chosen = route(m, weight, loras, dtype)
    if chosen.lora_form in (LoraForm.NONE, LoraForm.A):
        return chosen, None, ()
    return chosen, concat_lora_a(loras).astype(dtype), tuple(lora.b.shape[0] for lora in loras)
