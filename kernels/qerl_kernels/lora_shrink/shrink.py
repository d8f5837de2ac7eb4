"""What precedes the four projections of a layer in decode, each with the adapters' `x A`, in one launch; and that
`x A` alone, which the product with adapters (`nvfp4_matmul`) takes for few tokens.

Forward only: training and prefill run the plain model. Axes: M tokens, K input features, F ffn features, C adapter
columns, S = 64 · adapters, P parts of the features.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float32

from qerl_kernels import dispatch, ops
from qerl_kernels.lora_shrink import plan, reference
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraX

MOST_TOKENS = 128  # above, XLA's products take over
MOST_RANK = MAX_RANK  # of an adapter
KINDS = {"norm_shrink": "norm", "silu_shrink": "silu", "shrink": "plain"}


def norm_shrink(
    x: Float32[Array, "M K"],
    delta: Float[Array, "M K"] | None,
    weight: Float32[Array, " K"],
    eps: float,
    a: Float[Array, "K C"] | None = None,
    ranks: Sequence[int] = (),
    *,
    dtype: DTypeLike,
    implementation: str | None = None,
) -> tuple[Float32[Array, "M K"], Float[Array, "M K"], Float[Array, "M S"] | None]:
    """`s = x + delta`, `y = w ⊙ s / sqrt(mean(s²) + eps)` and `t = y A`: residual add, RMSNorm and LoRA's first half.

    s and the norm are computed in fp32, y is rounded once; t is summed in fp32 and rounded once. Mosaic GPU multiplies
    `w ⊙ s`, rounded, with A and then divides by the root mean square: rounded as often, but not the y that it returns.

    Args:
      x: the residual stream.
      delta: what the last projection adds to it, in `dtype`; None: s = x.
      weight: of the norm.
      eps: of the norm.
      a: A of the adapters side by side, in `dtype`; None: t is None.
      ranks: of the adapters, in that order.
      dtype: of y and t; bf16 for the kernel.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).

    Returns:
      s, y and t, in which each adapter has 64 columns, zeros past its rank: what `nvfp4_matmul(shrunk=...)` takes.

    Raises:
      ValueError: the ranks are not those of A, or the implementation asked for cannot run here.
    """
    if _chosen("norm_shrink", x, dtype, a, ranks, implementation) == "xla":
        s = x if delta is None else x + delta
        y = ops.rms_norm(s, weight, eps, dtype)
        return s, y, _shrink(y, a, ranks)
    inputs = (x, weight) if delta is None else (x, delta, weight)
    out = _fused("norm_shrink", x, inputs, a, ranks, eps=eps, residual=delta is not None)
    out = out if delta is not None else (x, *out)
    return out if a is not None else (*out, None)


def silu_shrink(
    gate_up: Float[Array, "M 2*F"],
    a: Float[Array, "F C"] | None = None,
    ranks: Sequence[int] = (),
    *,
    in_parts: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "M F"], LoraX | None]:
    """`h = silu(gate) · up` in fp32, rounded once, and `t = h A`; arguments, t and errors as for `norm_shrink`.

    `in_parts`: t as fp32 sums over parts of the features [P, M, C], as many as suit the kernel, for a product that adds
    them up (`nvfp4_matmul.api.product_takes`): more of the chip can work on it, which none of it waits for.
    """
    if _chosen("silu_shrink", gate_up, gate_up.dtype, a, ranks, implementation) == "xla":
        h = ops.silu_mul(gate_up)
        return h, _shrink(h, a, ranks, in_parts)
    out = _fused("silu_shrink", gate_up, (gate_up,), a, ranks, in_parts=in_parts)
    return out if a is not None else (*out, None)


def shrink(
    x: Float[Array, "M K"],
    a: Float[Array, "K C"],
    ranks: Sequence[int],
    *,
    in_parts: bool = False,
    implementation: str | None = None,
) -> LoraX:
    """`t = x A` alone; arguments, t and errors as for `silu_shrink`."""
    if _chosen("shrink", x, x.dtype, a, ranks, implementation) == "xla":
        return _shrink(x, a, ranks, in_parts)
    return _fused("shrink", x, (x,), a, ranks, in_parts=in_parts)[0]


def shrink_by_kernel(x: BFloat16[Array, "M K"], a: BFloat16[Array, "K C"], ranks: Sequence[int]) -> Array | None:
    """`x A` in slots, [M, S], by the kernel, for callers that run on Mosaic GPU anyway and have XLA's product at hand;
    None where that is the faster one (above 128 tokens) or the kernel does not take these shapes or this chip.

    A batch of x (`vmap`) becomes more rows, which go to XLA where they are too many; with a batch of A it does always.
    """
    if x.shape[0] > MOST_TOKENS or plan.missing(x.shape[1], ranks) is not None:
        return None

    @jax.custom_batching.custom_vmap
    def slots(x, a):
        if x.shape[0] > MOST_TOKENS:
            return reference.shrink(x, a, ranks)
        return shrink(x, a, ranks, implementation="mosaic_gpu")

    @slots.def_vmap
    def batched(size, in_batched, x, a):
        if in_batched[1]:
            axes = [0 if own else None for own in in_batched]
            return jax.vmap(lambda x, a: reference.shrink(x, a, ranks), axes)(x, a), True
        return slots(x.reshape(-1, x.shape[-1]), a).reshape(size, x.shape[1], -1), True

    return slots(x, a)


def _shrink(y: Array, a: Array | None, ranks: Sequence[int], in_parts: bool = False) -> Array | None:
    if a is None:
        return None
    return ops.fp32_matmul(y, a)[None] if in_parts else reference.shrink(y, a, ranks)


def _chosen(
    name: str, x: Array, dtype: DTypeLike, a: Array | None, ranks: Sequence[int], implementation: str | None
) -> str:
    columns = 0 if a is None else a.shape[1]
    if sum(ranks) != columns:
        raise ValueError(f"{name}: A has {columns} columns, the ranks are {list(ranks)}")
    missing = dispatch.missing_for_mosaic_gpu(dtype) or plan.missing(_features(name, x), ranks)
    if missing is None and implementation is None and x.shape[0] > MOST_TOKENS:
        missing = f"at most {MOST_TOKENS} tokens to be the faster one"
    return dispatch.choose(name, implementation, missing)


def _features(name: str, x: Array) -> int:
    return x.shape[1] // 2 if name == "silu_shrink" else x.shape[1]


def _fused(name: str, x: Array, inputs: tuple, a: Array | None, ranks: Sequence[int], **more) -> tuple[jax.Array, ...]:
    from qerl_kernels.lora_shrink import mosaic_gpu  # jax ≥ 0.11: imported where it runs

    task = plan.Task(KINDS[name], x.shape[0], _features(name, x), tuple(ranks), **more)
    return mosaic_gpu.fused(task, plan.plan_for(task), inputs, a)
