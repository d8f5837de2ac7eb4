"""Prologues of a layer's four projections in decode, each one launch together with LoRA's `x A`.

`x A` is the LoRA input `lora_x` of `nvfp4_matmul`. Forward only: training and prefill run the plain model.

Axes: M tokens, K input features, F ffn features, C columns of A (the adapters side by side), S = 64 · adapters, P
split-K partials.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float32

from qerl_kernels import dispatch, ops
from qerl_kernels.decode_prologue import config, reference
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm, LoraX

KINDS = {"rms_norm_prologue": "norm", "silu_mul_prologue": "silu", "lora_prologue": "plain"}


def max_tokens() -> int:
    """Tokens up to which the kernels are faster than XLA on this GPU: with clusters, two waves of them at most."""
    return 256 if config.has_clusters(dispatch.this_gpu()) else 128


def rms_norm_prologue(
    x: Float32[Array, "M K"],
    delta: Float[Array, "M K"] | None,
    weight: Float32[Array, " K"],
    eps: float,
    a: Float[Array, "K C"] | None = None,
    ranks: Sequence[int] = (),
    *,
    dtype: DTypeLike,
    lora_form: LoraForm = LoraForm.WHOLE,
    implementation: str | None = None,
) -> tuple[Float32[Array, "M K"], Float[Array, "M K"], LoraX | None]:
    """`s = x + delta`, `y = w ⊙ s / sqrt(mean(s²) + eps)`, `lora_x = y A`: residual add, RMSNorm and LoRA's `x A`.

    s and the norm are computed in fp32, y is rounded once; lora_x is accumulated in fp32 and rounded once. The kernel
    multiplies `w ⊙ s`, rounded, with A and then divides by the root mean square: as many roundings, but not of the y
    that it returns.

    Args:
      x: residual stream.
      delta: output of the projection before, in `dtype`, to be added to x; None: s = x.
      weight: weight of the norm.
      eps: epsilon of the norm.
      a: A of the adapters side by side, in `dtype`; None: lora_x is None.
      ranks: LoRA ranks of the adapters, in that order.
      dtype: dtype of y and lora_x; bf16 for the kernel.
      lora_form: form of lora_x that the GEMM takes, as for `silu_mul_prologue`. A kernel that computes the norm leaves
        it whole in any case. Where clusters have one CTA, XLA computes the norm and `lora_prologue` lora_x.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).

    Returns:
      s, y and lora_x, in which each adapter has 64 columns, zeros past its rank: the `lora_x` of `nvfp4_matmul`.

    Raises:
      ValueError: the ranks do not sum to the columns of A, or the implementation asked for cannot run here.
    """
    is_kernel = _choose("rms_norm_prologue", x, dtype, a, ranks, implementation) == "mosaic_gpu"
    if not is_kernel or not config.has_clusters(dispatch.this_gpu()):
        s = x if delta is None else x + delta
        y = ops.rms_norm(s, weight, eps, dtype)
        if is_kernel and a is not None:
            return s, y, lora_prologue(y, a, ranks, lora_form=lora_form, implementation="mosaic_gpu")
        return s, y, _lora_x(y, a, ranks, lora_form)
    inputs = (x, weight) if delta is None else (x, delta, weight)
    out = _launch("rms_norm_prologue", x, inputs, a, ranks, eps=eps, residual=delta is not None)
    out = out if delta is not None else (x, *out)
    return out if a is not None else (*out, None)


def silu_mul_prologue(
    gate_up: Float[Array, "M 2*F"],
    a: Float[Array, "F C"] | None = None,
    ranks: Sequence[int] = (),
    *,
    lora_form: LoraForm = LoraForm.WHOLE,
    implementation: str | None = None,
) -> tuple[Float[Array, "M F"], LoraX | None]:
    """`h = silu(gate) · up` in fp32, rounded once, and `lora_x = h A`; arguments and errors as `rms_norm_prologue`.

    Args:
      gate_up: gate and up side by side; bf16 for the kernel.
      a: A of the adapters side by side; None: lora_x is None.
      ranks: LoRA ranks of the adapters.
      lora_form: form of lora_x that the GEMM takes (`Route.lora_form`). With `LoraForm.PARTIALS` it comes as fp32
        split-K partials [P, M, C], which the GEMM adds up. P is the kernel's choice: more SMs can then work on it, and
        none waits for another.
      implementation: as for `rms_norm_prologue`.
    """
    if _choose("silu_mul_prologue", gate_up, gate_up.dtype, a, ranks, implementation) == "xla":
        h = ops.silu_mul(gate_up)
        return h, _lora_x(h, a, ranks, lora_form)
    out = _launch("silu_mul_prologue", gate_up, (gate_up,), a, ranks, partials=lora_form is LoraForm.PARTIALS)
    return out if a is not None else (*out, None)


def lora_prologue(
    x: Float[Array, "M K"],
    a: Float[Array, "K C"],
    ranks: Sequence[int],
    *,
    lora_form: LoraForm = LoraForm.WHOLE,
    implementation: str | None = None,
) -> LoraX:
    """`lora_x = x A` alone; arguments and errors as `silu_mul_prologue`."""
    if _choose("lora_prologue", x, x.dtype, a, ranks, implementation) == "xla":
        return _lora_x(x, a, ranks, lora_form)
    return _launch("lora_prologue", x, (x,), a, ranks, partials=lora_form is LoraForm.PARTIALS)[0]


def fused_lora_x(x: BFloat16[Array, "M K"], a: BFloat16[Array, "K C"], ranks: Sequence[int]) -> Array | None:
    """`x A` [M, S] by the kernel, for callers that run on Mosaic GPU anyway and have XLA's matmul at hand; None where
    XLA is faster (above `max_tokens()`) or the kernel does not take these shapes.

    `vmap` over x makes one call with more rows, by XLA where they are too many; `vmap` over A runs on XLA.
    """
    if x.shape[0] > max_tokens() or config.missing_for_kernel(x.shape[1], ranks) is not None:
        return None

    @jax.custom_batching.custom_vmap
    def lora_x(x, a):
        if x.shape[0] > max_tokens():
            return reference.lora_x(x, a, ranks)
        return _launch("lora_prologue", x, (x,), a, ranks)[0]

    @lora_x.def_vmap
    def batched(size, in_batched, x, a):
        if in_batched[1]:
            axes = [0 if own else None for own in in_batched]
            return jax.vmap(lambda x, a: reference.lora_x(x, a, ranks), axes)(x, a), True
        return lora_x(x.reshape(-1, x.shape[-1]), a).reshape(size, x.shape[1], -1), True

    return lora_x(x, a)


def _lora_x(y: Array, a: Array | None, ranks: Sequence[int], lora_form: LoraForm = LoraForm.WHOLE) -> Array | None:
    if a is None:
        return None
    return ops.fp32_matmul(y, a)[None] if lora_form is LoraForm.PARTIALS else reference.lora_x(y, a, ranks)


def _choose(
    name: str, x: Array, dtype: DTypeLike, a: Array | None, ranks: Sequence[int], implementation: str | None
) -> str:
    columns = 0 if a is None else a.shape[1]
    if sum(ranks) != columns:
        raise ValueError(f"{name}: A has {columns} columns, the ranks are {list(ranks)}")
    missing = dispatch.missing_for_mosaic_gpu(dtype) or config.missing_for_kernel(_features(name, x), ranks)
    if missing is None and implementation is None and x.shape[0] > max_tokens():
        missing = f"at most {max_tokens()} tokens to be the faster one"
    return dispatch.choose(name, implementation, missing)


def _features(name: str, x: Array) -> int:
    return x.shape[1] // 2 if name == "silu_mul_prologue" else x.shape[1]


def _launch(name: str, x: Array, inputs: tuple, a: Array | None, ranks: Sequence[int], **more) -> tuple[jax.Array, ...]:
    from qerl_kernels.decode_prologue import kernel  # jax ≥ 0.11: imported where it runs

    spec = config.PrologueSpec(KINDS[name], x.shape[0], _features(name, x), tuple(ranks), **more)
    gpu = dispatch.this_gpu()
    return kernel.fused_prologue(spec, config.best_config(spec, gpu), inputs, a, gpu)
