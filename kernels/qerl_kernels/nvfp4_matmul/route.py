"""The route of a GEMM: which kernel runs, with which config, and which LoRA input it takes.

`route` is called once for each projection at trace time; its result goes to the prologue, which makes the LoRA input in
that form, and to `nvfp4_matmul`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from qerl_kernels import dispatch
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import Gpu
from qerl_kernels.nvfp4_matmul import tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.tcgen05.config import Tcgen05Config

_KERNELS = {GemmConfig: "gemm", SkinnyConfig: "skinny", Tcgen05Config: "tcgen05"}


class Adapter(Protocol):
    """A LoRA adapter: `scale · (x A) B` on the output features `offset : offset + N`.

    With a `column` that is not None, `a` holds the A of all adapters of the weight side by side, this one's from that
    column on.
    """

    a: Float[Array, "K R"]
    b: Float[Array, "R N"]
    scale: float
    offset: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """A GEMM as the choice of its kernel sees it.

    Attributes:
      m: rows of x.
      n: output features of the weight.
      k: input features of the weight.
      adapters: (rank, output features, first output feature, scale) of each adapter.
      transposed: True for dx.
      implementation: "mosaic_gpu" or "xla".
      batch_invariant: a row's bits do not depend on the number of rows or on the other rows.
      gpu: the GPU.
    """

    m: int
    n: int
    k: int
    adapters: tuple[tuple[int, int, int, float], ...]
    transposed: bool
    implementation: str
    batch_invariant: bool
    gpu: Gpu

    @property
    def ranks(self) -> list[int]:
        """LoRA rank of each adapter."""
        return [rank for rank, *_ in self.adapters]

    @property
    def lora_b_shapes(self) -> list[tuple[int, int]]:
        """Shape of B of each adapter."""
        return [(rank, width) for rank, width, *_ in self.adapters]

    @property
    def is_one_lora_term(self) -> bool:
        """Whether the adapters are adjacent from feature 0 on and share a scale that is not zero."""
        ends = [offset + width for _, width, offset, _ in self.adapters]
        starts = [offset for _, _, offset, _ in self.adapters]
        scales = {scale for *_, scale in self.adapters}
        return starts == [0, *ends[:-1]] and len(scales) == 1 and 0.0 not in scales


@dataclasses.dataclass(frozen=True)
class Route:
    """How one GEMM runs.

    Attributes:
      problem: the GEMM.
      kernel: "gemm", "skinny", "dequantize" (the weight by a kernel, the product by XLA) or "xla".
      config: tuning config of the kernel; None for "dequantize" and "xla".
      lora_form: LoRA input that it takes.
      is_fused: whether the kernel adds the LoRA term; otherwise XLA adds it to the kernel's rounded result.
    """

    problem: Problem
    kernel: str
    config: GemmConfig | SkinnyConfig | Tcgen05Config | None
    lora_form: LoraForm
    is_fused: bool

    def dx(self) -> Route:
        """The route of the input gradient of the same GEMM."""
        return route_problem(dataclasses.replace(self.problem, adapters=(), transposed=True))

    def for_rows(self, m: int) -> Route:
        """The route of the same GEMM with m rows, which `vmap` may make."""
        return self if m == self.problem.m else route_problem(dataclasses.replace(self.problem, m=m))

    def without_lora(self) -> Route:
        """The route of the same GEMM without adapters."""
        return route_problem(dataclasses.replace(self.problem, adapters=()))

    def given_lora_x(self) -> Route:
        """The same kernel where `x A` is known: it does not compute it. The skinny kernel takes it whole, too."""
        if self.lora_form is not LoraForm.A:
            return self
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, computes_lora_x=False), lora_form=LoraForm.PARTIALS
        )


def route(
    m: int,
    weight: PackedNvfp4,
    loras: Sequence[Adapter],
    dtype: DTypeLike,
    batch_invariant: bool = False,
    *,
    implementation: str | None = None,
) -> Route:
    """The route of `x Wᵀ` with these adapters for x [m, K].

    Args:
      m: rows of x.
      weight: the packed weight.
      loras: its adapters.
      dtype: dtype of x.
      batch_invariant: a row's bits must not depend on the number of rows or on the other rows.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).

    Raises:
      ValueError: the implementation asked for cannot run here.
    """
    chosen = dispatch.choose("nvfp4_matmul", implementation, dispatch.missing_for_mosaic_gpu(dtype))
    return route_problem(problem_of(m, weight, loras, chosen, batch_invariant))


def problem_of(
    m: int, weight: PackedNvfp4, loras: Sequence[Adapter], implementation: str, batch_invariant: bool
) -> Problem:
    """The forward `Problem` of these arguments, as for `route`."""
    adapters = tuple((*lora.b.shape, int(lora.offset), float(lora.scale)) for lora in loras)
    return Problem(m, *weight.shape, adapters, False, implementation, batch_invariant, dispatch.this_gpu())


def route_problem(problem: Problem) -> Route:
    """`route` of a `Problem`."""
    has_lora = bool(problem.adapters)
    if problem.implementation == "xla":
        return _by_library(problem, "xla")
    fused = _config(problem, problem.lora_b_shapes) if has_lora and problem.is_one_lora_term else None
    config = _config(problem, []) if fused is None else fused
    if config is None:
        return _by_library(problem, "dequantize")
    return Route(problem, _KERNELS[type(config)], config, _lora_form(problem, fused), fused is not None)


def _by_library(problem: Problem, kernel: str) -> Route:
    """XLA multiplies, and adds the adapters in fp32 before the result is rounded."""
    return Route(problem, kernel, None, LoraForm.WHOLE if problem.adapters else LoraForm.NONE, False)


def _config(problem: Problem, adapters: list[tuple[int, int]]) -> GemmConfig | SkinnyConfig | Tcgen05Config | None:
    return tuning.config_for(
        problem.m, problem.n, problem.k,
        transposed=problem.transposed, adapters=adapters, batch_invariant=problem.batch_invariant,
        gpu=problem.gpu,
    )  # fmt: skip


def _lora_form(problem: Problem, fused: GemmConfig | SkinnyConfig | None) -> LoraForm:
    """The form for the config into which the adapters fit; None where there is none. Never partials where a row's bits
    may not depend on the number of rows: the number of partials does."""
    if not problem.adapters:
        return LoraForm.NONE
    if fused is None or problem.batch_invariant:
        return LoraForm.WHOLE
    if isinstance(fused, GemmConfig):
        takes_partials = fused.takes_partials(problem.m, problem.lora_b_shapes)
        return LoraForm.PARTIALS if takes_partials else LoraForm.WHOLE
    return LoraForm.A if fused.computes_lora_x else LoraForm.PARTIALS
