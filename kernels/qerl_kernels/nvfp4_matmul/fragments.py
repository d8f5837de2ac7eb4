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
# What a thread holds for the transposed product: the words of the four steps, and for each two words of scales.
WORDS_T = plgpu.Layout.WG_STRIDED((4, 128), vec_size=1)
SCALES_T = plgpu.Layout.WG_STRIDED((8, 128), vec_size=1)

# $0-$3: the A registers. $4: word of codes. $5: bf16 scales of registers 0 and 2, $6: of 1 and 3. Bit patterns: see
# `packing`.
_DEQUANTIZE = """{
.reg .b32 t, u;
and.b32 t, $4, 0x81C081C0;
mul.rn.bf16x2 $0, t, $5;
shl.b32 t, $4, 3;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $1, t, $6;
shl.b32 t, $4, 1;
and.b32 t, t, 0x80008000;
shl.b32 u, $4, 6;
lop3.b32 t, u, 0x01C001C0, t, 0xEA;
mul.rn.bf16x2 $2, t, $5;
shl.b32 t, $4, 2;
and.b32 t, t, 0x80008000;
shr.b32 u, $4, 3;
lop3.b32 t, u, 0x01C001C0, t, 0xEA;
mul.rn.bf16x2 $3, t, $6;
}"""
# $0, $1: the scale of row g and of row g + 8, twice each. $2: word of scales, already rotated.
_SCALES = f"""{{
.reg .b32 p;
.reg .b16 l, h;
and.b32 p, $2, {SCALE_MASK:#x};
or.b32 p, p, {SCALE_BIAS:#x};
mov.b32 {{l, h}}, p;
mov.b32 $0, {{l, l}};
mov.b32 $1, {{h, h}};
}}"""
# $0: the scales of two neighbouring rows. $1, $2: their words. $3: the bytes to take of each.
_SCALES_T = f"""{{
.reg .b32 p;
prmt.b32 p, $1, $2, $3;
and.b32 p, p, {SCALE_MASK:#x};
or.b32 $0, p, {SCALE_BIAS:#x};
}}"""


def dequantize(words: jax.Array, scales: jax.Array, transposed: bool) -> jax.Array:
    """A tile of words and scales in registers -> its [64, 64] bf16 values (weight × 2^-13) as `wgmma` wants A.

    `transposed`: from `load_transposed`, to the transposed tile with its rows in the order given there.
    """
    layouts = (WORDS_T, SCALES_T) if transposed else (WORDS, SCALES)
    lane = _dequantize_lane_transposed if transposed else _dequantize_lane
    out = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=layouts, return_type=out)(lane)(words, scales)


def _asm(results: int, operands: list[ir.Value], text: str, **options) -> list[ir.Value]:
    """Inline PTX with 32-bit results and operands."""
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=&r" if results > 1 else "=r"] * results + ["r"] * len(operands))
    if results == 1:
        return [llvm.inline_asm(i32, operands, text, constraints, **options)]
    out = llvm.inline_asm(llvm.StructType.get_literal([i32] * results), operands, text, constraints, **options)
    return [llvm.extractvalue(i32, out, [j]) for j in range(results)]


def _element(vec: ir.Value, i: int) -> ir.Value:
    return vector.extract(vec, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _as_fragments(registers: list[list[ir.Value]]) -> mgpu.FragmentedArray:
    """registers[step][j], j = row half + 2 × column half -> the array in the layout of A."""
    shape = mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    flat = np.empty((8, 2), dtype=object)  # (column half of each step, row half)
    for step, regs in enumerate(registers):
        for j, reg in enumerate(regs):
            flat[2 * step + j // 2, j % 2] = mgpu.utils.bitcast(reg, pair)
    return mgpu.FragmentedArray(_registers=flat.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def operands(words: list[ir.Value], scales: list[ir.Value]) -> list[list[ir.Value]]:
    """A thread's four words and two words of scales of a tile -> its registers of A for each of the four steps."""
    out = []
    for step, word in enumerate(words):
        pair = scales[step // 2]
        if step % 2:
            [pair] = _asm(1, [pair], "shf.r.wrap.b32 $0, $1, $1, 8;")
        out.append(_asm(4, [word, *_asm(2, [pair], _SCALES)], _DEQUANTIZE))
    return out


def _dequantize_lane(ctx, words, scales):
    del ctx
    [word], [scale] = words.registers.flat, scales.registers.flat
    return _as_fragments(operands([_element(word, i) for i in range(4)], [_element(scale, i) for i in range(2)]))


def _dequantize_lane_transposed(ctx, words, scales):
    """Registers h + 2 c of a word are those of row half c and column half h here; a pair of values has two scales."""
    del ctx
    # The scale of row half h and step s lies in bytes (0, 1), (2, 3), (1, 2), (3, 0) for (h, s % 2) = (0, 0), (1, 0),
    # (0, 1), (1, 1). This thread's step is bits 3 and 4 of its lane.
    lane = mgpu.utils.thread_idx()
    odd = "{{ .reg .pred p; .reg .b32 t; and.b32 t, $1, 8; setp.ne.u32 p, t, 0; selp.b32 $0, {}, {}, p; }}"
    bytes_of = [_asm(1, [lane], odd.format(*choice))[0] for choice in (("0x6521", "0x5410"), ("0x4703", "0x7632"))]
    pairs = [_element(pair, 0) for pair in scales.registers.flat]
    out = []
    for j, word in enumerate(words.registers.flat):
        halves = [_asm(1, [*pairs[2 * j :][:2], which], _SCALES_T)[0] for which in bytes_of]
        regs = _asm(4, [_element(word, 0), *halves], _DEQUANTIZE)
        out.append([regs[0], regs[2], regs[1], regs[3]])
    return _as_fragments(out)


def load_transposed(words_s: jax.Ref, scales_s: jax.Ref) -> tuple[jax.Array, jax.Array]:
    """Words [16, 32] (swizzled) and scales [64] of a tile -> registers for `dequantize` of the transposed tile.

    A word holds eight codes of rows 16 j + g, + 8 and columns 16 s + 8 c + 2 q + e; one half of it those of one e. The
    16 bytes of a thread of `packing` (j, g, q) are the words of the four s, so that eight such rows for g = 0 ... 7 are
    an 8 × 8 matrix of halves, (2 s + e) across. `ldmatrix.trans` gives the thread (g', q') of every warp the halves
    2 s + e = g' of g = 2 q' and 2 q' + 1: a word of the transposed tile, its row halves c and its column halves h. Warp
    w takes q = w. So row 16 w + 8 c + 2 s + e of the operand is feature 16 s + 8 c + 2 w + e, and nothing moves between
    threads. Rows of a matrix lie 64 bytes apart; the swizzle (16-byte chunk ^= 128-byte line modulo 8) spreads them
    over all banks.
    """
    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(32, 4)), plgpu.RefType()),
        return_type=(
            plgpu.ShapeDtypeStruct((4, 128), jnp.uint32, layout=WORDS_T),
            plgpu.ShapeDtypeStruct((8, 128), jnp.uint32, layout=SCALES_T),
        ),
    )(_load_lane_transposed)(words_s, scales_s)


def _load_lane_transposed(ctx, words_s, scales_s):
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu.utils.thread_idx()
    words, scales = (llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)) for ref in (words_s, scales_s))
    # lane 8 j + g gives the address of chunk 32 j + 4 g + w
    [address] = _asm(
        1,
        [words, thread],
        """{
        .reg .b32 l, w, t;
        and.b32 l, $2, 31;
        bfe.u32 w, $2, 5, 2;
        shl.b32 l, l, 6;
        shl.b32 w, w, 4;
        add.u32 l, l, w;
        add.u32 l, l, $1;
        shr.b32 t, l, 3;
        and.b32 t, t, 0x70;
        xor.b32 $0, l, t;
        }""",
    )
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    found = _asm(4, [address], load, has_side_effects=True)
    # lane 8 s + 4 e + q' needs words 4 q' + s / 2 and 2 after it, in each 16
    [address] = _asm(
        1,
        [scales, thread],
        """{
        .reg .b32 p, q;
        bfe.u32 p, $2, 4, 1;
        and.b32 q, $2, 3;
        shl.b32 p, p, 2;
        shl.b32 q, q, 4;
        add.u32 p, p, q;
        add.u32 $0, p, $1;
        }""",
    )
    pairs = []
    for offset in range(0, 256, 64):
        text = f"ld.shared.b32 $0, [$2 + {offset}]; ld.shared.b32 $1, [$2 + {offset + 8}];"
        pairs += _asm(2, [address], text, has_side_effects=True)
    return _as_words(found, WORDS_T, (4, 128)), _as_words(pairs, SCALES_T, (8, 128))


def _as_words(registers: list[ir.Value], layout, shape: tuple[int, int]) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    flat = np.array([mgpu.utils.bitcast(register, one) for register in registers], dtype=object)
    return mgpu.FragmentedArray(_registers=flat, _layout=layout.to_mgpu(), _is_signed=False)


def store_transposed(out_s: jax.Ref, y: jax.Array) -> None:
    """Stores [64, tokens] bf16 of a transposed product, in `WGMMA_TRANSPOSED` and with its rows as `load_transposed`
    leaves them, into out_s [tokens, 64], features in their order."""
    args = (plgpu.RefType(swizzled(TILE, 2)), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.inline_mgpu(arg_types=args)(_store_lane_transposed)(out_s, y)


def _store_lane_transposed(ctx, out_s, y):
    """Lane 8 s + t holds features 16 s + 8 c + 2 w, + 1 of token 8 o + t', t' = 2 (t % 4) + t / 4, in register (o, c).
    A token's 16-byte chunk 2 s + c lies at (2 s + c) ^ t'."""
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    start, other = _asm(
        2,
        [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(out_s)), mgpu.utils.thread_idx()],
        """{
        .reg .b32 s, t, u, w;
        bfe.u32 s, $3, 3, 2;
        bfe.u32 w, $3, 5, 2;
        bfe.u32 u, $3, 2, 1;
        and.b32 t, $3, 3;
        shl.b32 t, t, 1;
        add.u32 t, t, u;
        shl.b32 s, s, 1;
        xor.b32 s, s, t;
        shl.b32 s, s, 4;
        shl.b32 w, w, 2;
        add.u32 s, s, w;
        shl.b32 t, t, 7;
        add.u32 s, s, t;
        xor.b32 u, s, 16;
        add.u32 $0, s, $2;
        add.u32 $1, u, $2;
        }""",
    )
    void = ir.Type.parse("!llvm.void")
    for octet, pair in enumerate(y.registers.reshape(-1, 2)):
        for address, register in zip((start, other), pair, strict=True):
            text = f"st.shared.b32 [$0 + {1024 * octet}], $1;"
            llvm.inline_asm(void, [address, mgpu.utils.bitcast(register, i32)], text, "r,r", has_side_effects=True)


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
