"""The matmuls of a warp on its 16 tokens of a KV tile, by `mma.m16n8k16`, and the store of the output.

The tensor core multiplies A [16 × 16] with B [16 × 8] into C [16 × 8]. The queries, at most eight a key/value head,
take the n8 dimension:

    scores  C [keys, queries]     = A = K [keys, head dim]   · B = Qᵀ [head dim, queries]
    output  C [head dim, queries] = A = Vᵀ [head dim, keys]  · B = Pᵀ [keys, queries]

The softmax weights P come out of the scores as C and become B by `movmatrix`, which transposes 8 × 8 elements within a
warp. Layouts: `layouts`; operands from shared memory: `kv_tiles`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from qerl_kernels.decode_attention.config import QUERIES, WARP_TOKENS
from qerl_kernels.decode_attention.kv_tiles import lane_and_warp, load_keys, load_values, smem_transforms
from qerl_kernels.decode_attention.layouts import (
    ACCUMULATOR,
    B_OPERAND,
    B_OPERAND_FP8,
    MERGED,
    SCALAR,
    accumulator,
    words,
)
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.load import load
from qerl_kernels.ptx.values import F32, I32, Ptr, element

F16_MAX = 65504.0


def load_queries(q: jax.Ref, fp8: bool) -> jax.Array:
    """Eight queries [8, H] as the B operand: bf16 in `B_OPERAND`, or f16 in `B_OPERAND_FP8`, saturated at 65504."""
    if not fp8:
        return load(q, B_OPERAND)
    wide = load(q, B_OPERAND_FP8).astype(jnp.float32)
    return jnp.minimum(jnp.maximum(wide, -F16_MAX), F16_MAX).astype(jnp.float16)


def scores(q: jax.Array, keys: jax.Ref) -> jax.Array:
    """`K qᵀ` of each warp's 16 keys: fp32 [4, 16, 8] in `ACCUMULATOR`.

    Args:
      q: from `load_queries`.
      keys: a stage of the pipeline, [64, H].
    """
    fp8 = q.dtype == jnp.float16
    tile = plgpu.RefType(smem_transforms(keys.shape[1], keys.dtype))
    out = plgpu.ShapeDtypeStruct((4, WARP_TOKENS, QUERIES), jnp.float32, layout=ACCUMULATOR)
    emit = functools.partial(_emit_scores, fp8=fp8)
    return plgpu.inline_mgpu(arg_types=(B_OPERAND_FP8 if fp8 else B_OPERAND, tile), return_type=out)(emit)(q, keys)


def add_values(out: jax.Array, weights: jax.Array, values: jax.Ref, tokens: jax.Array) -> jax.Array:
    """`out + Vᵀ Pᵀ` of each warp's 16 tokens: fp32 [4, H, 8] in `ACCUMULATOR`.

    Args:
      out: the output so far.
      weights: P, fp32 [4, 16, 8] in `ACCUMULATOR`; rounded here to the dtype of the `mma`.
      values: a stage of the pipeline, [64, H].
      tokens: number of its first tokens that count.
    """
    fp8 = values.dtype == jnp.float8_e4m3fn
    tile = plgpu.RefType(smem_transforms(values.shape[1], values.dtype))
    result = plgpu.ShapeDtypeStruct(out.shape, jnp.float32, layout=ACCUMULATOR)
    emit = functools.partial(_emit_values, fp8=fp8)
    weights = weights.astype(jnp.float16 if fp8 else jnp.bfloat16)
    return plgpu.inline_mgpu(arg_types=(ACCUMULATOR, ACCUMULATOR, tile, SCALAR), return_type=result)(emit)(
        out, weights, values, tokens
    )


def store_output(out: jax.Array, out_g: jax.Ref, first: jax.Array, skip: jax.Array, group: int, fp8: bool) -> None:
    """Queries `skip` to `skip + group` of out [H, 8] (in `MERGED`), rounded to bf16, to rows `first` + query of out_g.

    fp8: out's rows are in the order in which `add_values` has them for e4m3.
    """
    emit = functools.partial(_emit_store, group=group, fp8=fp8)
    plgpu.inline_mgpu(arg_types=(MERGED, plgpu.RefType(), SCALAR, SCALAR))(emit)(out, out_g, first, skip)


def _emit_scores(ctx, q, keys, *, fp8):
    del ctx
    machine, b = PtxMachine(), words(q.registers.flat)
    zero = machine.f32(0.0)
    sums = [[zero] * 4, [zero] * 4]  # two chains: half the latency
    for i, a in enumerate(load_keys(machine, keys, q.shape[1], fp8)):
        sums[i % 2] = machine.mma(sums[i % 2], a, b[2 * i : 2 * i + 2], "f16" if fp8 else "bf16")
    total = [F32(arith.addf(x.value, y.value)) for x, y in zip(*sums, strict=True)]
    return accumulator([total], (4, WARP_TOKENS, QUERIES))


def _emit_values(ctx, out, weights, values, tokens, *, fp8):
    del ctx
    machine = PtxMachine()
    b = [machine.movmatrix(word) for word in words(weights.registers.flat)]
    operands = load_values(machine, values, out.shape[1], fp8, I32(tokens.registers.item()))
    found = []
    for (low, high), a in zip(out.registers.reshape(-1, 2), operands, strict=True):
        c = [F32(element(half, i)) for half in (low, high) for i in range(2)]
        found.append(machine.mma(c, a, b, "f16" if fp8 else "bf16"))
    return accumulator(found, out.shape)


def _emit_store(ctx, out, out_g, first, skip, *, group, fp8):
    del ctx
    machine, width = PtxMachine(), out.shape[0]
    thread = machine.thread_index()
    lane, warp = lane_and_warp(machine)
    g = lane >> 2
    # In e4m3 a tile of 16 rows holds the even dims, then the odd ones.
    h = (warp >> 1) * 16 + g * 2 + (warp & 1) if fp8 else warp * 8 + g
    query = (thread & 3) * 2
    base = Ptr(mgpu.utils.memref_ptr(out_g))
    first, skip = I32(first.registers.item()), I32(skip.registers.item())
    text = f"""
    .reg .pred p;
    .reg .b16 y;
    .reg .b64 at;
    setp.lt.u32 p, $2, {group};
    cvt.rn.bf16.f32 y, $3;
    mad.wide.u32 at, $1, 2, $0;
    @p st.global.b16 [at], y;
    """
    for i, pair in enumerate(out.registers.flat):
        for j in range(2):
            at = query + j
            own = at - skip
            offset = (first + at) * width + h + 32 * i
            machine.asm(text, "", base, offset, own, F32(element(pair, j)), effects=True)
