"""The LoRA input of the NVFP4 GEMM: the arrays in which its kernels take `lora_x`, the `x A` of the adapters.

Axes: M rows of x, P split-K partials.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

MAX_RANK = 64  # largest rank of an adapter that a kernel adds; columns of `lora_x` for each adapter
# Whole: MAX_RANK columns for each adapter, zeros past its rank, S = MAX_RANK · adapters. Or split-K partials in fp32,
# to be added up and rounded, the ranks side by side in C columns.
LoraX = Float[Array, "M S"] | Float32[Array, "P M C"]
MMA_ROWS = 16  # output features, and ranks, of one `mma.m16n8k16`


class LoraForm(enum.Enum):
    """The LoRA input that a GEMM takes (`route.route` decides).

    PARTIALS: partials are accepted; a prologue that cannot make them (a norm) gives `x A` whole, which is taken, too.
    """

    NONE = "no adapters"
    WHOLE = "x A, rounded to bf16"
    PARTIALS = "fp32 split-K partials of x A, reduced by the GEMM, or x A whole"
    A = "A itself: the GEMM computes x A"


def is_lora_x(array: jax.Array | None, rows: int, ranks: Sequence[int]) -> bool:
    """Whether `array` is a `LoraX` of bf16 or of fp32 partials for adapters of these `ranks`. One adapter alone may
    keep its rank. Without adapters it is None."""
    if array is None or not ranks:
        return array is None and not ranks
    if array.ndim == 3:
        return array.shape == (max(1, len(array)), rows, sum(ranks)) and array.dtype == jnp.float32
    columns = (MAX_RANK * len(ranks), *(ranks if len(ranks) == 1 else ()))
    return array.shape in {(rows, width) for width in columns} and array.dtype == jnp.bfloat16


def pad_lora_x(each: Sequence[Float[Array, "m r"]]) -> Float[Array, "m s"]:
    """`x A` of the adapters side by side, each padded with zeros to `MAX_RANK` columns: s = MAX_RANK · adapters."""
    return jnp.concatenate([jnp.pad(x_a, ((0, 0), (0, MAX_RANK - x_a.shape[1]))) for x_a in each], axis=1)


def split_lora_x(whole: Float[Array, "m s"], ranks: Sequence[int]) -> list[Float[Array, "m r"]]:
    """The inverse of `pad_lora_x`."""
    return [whole[:, MAX_RANK * i :][:, :rank] for i, rank in enumerate(ranks)]


def join_lora_x(each: Sequence[Float[Array, "m r"]]) -> Float[Array, "m s"]:
    """`x A` of the adapters as a kernel takes it. XLA pads within the sum that makes them; one adapter alone keeps its
    rank, because its padding would be a kernel of its own."""
    return each[0] if len(each) == 1 else pad_lora_x(each)


def lora_x_of_each(lora_x: LoraX, m: int, ranks: Sequence[int], dtype: DTypeLike) -> list[Float[Array, "m r"]]:
    """`x A` of each adapter, in `dtype`, from a `LoraX` for m rows and adapters of these ranks.

    Raises:
      ValueError: shape or dtype of `lora_x` are others.
    """
    has_partials = lora_x.ndim == 3
    shape = (max(1, len(lora_x)), m, sum(ranks)) if has_partials else (m, MAX_RANK * len(ranks))
    wanted = jnp.dtype(jnp.float32 if has_partials else dtype)
    has_room = has_partials or max(ranks, default=0) <= MAX_RANK
    if lora_x.shape != shape or lora_x.dtype != wanted or not has_room:
        raise ValueError(
            f"nvfp4_matmul: lora_x is {describe(lora_x)}, {m} rows with adapters of ranks {list(ranks)} "
            f"need {wanted}{list(shape)}" + ("" if has_partials else f" and ranks up to {MAX_RANK}")
        )
    if has_partials:
        return jnp.split(lora_x.sum(0).astype(dtype), np.cumsum(ranks)[:-1], axis=1)
    return split_lora_x(lora_x, ranks)


def can_fuse(n: int, shapes: Sequence[tuple[int, int]], features: int = MMA_ROWS) -> bool:
    """Whether a kernel can add adapters with B of these shapes [rank, features]: their ranks are multiples of 8 up to
    `MAX_RANK`, they cover all n output features, and each begins at a multiple of `features`."""
    ends = np.cumsum([width for _, width in shapes])
    return (
        bool(len(ends))
        and ends[-1] == n
        and n % MMA_ROWS == 0
        and all(rank % 8 == 0 and 0 < rank <= MAX_RANK for rank, _ in shapes)
        and all(end % features == 0 for end in ends[:-1])
    )


def describe(array: jax.Array | None) -> str:
    """For messages: dtype and shape."""
    return "not given" if array is None else f"{array.dtype}{list(array.shape)}"
