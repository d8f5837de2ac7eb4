"""What one warp does with its registers: scores of 16 keys, and their values added up, by `mma.sync.m16n8k16`.

The tensor core multiplies A [16 × 16] with B [16 × 8] into C [16 × 8]. The queries take the slot of eight:

    scores  C [keys, queries] = A = K [keys, head dim]   · B = Qᵀ [head dim, queries]
    output  C [head dim, queries] = A = Vᵀ [head dim, keys] · B = Pᵀ [keys, queries]

With lane = 4 g + c, a thread holds of C rows g and g + 8, columns 2 c and 2 c + 1; of A the same rows, columns 2 c,
2 c + 1 and those plus 8; of B column g, rows 2 c, 2 c + 1 and those plus 8. `ldmatrix` brings A from shared memory,
transposed for the values; the weights P come out of the scores as C and become B by `movmatrix`, which transposes 8 × 8
elements within a warp. Source: PTX ISA, "Matrix fragments for mma.m16n8k16", "ldmatrix", "movmatrix".

Tiles of keys and values lie in shared memory as TMA writes them: blocks of 8 tokens × 128 bytes, in which the 16-byte
chunk j of token t lies at j ^ t; where a token has 64 bytes, of 8 tokens × 64 bytes, the chunk at j ^ (t / 2).

Caches in e4m3 are multiplied in f16, of which every e4m3 number is one, and to which one instruction converts two of
them. `ldmatrix` moves pairs of bytes, so that a thread's register holds four numbers in place of two, and both products
are told another order of the head dim:

- of K the four are neighbours of one key, 4 c to 4 c + 3 of every 16. The first two stand in A's columns 2 c and
  2 c + 1, the others in those plus 8; the queries lie likewise (`SLOT_FP8`), and a sum may take any order.
- of V, transposed, they are dims 2 g and 2 g + 1 of tokens 2 c and 2 c + 1. The even dim stands in row g of A and
  hence of C, the odd one in row g + 8: `store_result` writes row by row what belongs there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

QUERIES = 8
KEYS_OF_WARP = 16

_REPLICATED = plgpu.Replicated
# [warps, rows, queries] as the accumulators C lie: each warp has its own.
FRAGMENT = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 16, 8), (8, 8), (2,))), warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1
)
# [queries, head dim] as B lies, the same in all warps.
SLOT = plgpu.Layout.TILED(plgpu.Tiling(((8, 8), (2,))), warp_dims=(_REPLICATED(4),), lane_dims=(-3, -2), vector_dim=-1)
SLOT_FP8 = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 16), (4,))), warp_dims=(_REPLICATED(4),), lane_dims=(-3, -2), vector_dim=-1
)
# [head dim, queries] spread over the threads, two queries each.
MERGED = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
F16_MAX = 65504.0


def ring_transforms(width: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """How TMA writes a tile of that head dim."""
    of_token = _row_bytes(width, jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, of_token // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(of_token)


def load_queries(q: jax.Ref, fp8: bool) -> jax.Array:
    """Eight queries [8, H] as `scores_of` wants them: bf16 in `SLOT`, or f16 in `SLOT_FP8`, saturated at 65504."""
    if not fp8:
        return plgpu.load(q, layout=SLOT, optimized=False)
    wide = plgpu.load(q, layout=SLOT_FP8, optimized=False).astype(jnp.float32)
    return jnp.minimum(jnp.maximum(wide, -F16_MAX), F16_MAX).astype(jnp.float16)


def scores_of(q: jax.Array, keys: jax.Ref) -> jax.Array:
    """q · kᵀ of each warp's 16 keys: fp32 [4, 16, 8] in `FRAGMENT`. q: by `load_queries`, keys: a slot, [64, H]."""
    fp8 = q.dtype == jnp.float16
    tile = plgpu.RefType(ring_transforms(keys.shape[1], keys.dtype))
    out = plgpu.ShapeDtypeStruct((4, KEYS_OF_WARP, QUERIES), jnp.float32, layout=FRAGMENT)
    lane = functools.partial(_scores_lane, fp8=fp8)
    return plgpu.inline_mgpu(arg_types=(SLOT_FP8 if fp8 else SLOT, tile), return_type=out)(lane)(q, keys)


def add_values(out: jax.Array, weights: jax.Array, values: jax.Ref, left: jax.Array) -> jax.Array:
    """out + vᵀ · weights of each warp's 16 keys: fp32 [4, H, 8] in `FRAGMENT`.

    weights: fp32 [4, 16, 8] in `FRAGMENT`, rounded here to what multiplies; values: a slot, [64, H], of which the first
    `left` tokens count.
    """
    fp8 = values.dtype == jnp.float8_e4m3fn
    tile = plgpu.RefType(ring_transforms(values.shape[1], values.dtype))
    types = (FRAGMENT, FRAGMENT, tile, plgpu.Layout.WG_SPLAT(()))
    result = plgpu.ShapeDtypeStruct(out.shape, jnp.float32, layout=FRAGMENT)
    lane = functools.partial(_values_lane, fp8=fp8)
    weights = weights.astype(jnp.float16 if fp8 else jnp.bfloat16)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(lane)(out, weights, values, left)


def store_result(
    out: jax.Array, out_g: jax.Ref, first: jax.Array, skip: jax.Array, group: int, fp8: bool = False
) -> None:
    """Queries `skip` to `skip + group` of out [H, 8] (in `MERGED`), rounded to bf16, to rows `first` + query.

    fp8: out's rows are in the order in which `add_values` has them for e4m3.
    """
    splat = plgpu.Layout.WG_SPLAT(())
    types = (MERGED, plgpu.RefType(), splat, splat)
    lane = functools.partial(_store_lane, group=group, fp8=fp8)
    plgpu.inline_mgpu(arg_types=types)(lane)(out, out_g, first, skip)


def _row_bytes(width: int, itemsize: int) -> int:
    return min(128, width * itemsize)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _const(value: int) -> ir.Value:
    return mgpu.c(value, _i32())


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    thread = mgpu.utils.thread_idx()
    lane = arith.andi(thread, _const(31))
    return lane, arith.andi(arith.shrui(thread, _const(5)), _const(3))


def _element(vec: ir.Value, i: int) -> ir.Value:
    return vector.extract(vec, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _asm(results: int, inputs: list[ir.Value], text: str, kinds: str, kind: str = "r", pure: bool = False) -> list:
    """Inline PTX with `results` 32-bit outputs of one kind ("r" integer, "f" float)."""
    type_ = _i32() if kind == "r" else ir.F32Type.get()
    outs = ",".join([f"={kind}"] * results)
    returned = type_ if results == 1 else llvm.StructType.get_literal([type_] * results)
    value = llvm.inline_asm(returned, inputs, text, f"{outs},{kinds}", has_side_effects=not pure)
    return [value] if results == 1 else [llvm.extractvalue(type_, value, [i]) for i in range(results)]


def _load_matrices(tile: ir.Value, width: int, transposed: bool, fp8: bool) -> list[list[ir.Value]]:
    """The 16 keys of this warp against every 32 bytes of the head dim: four registers each.

    Lane 8 j + r gives the address of row r of the j-th matrix of 8 tokens × 16 bytes. In bf16 they are A: with A = K,
    j = 1 is the next eight keys and j = 2 the next 16 bytes; with A = Vᵀ the two change places. In e4m3 they are two A
    before they are converted, the tokens of each side by side.
    """
    itemsize = 1 if fp8 else 2
    row = _row_bytes(width, itemsize)
    lane, warp = _lane_and_warp()
    r, j = arith.andi(lane, _const(7)), arith.shrui(lane, _const(3))
    low, high = arith.andi(j, _const(1)), arith.shrui(j, _const(1))
    more_keys, more_width = (high, low) if transposed and not fp8 else (low, high)
    blocks = arith.addi(arith.muli(warp, _const(2)), more_keys)
    swizzle = r if row == 128 else arith.shrui(r, _const(1))
    start = arith.addi(llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(tile)), arith.muli(r, _const(row)))
    start = arith.addi(start, arith.muli(blocks, _const(8 * width * itemsize)))
    start = arith.addi(start, arith.muli(arith.xori(swizzle, more_width), _const(16)))
    starts = [arith.xori(start, _const(32 * i)) for i in range(row // 32)]
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4 + %d];"
    return [
        _asm(4, [starts[i % len(starts)]], text % (i // len(starts) * 1024), "r") for i in range(width * itemsize // 32)
    ]


def _to_f16(four: ir.Value) -> list[ir.Value]:
    """Four e4m3 numbers as two pairs of f16; exact."""
    text = """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
    return _asm(2, [four], text, "r", pure=True)


def _keys_of(four: list[ir.Value]) -> list[list[ir.Value]]:
    """Two A = K in f16 from e4m3 keys as `_load_matrices` brings them."""
    results = []
    for some_keys, next_keys in (four[:2], four[2:]):
        (low, high), (next_low, next_high) = _to_f16(some_keys), _to_f16(next_keys)
        results.append([low, next_low, high, next_high])
    return results


def _values_of(four: list[ir.Value]) -> list[list[ir.Value]]:
    """Two A = Vᵀ in f16 likewise: bytes 0 and 2 of a register are one dim of two tokens, bytes 1 and 3 the next."""
    apart = [_asm(1, [word], "prmt.b32 $0, $1, 0, 0x3120;", "r", pure=True)[0] for word in four]
    return [[*_to_f16(tokens), *_to_f16(next_tokens)] for tokens, next_tokens in (apart[:2], apart[2:])]


def _multiply(a: list[ir.Value], b: list[ir.Value], c: list[ir.Value], fp8: bool) -> list[ir.Value]:
    kind = "f16" if fp8 else "bf16"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, "
        "{$10, $11, $12, $13};"
    )
    return _asm(4, [*a, *b, *c], text, "r,r,r,r,r,r,f,f,f,f", kind="f", pure=True)


def array_of(registers: Sequence[ir.Value], shape: tuple[int, ...], layout: plgpu.Layout) -> mgpu.FragmentedArray:
    """A thread's registers, in the order of the layout, as an array."""
    layout = layout.to_mgpu()
    flat = np.empty(len(registers), dtype=object)
    flat[:] = registers
    return mgpu.FragmentedArray(_registers=flat.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)


def _fragment(pairs: list[list[ir.Value]], shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    """Accumulators of 16 rows each, four registers, as an array in `FRAGMENT`."""
    two = ir.VectorType.get((2,), ir.F32Type.get())
    registers = [vector.from_elements(two, half) for a, b, c, d in pairs for half in ([a, b], [c, d])]
    return array_of(registers, shape, FRAGMENT)


def _scores_lane(ctx, q, keys, *, fp8):
    del ctx
    width = q.shape[1]
    b = _words(q.registers.flat)
    zero = mgpu.c(0.0, ir.F32Type.get())
    sums = [[zero] * 4, [zero] * 4]  # two chains: half the latency
    matrices = _load_matrices(keys, width, transposed=False, fp8=fp8)
    if fp8:
        matrices = [a for four in matrices for a in _keys_of(four)]
    for i, a in enumerate(matrices):
        sums[i % 2] = _multiply(a, b[2 * i : 2 * i + 2], sums[i % 2], fp8)
    both = [arith.addf(x, y) for x, y in zip(*sums, strict=True)]
    return _fragment([both], (4, KEYS_OF_WARP, QUERIES))


def _words(registers: Sequence[ir.Value]) -> list[ir.Value]:
    """Vectors of two or four 16-bit numbers as 32-bit words."""
    words = []
    for register in registers:
        count = ir.VectorType(register.type).shape[0] // 2
        several = mgpu.utils.bitcast(register, ir.VectorType.get((count,), _i32()))
        words += [_element(several, i) for i in range(count)]
    return words


def _values_lane(ctx, out, weights, values, left, *, fp8):
    del ctx
    width = out.shape[1]
    b = [
        _asm(1, [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r")[0]
        for word in _words(weights.registers.flat)
    ]
    lane, warp = _lane_and_warp()
    key = arith.addi(arith.muli(warp, _const(KEYS_OF_WARP)), arith.muli(arith.andi(lane, _const(3)), _const(2)))
    masks = [_mask(arith.subi(left.registers.item(), arith.addi(key, _const(more)))) for more in (0, 8)]
    matrices = _load_matrices(values, width, transposed=True, fp8=fp8)
    of_keys = (0, 1, 0, 1) if fp8 else (0, 0, 1, 1)  # which mask; the halves of a register are two tokens either way
    matrices = [[arith.andi(word, masks[i]) for i, word in zip(of_keys, four, strict=True)] for four in matrices]
    if fp8:
        matrices = [a for four in matrices for a in _values_of(four)]
    sums = out.registers.reshape(-1, 2)
    results = []
    for (low, high), a in zip(sums, matrices, strict=True):
        c = [_element(low, 0), _element(low, 1), _element(high, 0), _element(high, 1)]
        results.append(_multiply(a, b, c, fp8))
    return _fragment(results, out.shape)


def _mask(left: ir.Value) -> ir.Value:
    """Mask of two halves of a register of which the first `left` (any integer) count."""
    text = """{
    .reg .pred one, two;
    setp.gt.s32 one, $1, 0;
    setp.gt.s32 two, $1, 1;
    selp.b32 $0, 0x0000FFFF, 0, one;
    @two mov.b32 $0, 0xFFFFFFFF;
    }"""
    return _asm(1, [left], text, "r", pure=True)[0]


def _store_lane(ctx, out, out_g, first, skip, *, group, fp8):
    del ctx
    width = out.shape[0]
    thread = mgpu.utils.thread_idx()
    lane, warp = _lane_and_warp()
    g = arith.shrui(lane, _const(2))
    if fp8:  # rows 0 to 15 hold the even dims, then the odd ones
        even = arith.addi(arith.muli(arith.shrui(warp, _const(1)), _const(16)), arith.muli(g, _const(2)))
        h = arith.addi(even, arith.andi(warp, _const(1)))
    else:
        h = arith.addi(arith.muli(warp, _const(8)), g)
    query = arith.muli(arith.andi(thread, _const(3)), _const(2))
    base = mgpu.utils.memref_ptr(out_g)
    for i, pair in enumerate(out.registers.flat):
        for j in range(2):
            at = arith.addi(query, _const(j))
            own = arith.subi(at, skip.registers.item())
            offset = arith.addi(arith.muli(arith.addi(first.registers.item(), at), _const(width)), h)
            offset = arith.addi(offset, _const(32 * i))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [base, offset, own, _element(pair, j)],
                f"""{{
                .reg .pred p;
                .reg .b16 y;
                .reg .b64 at;
                setp.lt.u32 p, $2, {group};
                cvt.rn.bf16.f32 y, $3;
                mad.wide.u32 at, $1, 2, $0;
                @p st.global.b16 [at], y;
                }}""",
                "l,r,r,f",
                has_side_effects=True,
            )
