"""What one warp does with its registers: scores of 16 keys, and their values added up, by `mma.sync.m16n8k16`.

The tensor core multiplies A [16 × 16] with B [16 × 8] into C [16 × 8]. The queries take the slot of eight:

    scores  C [keys, queries] = A = K [keys, head dim]   · B = Qᵀ [head dim, queries]
    output  C [head dim, queries] = A = Vᵀ [head dim, keys] · B = Pᵀ [keys, queries]

With lane = 4 g + c, a thread holds of C rows g and g + 8, columns 2 c and 2 c + 1; of A the same rows, columns 2 c,
2 c + 1 and those plus 8; of B column g, rows 2 c, 2 c + 1 and those plus 8. `ldmatrix` brings A from shared memory,
transposed for the values; the weights P come out of the scores as C and become B by `movmatrix`, which transposes 8 × 8
elements within a warp. Source: PTX ISA, "Matrix fragments for mma.m16n8k16", "ldmatrix", "movmatrix".

Tiles of keys and values lie in shared memory as TMA writes them: blocks of 8 tokens × 64 elements, 1 KiB each, in which
the 16-byte chunk j of token t lies at j ^ t.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
# [head dim, queries] spread over the threads, two queries each.
MERGED = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
# How TMA writes a tile.
RING = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def scores_of(q: jax.Array, keys: jax.Ref) -> jax.Array:
    """q · kᵀ of each warp's 16 keys: fp32 [4, 16, 8] in `FRAGMENT`. q: [8, H] in `SLOT`, keys: a slot, [64, H]."""
    out = plgpu.ShapeDtypeStruct((4, KEYS_OF_WARP, QUERIES), jnp.float32, layout=FRAGMENT)
    return plgpu.inline_mgpu(arg_types=(SLOT, plgpu.RefType(RING)), return_type=out)(_scores_lane)(q, keys)


def add_values(out: jax.Array, weights: jax.Array, values: jax.Ref, left: jax.Array) -> jax.Array:
    """out + vᵀ · weights of each warp's 16 keys: fp32 [4, H, 8] in `FRAGMENT`.

    weights: bf16 [4, 16, 8] in `FRAGMENT`; values: a slot, [64, H], of which the first `left` tokens count.
    """
    types = (FRAGMENT, FRAGMENT, plgpu.RefType(RING), plgpu.Layout.WG_SPLAT(()))
    result = plgpu.ShapeDtypeStruct(out.shape, jnp.float32, layout=FRAGMENT)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(_values_lane)(out, weights, values, left)


def store_result(out: jax.Array, out_g: jax.Ref, first: jax.Array, skip: jax.Array, group: int) -> None:
    """Queries `skip` to `skip + group` of out [H, 8] (in `MERGED`), rounded to bf16, to rows `first` + query."""
    splat = plgpu.Layout.WG_SPLAT(())
    types = (MERGED, plgpu.RefType(), splat, splat)
    plgpu.inline_mgpu(arg_types=types)(functools.partial(_store_lane, group=group))(out, out_g, first, skip)


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


def _load_matrices(tile: ir.Value, width: int, transposed: bool) -> list[list[ir.Value]]:
    """A for the 16 keys of this warp against every 16 of the head dim: four registers each.

    Lane 8 j + r gives the address of row r of the j-th 8 × 8 matrix: with A = K, j = 1 is the next eight keys and
    j = 2 the next eight of the head dim; with A = Vᵀ the two change places.
    """
    lane, warp = _lane_and_warp()
    r, j = arith.andi(lane, _const(7)), arith.shrui(lane, _const(3))
    low, high = arith.andi(j, _const(1)), arith.shrui(j, _const(1))
    more_keys, more_width = (high, low) if transposed else (low, high)
    blocks = arith.addi(arith.muli(warp, _const(2)), more_keys)
    start = arith.addi(llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(tile)), arith.muli(r, _const(128)))
    start = arith.addi(start, arith.muli(blocks, _const(width // 64 * 1024)))
    start = arith.addi(start, arith.muli(arith.xori(r, more_width), _const(16)))
    starts = [arith.xori(start, _const(32 * i)) for i in range(4)]
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4 + %d];"
    return [_asm(4, [starts[i % 4]], text % (i // 4 * 1024), "r") for i in range(width // 16)]


def _multiply(a: list[ir.Value], b: list[ir.Value], c: list[ir.Value]) -> list[ir.Value]:
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
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


def _scores_lane(ctx, q, keys):
    del ctx
    width = q.shape[1]
    b = [mgpu.utils.bitcast(register, _i32()) for register in q.registers.flat]
    zero = mgpu.c(0.0, ir.F32Type.get())
    sums = [[zero] * 4, [zero] * 4]  # two chains: half the latency
    for i, a in enumerate(_load_matrices(keys, width, transposed=False)):
        sums[i % 2] = _multiply(a, b[2 * i : 2 * i + 2], sums[i % 2])
    both = [arith.addf(x, y) for x, y in zip(*sums, strict=True)]
    return _fragment([both], (4, KEYS_OF_WARP, QUERIES))


def _values_lane(ctx, out, weights, values, left):
    del ctx
    width = out.shape[1]
    b = [
        _asm(1, [mgpu.utils.bitcast(p, _i32())], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r")[0]
        for p in weights.registers.flat
    ]
    lane, warp = _lane_and_warp()
    key = arith.addi(arith.muli(warp, _const(KEYS_OF_WARP)), arith.muli(arith.andi(lane, _const(3)), _const(2)))
    masks = [_mask(arith.subi(left.registers.item(), arith.addi(key, _const(more)))) for more in (0, 8)]
    sums = out.registers.reshape(-1, 2)
    results = []
    for (low, high), a in zip(sums, _load_matrices(values, width, transposed=True), strict=True):
        a = [arith.andi(register, masks[i // 2]) for i, register in enumerate(a)]
        results.append(_multiply(a, b, [_element(low, 0), _element(low, 1), _element(high, 0), _element(high, 1)]))
    return _fragment(results, out.shape)


def _mask(left: ir.Value) -> ir.Value:
    """Mask of a pair of bf16 of which the first `left` (any integer) count."""
    text = """{
    .reg .pred one, two;
    setp.gt.s32 one, $1, 0;
    setp.gt.s32 two, $1, 1;
    selp.b32 $0, 0x0000FFFF, 0, one;
    @two mov.b32 $0, 0xFFFFFFFF;
    }"""
    return _asm(1, [left], text, "r", pure=True)[0]


def _store_lane(ctx, out, out_g, first, skip, *, group):
    del ctx
    width = out.shape[0]
    thread = mgpu.utils.thread_idx()
    lane, warp = _lane_and_warp()
    h = arith.addi(arith.muli(warp, _const(8)), arith.shrui(lane, _const(2)))
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
