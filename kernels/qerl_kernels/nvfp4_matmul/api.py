"""`nvfp4_matmul`: the GEMM with a packed 4-bit weight as the model calls it, with its gradients.

Axes: M rows of x, K input features, N output features, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from qerl_kernels.batch_invariant import in_blocks
from qerl_kernels.decode_prologue.api import fused_lora_x
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul import route as routing
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm, LoraX, join_lora_x, lora_x_of_each, split_lora_x
from qerl_kernels.nvfp4_matmul.packing import packed_parts
from qerl_kernels.nvfp4_matmul.reference import no_gradient
from qerl_kernels.nvfp4_matmul.route import Adapter, Route
from qerl_kernels.ops import fp32_matmul

WIDE_BYTES = 1 << 28  # of a product in fp32, about


def nvfp4_matmul(
    x: Float[Array, "... K"],
    weight: PackedNvfp4,
    bias: Float[Array, " N"] | None = None,
    loras: Sequence[Adapter] = (),
    *,
    implementation: str | None = None,
    batch_invariant: bool = False,
    route: Route | None = None,
    lora_x: LoraX | None = None,
) -> Float[Array, "... N"]:
    """`y = x Wᵀ + bias + Σ_loras scale · (x A) B`, summed in fp32 and rounded to x's dtype.

    Adapters that the kernel cannot take (not adjacent, not covering the weight, of a rank that is no multiple of 8 or
    above 64) are added to its rounded result in fp32: two roundings.

    Differentiable in x, bias and the adapters; the weight is frozen and gets no gradient. `x A` is accumulated in fp32
    and rounded once. On Mosaic GPU the skinny kernel may compute it (`LoraForm.A`), but not where gradients are taken,
    whose backward pass needs it; otherwise, for few rows, the kernel of `decode_prologue`, for shapes it takes and
    without `batch_invariant`; otherwise XLA.

    Args:
      x: activations; bf16 for the kernels, any float dtype for XLA.
      weight: from `packing.pack`.
      bias: added in fp32.
      loras: one adapter for each adapted part of a fused projection.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).
      batch_invariant: a row's bits depend neither on the number of rows nor on the other rows (slower for most shapes).
      route: from `route.route`, for these rows, weight and adapters; None: chosen here.
      lora_x: `x A` of all `loras` as `decode_prologue` makes it. Then nothing here is differentiable.

    Raises:
      ValueError: K of x and of the weight differ, `route` is that of another GEMM, `lora_x` has another shape or dtype
        than `LoraX` for these rows and adapters, or the implementation asked for cannot run here.
    """
    k = weight.shape[1]
    if x.shape[-1] != k:
        raise ValueError(f"nvfp4_matmul: x has {x.shape[-1]} input features, the weight {weight.shape[0]} x {k}")
    rows = x.reshape(-1, k)
    if route is None:
        route = routing.route(len(rows), weight, loras, x.dtype, batch_invariant, implementation=implementation)
    else:
        wanted = routing.problem_of(
            len(rows), weight, loras, implementation or route.problem.implementation, batch_invariant
        )
        if route.problem != wanted:
            raise ValueError(f"nvfp4_matmul: the route is that of {route.problem}, this is {wanted}")
    columns = [getattr(lora, "column", None) for lora in loras]
    all_a = loras[0].a.astype(x.dtype) if loras and columns[0] is not None else None
    own_a = [
        lora.a if start is None else lora.a[:, start : start + lora.b.shape[0]]
        for lora, start in zip(loras, columns, strict=True)
    ]
    pairs = tuple((a.astype(x.dtype), lora.b.astype(x.dtype)) for a, lora in zip(own_a, loras, strict=True))
    if lora_x is None:
        y = _matmul(route, rows, weight, bias, pairs, all_a)
    else:
        of_each = lora_x_of_each(lora_x, len(rows), route.problem.ranks, x.dtype)
        y = _all_terms(route, rows, weight, bias, of_each, pairs, lora_x)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(route: Route, x, weight, bias, pairs, all_a):
    """Runs where no gradient is taken; otherwise `_forward` does, because `_backward` needs `x A`."""
    if route.kernel == "skinny" and route.lora_form is LoraForm.A:
        return _from_lora_a(route, x, weight, bias, pairs, all_a)
    return _forward(route, x, weight, bias, pairs, all_a)[0]


def _forward(route: Route, x, weight, bias, pairs, all_a):
    of_each, lora_x = _compute_lora_x(route, x, [a for a, _ in pairs], all_a)
    return _all_terms(route, x, weight, bias, of_each, pairs, lora_x), (x, weight, bias, pairs, all_a, of_each)


def _compute_lora_x(
    route: Route, x: Array, each_a: list[Array], all_a: Array | None
) -> tuple[list[Array], Array | None]:
    """`x A` of each adapter, [M, R], from one GEMM: accumulated in fp32, rounded once; and the array with all of them
    where a kernel made it (`fused_lora_x`), None where XLA did.

    XLA does not move a concatenation out of a loop, hence `all_a`: the A side by side, made before it. Batch invariant:
    by XLA always, since more rows than the kernel takes must have the same bits; in blocks of 64 rows, so that XLA
    takes the same kernel for a row whatever the number of rows.
    """
    if not each_a:
        return [], None
    all_a = jnp.concatenate(each_a, axis=1) if all_a is None else all_a
    ranks = route.problem.ranks
    if route.config is not None and not route.problem.batch_invariant:
        lora_x = fused_lora_x(x, all_a, ranks)
        if lora_x is not None:
            return split_lora_x(lora_x, ranks), lora_x
    lora_x = _xla_matmul(route, x, all_a, x.dtype)
    return jnp.split(lora_x, np.cumsum(ranks)[:-1], axis=1), None


def _xla_matmul(route: Route, a: Float[Array, "M K"], b: Float[Array, "K N"], dtype=jnp.float32) -> Array:
    """`a b` by XLA, accumulated in fp32."""
    matmul = lambda rows: fp32_matmul(rows, b).astype(dtype)  # noqa: E731
    return in_blocks(matmul, a) if route.problem.batch_invariant else matmul(a)


def _all_terms(route: Route, x, weight, bias, of_each: list[Array], pairs, lora_x: Array | None = None) -> Array:
    """All terms of y. `lora_x`: the array from which `of_each` was taken, where there is one."""
    n = weight.shape[0]
    if route.config is None:
        y = _by_library(route, x, weight, bias, of_each, [b for _, b in pairs])
    elif pairs and not route.is_fused:
        lora_b = [b for _, b in pairs]

        def both(x: Array, *of_each: Array) -> Array:
            y = _call_kernel(route.without_lora(), x, weight, bias).astype(jnp.float32)
            return (y + _lora_terms(route, of_each, lora_b, n)).astype(x.dtype)

        y = _by_rows(both, n, x, *of_each)
    elif pairs:
        lora_x = join_lora_x(of_each) if lora_x is None else lora_x
        y = _call_kernel(route.given_lora_x(), x, weight, bias, lora_x, tuple(b for _, b in pairs))
    else:
        y = _call_kernel(route, x, weight, bias)
    return y.astype(x.dtype)


def _by_library(route: Route, x, weight: PackedNvfp4, bias, of_each: list[Array], lora_b) -> Float[Array, "M N"]:
    """All terms of y by XLA, rounded once."""
    matrix, row = _parts(route, weight, x)

    def all_terms(x: Array, *of_each: Array) -> Array:
        y = _xla_matmul(route, x, matrix.astype(x.dtype).T) * row
        y = y if bias is None else y + bias.astype(jnp.float32)
        y = y + _lora_terms(route, of_each, lora_b, weight.shape[0]) if lora_b else y
        return y.astype(x.dtype)

    return _by_rows(all_terms, weight.shape[0], x, *of_each)


def _by_rows(all_terms: Callable, n: int, x: Array, *of_each: Array) -> Float[Array, "M N"]:
    """`all_terms(x, *of_each)`, of many rows in blocks, since XLA keeps the product and each adapter's term in fp32: of
    gate and up of 7B over 8192 tokens 2.5 GB, in place of the 0.6 of the result.
    """
    size = rows_at_once(len(x), n)
    if size == len(x):
        return all_terms(x, *of_each)
    blocks = [rows.reshape(-1, size, rows.shape[1]) for rows in (x, *of_each)]
    return jax.lax.map(lambda block: all_terms(*block), blocks).reshape(len(x), -1)


def rows_at_once(m: int, n: int) -> int:
    """Rows of x, a divisor of m, that XLA multiplies at a time: their products in fp32 take at most `WIDE_BYTES`. All m
    where it has no such divisor near that.
    """
    fewest = -(-4 * m * n // WIDE_BYTES)
    return m // next((blocks for blocks in range(fewest, 2 * fewest) if m % blocks == 0), 1)


def _parts(route: Route, weight: PackedNvfp4, x: Array) -> tuple[Array, Array]:
    """`packing.packed_parts`, by a kernel where the route says so: not before x is there, so that the matrices of
    several projections do not wait in memory."""
    if route.kernel == "xla":
        return packed_parts(weight)
    from qerl_kernels.nvfp4_matmul.dequantize.kernel import dequantize  # jax ≥ 0.11: imported where it runs

    words, _ = jax.lax.optimization_barrier((weight.words, x))
    weight = dataclasses.replace(weight, words=words)
    return dequantize(weight, gpu=route.problem.gpu), weight.multiplier[: weight.shape[0]]


def _lora_terms(route: Route, of_each: list[Array], lora_b, n: int) -> Float32[Array, "M N"]:
    """Every adapter's `scale · (x A) B` at its output features, zero elsewhere."""
    terms = [
        jnp.pad(scale * _xla_matmul(route, own, b), ((0, 0), (offset, n - offset - width)))
        for (_, width, offset, scale), own, b in zip(route.problem.adapters, of_each, lora_b, strict=True)
    ]
    return functools.reduce(jnp.add, terms)


def _from_lora_a(route: Route, x, weight, bias, pairs, all_a) -> Array:
    """y where the GEMM computes `x A`. With the rows that `vmap` makes it may be another GEMM, which does not."""
    all_a = jnp.concatenate([a for a, _ in pairs], axis=1) if all_a is None else all_a

    def matmul(x, weight, bias, all_a, lora_b):
        here = route.for_rows(len(x))
        if here.lora_form is LoraForm.A:
            return _launch_skinny(here, x, weight, bias, lora_b, a=all_a)
        each_a = jnp.split(all_a, np.cumsum(route.problem.ranks)[:-1], axis=1)
        of_each, lora_x = _compute_lora_x(here, x, each_a, all_a)
        return _launch(here, x, weight, bias, join_lora_x(of_each) if lora_x is None else lora_x, lora_b)

    return _over_rows(matmul)(x, weight, bias, all_a, tuple(b for _, b in pairs))


def _call_kernel(route: Route, x, weight: PackedNvfp4, bias, lora_x=None, lora_b=()) -> Array:
    """The GEMM by a Mosaic GPU kernel; a batch of x (`vmap`) becomes more rows of one GEMM."""

    def matmul(rows, weight, bias, lora_b):
        x, lora_x = rows
        here = route.for_rows(len(x))
        return _launch(here, x, weight, bias, lora_x, lora_b)

    return _over_rows(matmul)((x, lora_x), weight, bias, lora_b)


def _over_rows(matmul):
    """`matmul(rows, *rest)`, whose `vmap` over the leaves of `rows` is one call with more rows."""
    call = jax.custom_batching.custom_vmap(matmul)

    @call.def_vmap
    def batched(size, in_batched, rows, *rest):
        if any(jax.tree.leaves(in_batched[1:])):
            raise ValueError("nvfp4_matmul: vmap over x only; weight, bias and adapters have no batch axis")
        # rows of x and of `lora_x` become more rows, also of split-K partials [size, partials, rows, columns]
        every = lambda leaf, own: leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape))  # noqa: E731
        beside = lambda leaf: jnp.moveaxis(leaf, 0, -3).reshape(*leaf.shape[1:-2], -1, leaf.shape[-1])  # noqa: E731
        rows = jax.tree.map(every, rows, in_batched[0])
        count = jax.tree.leaves(rows)[0].shape[1]
        return call(jax.tree.map(beside, rows), *rest).reshape(size, count, -1), True

    return call


def _launch(route: Route, x, weight: PackedNvfp4, bias, lora_x, lora_b) -> Array:
    """The kernel of the route, given `x A`."""
    from qerl_kernels.nvfp4_matmul.gemm import kernel, transposed  # jax ≥ 0.11: imported where it runs

    if route.config is None or (lora_b and not route.is_fused):  # `vmap` made more rows than can be fused
        of_each = [] if lora_x is None else _each(lora_x, len(x), route.problem.ranks, x.dtype)
        return _all_terms(route, x, weight, bias, of_each, [(None, b) for b in lora_b])
    if route.problem.transposed:
        return transposed.gemm_dx(x, weight, route.config, gpu=route.problem.gpu)
    if route.kernel == "skinny":
        return _launch_skinny(route.given_lora_x(), x, weight, bias, lora_b, lora_x=lora_x)
    if route.kernel == "tcgen05":
        from qerl_kernels.nvfp4_matmul.tcgen05 import kernel as tcgen05

        return tcgen05.gemm(x, weight, bias=bias, gpu=route.problem.gpu)
    if lora_x is not None and lora_x.ndim == 3 and route.lora_form is not LoraForm.PARTIALS:
        lora_x = join_lora_x(lora_x_of_each(lora_x, len(x), route.problem.ranks, x.dtype))
    scale = route.problem.adapters[0][-1] if lora_b else 1.0
    terms = {"bias": bias, "lora_x": lora_x, "lora_b": lora_b, "scale": scale}
    return kernel.gemm(x, weight, route.config, **terms, gpu=route.problem.gpu)


def _each(lora_x: LoraX, m: int, ranks: list[int], dtype) -> list[Array]:
    """`lora_x_of_each`, also of one adapter alone that kept its rank (`join_lora_x`)."""
    return [lora_x] if lora_x.shape == (m, *ranks) else lora_x_of_each(lora_x, m, ranks, dtype)


def _launch_skinny(route: Route, x, weight: PackedNvfp4, bias, lora_b, lora_x=None, a=None) -> Array:
    """The skinny kernel, given `x A` or A."""
    from qerl_kernels.nvfp4_matmul.skinny import kernel  # jax ≥ 0.11: imported where it runs

    scale = route.problem.adapters[0][-1] if lora_b else 1.0
    terms = {"bias": bias, "lora_a": a, "lora_b": lora_b, "scale": scale, "gpu": route.problem.gpu}
    return kernel.skinny_matmul(x, weight, route.config, lora_x=lora_x, **terms)


def _backward(route: Route, residual, dy):
    x, weight, bias, pairs, all_a, of_each = residual
    dx = _input_gradient(route, dy, weight)
    each_through_b, d_pairs = [], []
    for run in _alike(route.problem.adapters):
        _, width, offset, scale = route.problem.adapters[run[0]]
        d_own = dy[:, offset : offset + len(run) * width].reshape(-1, len(run), width)
        own, a, b = ([each[i] for i in run] for each in (of_each, *zip(*pairs, strict=True)))
        through_b = (scale * jax.vmap(fp32_matmul, (1, 0))(d_own, jnp.stack(b).mT)).astype(x.dtype)
        d_b = scale * jax.vmap(fp32_matmul, (0, 1))(jnp.stack(own).mT, d_own)
        d_a = [fp32_matmul(x.T, own_through_b) for own_through_b in through_b]
        d_pairs += [(d_a[i].astype(a[i].dtype), d_b[i].astype(b[i].dtype)) for i in range(len(run))]
        each_through_b += list(through_b)
    if pairs:
        # One product for all adapters, in x's dtype: one for each, in fp32, would each write twice the bytes of dx.
        all_through_b, a_of_all = (jnp.concatenate(each, axis=1) for each in (each_through_b, [a for a, _ in pairs]))
        dx = dx.astype(jnp.float32) + fp32_matmul(all_through_b, a_of_all.T).astype(x.dtype)
    d_bias = None if bias is None else dy.astype(jnp.float32).sum(0).astype(bias.dtype)
    # Adapters that are trained come apart (`all_a` is None), so that nothing is lost here.
    return (
        dx.astype(x.dtype),
        jax.tree.map(no_gradient, weight),
        d_bias,
        tuple(d_pairs),
        jax.tree.map(no_gradient, all_a),
    )


def _alike(adapters: Sequence[tuple[int, int, int, float]]) -> list[list[int]]:
    """Indices of the adapters (`Problem.adapters`), adjacent ones of one rank, width and scale together, such as gate's
    and up's. The gradients of several are one batched GEMM, which reads its part of dy where it lies; a GEMM of each
    reads a slice, for which XLA makes a copy.
    """
    runs: list[list[int]] = []
    for i, (rank, width, offset, scale) in enumerate(adapters):
        if runs and adapters[i - 1] == (rank, width, offset - width, scale):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _input_gradient(route: Route, dy, weight: PackedNvfp4) -> Array:
    """`dy · W`. Unequal row multipliers are applied to dy first, as ratios to the largest (one bf16 rounding)."""
    of_dx = route.dx()
    if of_dx.config is None:
        matrix, row = _parts(of_dx, weight, dy)
        return fp32_matmul((dy * row).astype(dy.dtype), matrix.astype(dy.dtype))
    if not weight.uniform:
        row = weight.multiplier[: weight.shape[0]]
        largest = jnp.max(jnp.abs(row))
        dy = (dy * (row / largest)).astype(dy.dtype)
        weight = dataclasses.replace(weight, multiplier=jnp.full_like(weight.multiplier, largest))
    return _call_kernel(of_dx, dy, weight, None)


_matmul.defvjp(_forward, _backward)
