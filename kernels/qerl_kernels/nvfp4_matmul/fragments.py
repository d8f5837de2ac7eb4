"""What one warpgroup does with its registers: 4-bit words to the A operand of the tensor cores, and products of few
tokens.

The layouts name which thread holds which element (see `packing`, and the PTX manual on the fragments of `wgmma`); the
arithmetic is inline PTX, because it is the inner loop: 17 instructions for eight weights.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from qerl_kernels.nvfp4_matmul.packing import SCALE_BIAS, SCALE_MASK, TILE

WORDS = plgpu.Layout.WG_STRIDED((4, 128), vec_size=4)
SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (16,), (2,))), warp_dims=(-3,), lane_dims=(-2, plgpu.Replicated(4)), vector_dim=-1
)
# The transposed product reads the tile so that warp w gets step w of the rows of every warp: its 16 rows of wᵀ.
WORDS_T = plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4, 4), (4, 1))), warp_dims=(-3,), lane_dims=(-5,), vector_dim=-1)
SCALES_T = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (16,), (2,), (1,))),
    warp_dims=(-2, plgpu.Replicated(2)),
    lane_dims=(-3, plgpu.Replicated(4)),
    vector_dim=-1,
)

# $0-$3: the A registers. $4: word of codes. $5: scales, already rotated. Bit patterns: see `packing`.
_DEQUANTIZE = f"""{{
.reg .b32 p, lo, hi, t, u;
.reg .b16 l, h;
and.b32 p, $5, {SCALE_MASK:#x};
or.b32 p, p, {SCALE_BIAS:#x};
mov.b32 {{l, h}}, p;
mov.b32 lo, {{l, l}};
mov.b32 hi, {{h, h}};
and.b32 t, $4, 0x81C081C0;
mul.rn.bf16x2 $0, t, lo;
shl.b32 t, $4, 3;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $1, t, hi;
shl.b32 t, $4, 1;
and.b32 t, t, 0x80008000;
shl.b32 u, $4, 6;
lop3.b32 t, u, 0x01C001C0, t, 0xEA;
mul.rn.bf16x2 $2, t, lo;
shl.b32 t, $4, 2;
and.b32 t, t, 0x80008000;
shr.b32 u, $4, 3;
lop3.b32 t, u, 0x01C001C0, t, 0xEA;
mul.rn.bf16x2 $3, t, hi;
}}"""


def dequantize(words: jax.Array, scales: jax.Array, transposed: bool) -> jax.Array:
    """A tile of words and scales in registers -> its [64, 64] bf16 values (weight × 2^-13) as `wgmma` wants A."""
    layouts = (WORDS_T, SCALES_T) if transposed else (WORDS, SCALES)
    lane = _dequantize_lane_transposed if transposed else _dequantize_lane
    out = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=layouts, return_type=out)(lane)(words, scales)


def _four_registers(word: ir.Value, scale: ir.Value) -> list[ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    out = llvm.inline_asm(llvm.StructType.get_literal([i32] * 4), [word, scale], _DEQUANTIZE, "=&r,=&r,=&r,=&r,r,r")
    return [llvm.extractvalue(i32, out, [j]) for j in range(4)]


def _element(vec: ir.Value, i: int) -> ir.Value:
    return vector.extract(vec, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _rotate(word: ir.Value, bits: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [word, bits], "shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,r")


def _constant(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _as_fragments(registers: list[list[ir.Value]]) -> mgpu.FragmentedArray:
    """registers[step][j], j = row half + 2 × column half -> the array in the layout of A."""
    shape = mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    flat = np.empty((8, 2), dtype=object)  # (column half of each step, row half)
    for step, regs in enumerate(registers):
        for j, reg in enumerate(regs):
            flat[2 * step + j // 2, j % 2] = mgpu.utils.bitcast(reg, pair)
    return mgpu.FragmentedArray(_registers=flat.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _dequantize_lane(ctx, words, scales):
    del ctx
    [word], [scale] = words.registers.flat, scales.registers.flat
    out = []
    for step in range(4):
        pair = _element(scale, step // 2)
        out.append(_four_registers(_element(word, step), _rotate(pair, _constant(8)) if step % 2 else pair))
    return _as_fragments(out)


def _dequantize_lane_transposed(ctx, words, scales):
    """As above for wᵀ: dequantize 8 × 8 blocks as they lie, then transpose each within its warp (`movmatrix`)."""
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    warp = mgpu.utils.warp_idx(sync=False)
    bits = llvm.inline_asm(i32, [warp], "{ .reg .b32 t; and.b32 t, $1, 1; shl.b32 $0, t, 3; }", "=r,r")
    out = []
    for word, scale in zip(words.registers.flat, scales.registers.flat, strict=True):
        regs = _four_registers(_element(word, 0), _rotate(_element(scale, 0), bits))
        turned = [
            llvm.inline_asm(i32, [reg], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", has_side_effects=True)
            for reg in regs
        ]
        out.append([turned[0], turned[2], turned[1], turned[3]])
    return _as_fragments(out)


def warp_multiply(total: jax.Array, a: jax.Array, x_s: jax.Ref, unit: int, depth: int) -> jax.Array:
    """total [64, tokens] + a [64, 64] · xᵀ for one unit of x_s [tokens, depth · 64], by `mma.sync.m16n8k16`."""
    tokens = total.shape[1]
    lane = functools.partial(_warp_multiply_lane, unit=unit, depth=depth)
    return plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(swizzled(TILE, 2))),
        return_type=plgpu.ShapeDtypeStruct((TILE, tokens), jnp.float32, layout=plgpu.Layout.WGMMA),
    )(lane)(total, a, x_s)


def _warp_multiply_lane(ctx, total, a, x_s, *, unit, depth):
    """Accumulators and A lie as for `wgmma`; B comes by `ldmatrix`: 8 tokens × 32 input features at a time.

    x_s is stored in 8 × 64 tiles of 1 KiB whose 16-byte chunks are swizzled: chunk c of row r lies at c ^ r.
    """
    del ctx
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    sums = total.registers.reshape(-1, 2).copy()  # (8 tokens, row half)
    fragments = a.registers.reshape(8, 2)  # (column half of each step, row half)
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(x_s))
    lane = mgpu.utils.thread_idx()
    start = llvm.inline_asm(
        i32,
        [base, lane],
        """{
        .reg .b32 r, c, t;
        and.b32 r, $2, 7;
        bfe.u32 c, $2, 3, 2;
        xor.b32 c, c, r;
        shl.b32 t, r, 7;
        shl.b32 c, c, 4;
        add.u32 t, t, c;
        add.u32 $0, t, $1;
        }""",
        "=r,r,r",
    )
    other = llvm.inline_asm(i32, [start], "xor.b32 $0, $1, 64;", "=r,r")
    quad = llvm.StructType.get_literal([i32] * 4)
    for group in range(sums.shape[0]):
        offset = (group * depth + unit) * 1024
        for half, address in enumerate((start, other)):
            loaded = llvm.inline_asm(
                quad,
                [address],
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];",
                "=r,=r,=r,=r,r",
                has_side_effects=True,
            )
            b = [llvm.extractvalue(i32, loaded, [j]) for j in range(4)]
            for step in (2 * half, 2 * half + 1):
                low, high = sums[group]
                regs = [
                    fragments[2 * step, 0],
                    fragments[2 * step, 1],
                    fragments[2 * step + 1, 0],
                    fragments[2 * step + 1, 1],
                ]
                sum_ = [_element(low, 0), _element(low, 1), _element(high, 0), _element(high, 1)]
                out = llvm.inline_asm(
                    llvm.StructType.get_literal([f32] * 4),
                    [*(mgpu.utils.bitcast(reg, i32) for reg in regs), *b[2 * (step % 2) :][:2], *sum_],
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                    "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                )
                new = [llvm.extractvalue(f32, out, [j]) for j in range(4)]
                pair = ir.VectorType.get((2,), f32)
                sums[group] = [vector.from_elements(pair, new[:2]), vector.from_elements(pair, new[2:])]
    return mgpu.FragmentedArray(
        _registers=sums.reshape(total.registers.shape), _layout=total.layout, _is_signed=total.is_signed
    )


def order_reads() -> None:
    """Orders this thread's reads of shared memory before what the copy engine writes there next.

    An arrival alone does not wait for an `ldmatrix` under way: the slot could be filled anew beneath it. `wgmma` needs
    no fence, because its own wait comes after all reads.
    """

    def fence(ctx):
        del ctx
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "fence.proxy.async.shared::cta;", "", has_side_effects=True)

    plgpu.inline_mgpu()(fence)()


def swizzled(columns: int, itemsize: int) -> tuple:
    """Tiling and swizzle of a shared-memory array whose rows have `columns` elements: what TMA and `wgmma` agree on."""
    bytes_ = next(size for size in (128, 64, 32) if columns * itemsize % size == 0)
    return plgpu.TilingTransform((8, bytes_ // itemsize)), plgpu.SwizzleTransform(bytes_)
