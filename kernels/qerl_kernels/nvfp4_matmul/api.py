"""`nvfp4_matmul`: the product with a packed 4-bit weight as the model calls it, with its gradients.

Axes: M tokens, K input features, N output features, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from qerl_kernels import dispatch
from qerl_kernels.batch_invariant import in_blocks
from qerl_kernels.decode_prologue.api import fused_lora_x
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraX, pad_lora_x, split_lora_x
from qerl_kernels.nvfp4_matmul.packing import packed_parts
from qerl_kernels.nvfp4_matmul.reference import no_gradient
from qerl_kernels.ops import fp32_matmul

if TYPE_CHECKING:
    from qerl_kernels.nvfp4_matmul.split import Split


class Adapter(Protocol):
    """A LoRA adapter: `scale · (x A) B` on the output features `offset : offset + N`.

    Where it has a `column` that is not None, `a` holds the A of all adapters of the weight side by side, this one's
    from that column on.
    """

    a: Float[Array, "K R"]
    b: Float[Array, "R N"]
    scale: float
    offset: int


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is fixed at trace time: (scale, offset) of each adapter, and how to run."""

    adapters: tuple[tuple[float, int], ...]
    implementation: str
    batch_invariant: bool


def nvfp4_matmul(
    x: Float[Array, "... K"],
    weight: PackedNvfp4,
    bias: Float[Array, " N"] | None = None,
    loras: Sequence[Adapter] = (),
    *,
    implementation: str | None = None,
    batch_invariant: bool = False,
    shrunk: LoraX | None = None,
) -> Float[Array, "... N"]:
    """`y = x Wᵀ + bias + Σ_parts scale · (x A) B`, summed in fp32 and rounded to x's dtype.

    Adapters that the kernel cannot take (not adjacent, not covering the weight, of a rank that is no multiple of 8 or
    above 64) are added to its rounded result in fp32: two roundings.

    Differentiable in x, bias and the adapters; the weight is frozen and gets no gradient. `x A` is accumulated in fp32
    and rounded once. Who computes it, where Mosaic GPU runs: for few tokens the product's own kernel may
    (`product_takes`), but not where gradients are taken, whose backward pass needs it; else up to 128 tokens the kernel
    of `decode_prologue`, for shapes it takes and without `batch_invariant`; else XLA.

    Args:
      x: activations; bf16 for the kernels, any float dtype for XLA.
      weight: from `packing.pack`.
      bias: added in fp32.
      loras: one adapter for each adapted part of a fused projection.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).
      batch_invariant: a row's bits depend neither on how many rows there are nor on the others (slower for most
        shapes).
      shrunk: `x A` of all `loras` where it is known already, as `decode_prologue` makes it. Then nothing here is
        differentiable.

    Raises:
      ValueError: K of x and of the weight differ, `shrunk` has another shape or dtype than `LoraX` for these rows and
        adapters, or the implementation asked for cannot run here.
    """
    k = weight.shape[1]
    if x.shape[-1] != k:
        raise ValueError(f"nvfp4_matmul: x has {x.shape[-1]} input features, the weight {weight.shape[0]} x {k}")
    static = _static(loras, x.dtype, implementation, batch_invariant)
    columns = [getattr(lora, "column", None) for lora in loras]
    together = loras[0].a.astype(x.dtype) if loras and columns[0] is not None else None
    own = [
        lora.a if start is None else lora.a[:, start : start + lora.b.shape[0]]
        for lora, start in zip(loras, columns, strict=True)
    ]
    pairs = tuple((a.astype(x.dtype), lora.b.astype(x.dtype)) for a, lora in zip(own, loras, strict=True))
    rows = x.reshape(-1, k)
    if shrunk is None:
        y = _matmul(static, rows, weight, bias, pairs, together)
    else:
        of_each = _of_given(shrunk, len(rows), [b.shape[0] for _, b in pairs], x.dtype)
        y = _sum(static, rows, weight, bias, of_each, pairs, shrunk)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def product_takes(
    rows: int,
    weight: PackedNvfp4,
    loras: Sequence[Adapter],
    dtype: jax.typing.DTypeLike,
    *,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> Literal["whole", "parts", "a"]:
    """What the kernel of `nvfp4_matmul` takes of these adapters' `x A` for x [rows, K]: the whole; or sums in parts,
    too, which it adds up; or A, with which it computes `x A` itself, so that a launch that makes `shrunk` would be one
    for nothing. Errors as there."""
    static = _static(loras, dtype, implementation, batch_invariant)
    return _takes(static, rows, weight, [lora.b.shape for lora in loras])


def _static(loras: Sequence[Adapter], dtype, implementation: str | None, batch_invariant: bool) -> _Static:
    chosen = dispatch.choose("nvfp4_matmul", implementation, dispatch.missing_for_mosaic_gpu(dtype))
    return _Static(tuple((float(lora.scale), int(lora.offset)) for lora in loras), chosen, batch_invariant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static, x, weight, bias, pairs, together):
    """What runs where no gradient is taken; else `_forward`, because `_backward` needs `x A`."""
    expand = tuple(b for _, b in pairs)
    if _takes(static, x.shape[0], weight, [b.shape for b in expand]) != "a":
        return _forward(static, x, weight, bias, pairs, together)[0]
    a = jnp.concatenate([a for a, _ in pairs], axis=1) if together is None else together
    return _kernel(static, False, x, weight, bias, a=a, expand=expand, scale=static.adapters[0][0])


def _forward(static, x, weight, bias, pairs, together):
    shrunk, slots = _shrink(static, x, [a for a, _ in pairs], together)
    return _sum(static, x, weight, bias, shrunk, pairs, slots), (x, weight, bias, pairs, together, shrunk)


def _sum(static, x, weight, bias, shrunk: list[Array], pairs, given: Array | None = None) -> Array:
    """All terms of y. `given`: what `shrunk` was made from, where the caller has it in a form that a kernel takes."""
    if static.implementation == "xla":
        matrix, row = packed_parts(weight)
        y = _products(static, x, matrix.astype(x.dtype).T) * row
        y = y if bias is None else y + bias.astype(jnp.float32)
        y = y + _expand(static, shrunk, pairs, weight.shape[0]) if pairs else y
    else:
        y = _kernel_forward(static, x, weight, bias, shrunk, pairs, given)
    return y.astype(x.dtype)


def _shrink(static: _Static, x: Array, a: list[Array], together: Array | None) -> tuple[list[Array], Array | None]:
    """`x A` of each adapter, [M, R], from one product: accumulated in fp32, rounded once; and the slots it lies in
    where a kernel made it (`fused_lora_x`), None where XLA did.

    XLA does not move a concatenation out of a loop, hence `together`: the A side by side, made before it. Batch
    invariant: by XLA always, since more tokens than the kernel is for must have the same bits; in products of 64 rows
    each, so that XLA takes the same kernel for a row however many rows there are.
    """
    if not a:
        return [], None
    together = jnp.concatenate(a, axis=1) if together is None else together
    ranks = [part.shape[1] for part in a]
    if static.implementation == "mosaic_gpu" and not static.batch_invariant:
        slots = fused_lora_x(x, together, ranks)
        if slots is not None:
            return split_lora_x(slots, ranks), slots

    def product(rows: Array) -> Array:
        return fp32_matmul(rows, together).astype(x.dtype)

    shrunk = in_blocks(product, x) if static.batch_invariant else product(x)
    return jnp.split(shrunk, np.cumsum(ranks)[:-1], axis=1), None


def _in_slots(shrunk: list[Array]) -> Array:
    """`x A` of the adapters as the kernel takes it. XLA pads within the sum that makes them; one adapter alone stays as
    it is, because its padding would be a kernel of its own."""
    return shrunk[0] if len(shrunk) == 1 else pad_lora_x(shrunk)


def _of_given(shrunk: Array, rows: int, ranks: list[int], dtype) -> list[Array]:
    """`x A` of each adapter from what the caller has made of it: slots, or parts that are to be added up."""
    in_parts = shrunk.ndim == 3
    shape = (max(1, len(shrunk)), rows, sum(ranks)) if in_parts else (rows, MAX_RANK * len(ranks))
    wanted = jnp.dtype(jnp.float32 if in_parts else dtype)
    if shrunk.shape != shape or shrunk.dtype != wanted or not (in_parts or max(ranks, default=0) <= MAX_RANK):
        raise ValueError(
            f"nvfp4_matmul: shrunk is {shrunk.dtype}{list(shrunk.shape)}, {rows} rows with adapters of ranks {ranks} "
            f"need {wanted}{list(shape)}" + ("" if in_parts else f" and ranks up to {MAX_RANK}")
        )
    if in_parts:
        return jnp.split(shrunk.sum(0).astype(dtype), np.cumsum(ranks)[:-1], axis=1)
    return split_lora_x(shrunk, ranks)


def _expand(static: _Static, shrunk, pairs, n: int) -> Float32[Array, "M N"]:
    """Every adapter's `scale · (x A) B` at its output features, zero elsewhere."""
    out = jnp.zeros((shrunk[0].shape[0], n), jnp.float32)
    for (scale, offset), t, (_, b) in zip(static.adapters, shrunk, pairs, strict=True):
        out = out.at[:, offset : offset + b.shape[1]].add(scale * _products(static, t, b))
    return out


def _products(static: _Static, a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float32[Array, "M N"]:
    """`a b` by XLA."""
    return in_blocks(lambda rows: fp32_matmul(rows, b), a) if static.batch_invariant else fp32_matmul(a, b)


def _kernel_forward(static: _Static, x, weight: PackedNvfp4, bias, shrunk, pairs, given) -> Array:
    """The product with its adapters added within the kernel where they fit it, else around it."""
    if not pairs:
        return _kernel(static, False, x, weight, bias)
    n, _ = weight.shape
    if _fusing_tile(static, x.shape[0], weight, [b.shape for _, b in pairs]) is None:
        return _kernel(static, False, x, weight, bias).astype(jnp.float32) + _expand(static, shrunk, pairs, n)
    given = _in_slots(shrunk) if given is None else given
    expand = tuple(b for _, b in pairs)
    return _kernel(static, False, x, weight, bias, given, expand=expand, scale=static.adapters[0][0])


def _fusing_tile(
    static: _Static, rows: int, weight: PackedNvfp4, shapes: list[tuple[int, int]]
) -> GemmConfig | Split | None:
    """The tile into which adapters with B of these shapes fit; None where there is none."""
    from qerl_kernels.nvfp4_matmul import tuning

    starts = [offset for _, offset in static.adapters]
    adjacent = starts == [sum(width for _, width in shapes[:i]) for i in range(len(shapes))]
    scales = {scale for scale, _ in static.adapters}
    if not adjacent or len(scales) != 1 or 0.0 in scales:
        return None
    return tuning.config_for(rows, *weight.shape, adapters=shapes, batch_invariant=static.batch_invariant)


def _takes(static: _Static, rows: int, weight: PackedNvfp4, shapes: list[tuple[int, int]]) -> str:
    if not shapes or static.implementation == "xla":
        return "whole"
    tile = _fusing_tile(static, rows, weight, shapes)
    return "whole" if tile is None else _given_as(static, tile, rows, shapes)


def _given_as(static: _Static, tile: GemmConfig | Split, rows: int, shapes: list[tuple[int, int]]) -> str:
    """What the kernel of a tile is given. Never parts where a row's bits may not depend on the number of rows: the
    number of parts does."""
    if static.batch_invariant:
        return "whole"
    if isinstance(tile, GemmConfig):
        return "parts" if tile.takes_partials(rows, shapes) else "whole"
    return tile.takes(rows, shapes)


def _kernel(static, transposed: bool, x, weight: PackedNvfp4, bias, shrunk=None, a=None, expand=(), scale=1.0) -> Array:
    """The Mosaic GPU product; a batch of x (`vmap`) becomes more rows of one product. With adapters it takes `shrunk`,
    or `a`: their A side by side."""
    from qerl_kernels.nvfp4_matmul import few_tokens, tuning  # jax ≥ 0.11: imported where it runs
    from qerl_kernels.nvfp4_matmul.gemm import kernel
    from qerl_kernels.nvfp4_matmul.gemm import transposed as dx

    @jax.custom_batching.custom_vmap
    def product(rows, weight, bias, a, expand):
        x, shrunk = rows
        tile = tuning.config_for(
            x.shape[0], *weight.shape, transposed=transposed, adapters=[b.shape for b in expand],
            batch_invariant=static.batch_invariant,
        )  # fmt: skip
        terms = {"bias": bias, "expand": expand, "scale": scale}
        takes = _given_as(static, tile, len(x), [b.shape for b in expand])
        if a is not None and takes == "a":
            return few_tokens.matmul(x, weight, tile, a=a, **terms)
        if a is not None:  # `vmap` made too many tokens of few
            parts = jnp.split(a, np.cumsum([b.shape[0] for b in expand])[:-1], axis=1)
            each, slots = _shrink(static, x, parts, a)
            shrunk = _in_slots(each) if slots is None else slots
        if isinstance(tile, few_tokens.Split):
            return few_tokens.matmul(x, weight, dataclasses.replace(tile, shrinks=False), shrunk=shrunk, **terms)
        if shrunk is not None and shrunk.ndim == 3 and takes != "parts":
            shrunk = _in_slots(_of_given(shrunk, len(x), [b.shape[0] for b in expand], x.dtype))
        if transposed:
            return dx.gemm_dx(x, weight, tile)
        return kernel.gemm(x, weight, tile, bias=bias, lora_x=shrunk, lora_b=expand, scale=scale)

    @product.def_vmap
    def batched(size, in_batched, rows, weight, bias, a, expand):
        if any(jax.tree.leaves(in_batched[1:])):
            raise ValueError("nvfp4_matmul: vmap over x only; weight, bias and adapters have no batch axis")
        # rows of x and of `shrunk` become more rows, also where sums come in parts [size, parts, rows, columns]
        every = lambda leaf, own: leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape))  # noqa: E731
        beside = lambda leaf: jnp.moveaxis(leaf, 0, -3).reshape(*leaf.shape[1:-2], -1, leaf.shape[-1])  # noqa: E731
        rows = jax.tree.map(every, rows, in_batched[0])
        flat = jax.tree.map(beside, rows)
        return product(flat, weight, bias, a, expand).reshape(size, rows[0].shape[1], -1), True

    return product((x, shrunk), weight, bias, a, expand)


def _backward(static, residual, dy):
    x, weight, bias, pairs, together, shrunk = residual
    dx = _input_gradient(static, dy, weight)
    d_pairs = []
    for (scale, offset), t, (a, b) in zip(static.adapters, shrunk, pairs, strict=True):
        part = dy[:, offset : offset + b.shape[1]]
        through_b = (scale * fp32_matmul(part, b.T)).astype(x.dtype)
        dx = dx + fp32_matmul(through_b, a.T)
        d_b = scale * fp32_matmul(t.T, part)
        d_pairs.append((fp32_matmul(x.T, through_b).astype(a.dtype), d_b.astype(b.dtype)))
    d_bias = None if bias is None else dy.astype(jnp.float32).sum(0).astype(bias.dtype)
    # Adapters that are trained come apart (`together` is None), so that nothing is lost here.
    return (
        dx.astype(x.dtype),
        jax.tree.map(no_gradient, weight),
        d_bias,
        tuple(d_pairs),
        jax.tree.map(no_gradient, together),
    )


def _input_gradient(static: _Static, dy, weight: PackedNvfp4) -> Array:
    """`dy · W`. Where rows differ in their multiplier it goes into dy first, as the ratio to the largest (one bf16
    rounding)."""
    if static.implementation == "xla":
        matrix, row = packed_parts(weight)
        return fp32_matmul((dy * row).astype(dy.dtype), matrix.astype(dy.dtype))
    if not weight.uniform:
        row = weight.multiplier[: weight.shape[0]]
        largest = jnp.max(jnp.abs(row))
        dy = (dy * (row / largest)).astype(dy.dtype)
        weight = dataclasses.replace(weight, multiplier=jnp.full_like(weight.multiplier, largest))
    return _kernel(static, True, dy, weight, None)


_matmul.defvjp(_forward, _backward)
