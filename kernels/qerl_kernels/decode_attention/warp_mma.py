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
from qerl_kernels.decode_attention.layouts import ACCUMULATOR, B_OPERAND, MERGED, accumulator, words
from qerl_kernels.ptx.arrays import SCALAR
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import F32, I32, Ptr, element


def scores(q: jax.Array, keys: jax.Ref) -> jax.Array:
    """`K qᵀ` of each warp's 16 keys: fp32 [4, 16, 8] in `ACCUMULATOR`.

    Args:
      q: eight queries, bf16 [8, H] in `B_OPERAND`.
      keys: a stage of the pipeline, [64, H].
    """
    tile = plgpu.RefType(smem_transforms(keys.shape[1], keys.dtype))
    out = plgpu.ShapeDtypeStruct((4, WARP_TOKENS, QUERIES), jnp.float32, layout=ACCUMULATOR)
    return plgpu.inline_mgpu(arg_types=(B_OPERAND, tile), return_type=out)(_emit_scores)(q, keys)


def add_values(out: jax.Array, weights: jax.Array, values: jax.Ref, tokens: jax.Array) -> jax.Array:
    """`out + Vᵀ Pᵀ` of each warp's 16 tokens: fp32 [4, H, 8] in `ACCUMULATOR`.

    Args:
      out: the output so far.
      weights: P, fp32 [4, 16, 8] in `ACCUMULATOR`; rounded here to bf16.
      values: a stage of the pipeline, [64, H].
      tokens: number of its first tokens that count.
    """
    tile = plgpu.RefType(smem_transforms(values.shape[1], values.dtype))
    result = plgpu.ShapeDtypeStruct(out.shape, jnp.float32, layout=ACCUMULATOR)
    return plgpu.inline_mgpu(arg_types=(ACCUMULATOR, ACCUMULATOR, tile, SCALAR), return_type=result)(_emit_values)(
        out, weights.astype(jnp.bfloat16), values, tokens
    )


def store_output(out: jax.Array, out_g: jax.Ref, first: jax.Array, skip: jax.Array, group: int) -> None:
    """Queries `skip` to `skip + group` of out [H, 8] (in `MERGED`), in bf16, to rows `first` + query of out_g."""
    emit = functools.partial(_emit_store, group=group)
    plgpu.inline_mgpu(arg_types=(MERGED, plgpu.RefType(), SCALAR, SCALAR))(emit)(out, out_g, first, skip)


def _emit_scores(ctx, q, keys):
    del ctx
    machine, b = PtxMachine(), words(q.registers.flat)
    zero = machine.f32(0.0)
    sums = [[zero] * 4, [zero] * 4]  # two chains: half the latency
    for i, a in enumerate(load_keys(machine, keys, q.shape[1])):
        sums[i % 2] = machine.mma(sums[i % 2], a, b[2 * i : 2 * i + 2])
    total = [F32(arith.addf(x.value, y.value)) for x, y in zip(*sums, strict=True)]
    return accumulator([total], (4, WARP_TOKENS, QUERIES))


def _emit_values(ctx, out, weights, values, tokens):
    del ctx
    machine = PtxMachine()
    b = [machine.movmatrix(word) for word in words(weights.registers.flat)]
    operands = load_values(machine, values, out.shape[1], I32(tokens.registers.item()))
    found = []
    for (low, high), a in zip(out.registers.reshape(-1, 2), operands, strict=True):
        c = [F32(element(half, i)) for half in (low, high) for i in range(2)]
        found.append(machine.mma(c, a, b))
    return accumulator(found, out.shape)


def _emit_store(ctx, out, out_g, first, skip, *, group):
    del ctx
    machine, width = PtxMachine(), out.shape[0]
    thread = machine.thread_index()
    lane, warp = lane_and_warp(machine)
    h = warp * 8 + (lane >> 2)
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
