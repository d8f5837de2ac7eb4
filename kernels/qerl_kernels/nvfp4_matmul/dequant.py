"""Dequantization: packed words to bf16 A fragments of the tensor cores, in registers.

The layouts name which thread holds which element (see `packing`, and the PTX manual on the fragments of `wgmma`); the
arithmetic is inline PTX, because it is the inner loop: 17 instructions for eight weights.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.nvfp4_matmul.packing import SCALE_BIAS, SCALE_MASK, TILE
from qerl_kernels.ptx.instructions import SINCE, PtxMachine
from qerl_kernels.ptx.values import I32, element

WORDS = plgpu.Layout.WG_STRIDED((4, 128), vec_size=4)
SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (16,), (2,))), warp_dims=(-3,), lane_dims=(-2, plgpu.Replicated(4)), vector_dim=-1
)
# $0-$3: the A registers. $4: word of codes. $5: bf16 scales of registers 0 and 2, $6: of 1 and 3. Bit patterns: see
# `packing`.
DEQUANTIZE = """{
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
# Before sm_90 there is no `mul` of bf16 pairs: the product − 0.0, which is exact.
_DEQUANTIZE_BY_FMA = DEQUANTIZE.replace(".reg .b32 t, u;", ".reg .b32 t, u, z;\nmov.b32 z, 0x80008000;")
_DEQUANTIZE_BY_FMA = re.sub(r"mul.rn.bf16x2 (.*);", r"fma.rn.bf16x2 \1, z;", _DEQUANTIZE_BY_FMA)
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


def dequantize(words: jax.Array, scales: jax.Array) -> jax.Array:
    """A tile of words and scales in registers -> its [64, 64] bf16 values (weight × 2^-13) as `wgmma` wants A."""
    out = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(WORDS, SCALES), return_type=out)(_dequantize_lane)(words, scales)


def as_fragments(registers: list[list[ir.Value]]) -> mgpu.FragmentedArray:
    """registers[k16_step][j], j = row half + 2 × column half -> the array in the layout of A."""
    shape = mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    flat = np.empty((8, 2), dtype=object)  # (column half of each k16 step, row half)
    for k16_step, regs in enumerate(registers):
        for j, reg in enumerate(regs):
            flat[2 * k16_step + j // 2, j % 2] = mgpu.utils.bitcast(reg, pair)
    return mgpu.FragmentedArray(_registers=flat.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def weight_fragments(machine: PtxMachine, words: list[I32], scales: list[I32]) -> list[list[I32]]:
    """A thread's four words and two words of scales of a tile -> its registers of A for each of the four k16 steps."""
    text = DEQUANTIZE if machine.arch >= SINCE["mul_bf16"] else _DEQUANTIZE_BY_FMA
    out = []
    for k16_step, word in enumerate(words):
        pair = scales[k16_step // 2]
        if k16_step % 2:
            [pair] = machine.asm("shf.r.wrap.b32 $0, $1, $1, 8;", "r", pair)
        out.append(machine.asm(text, "rrrr", word, *machine.asm(_SCALES, "rr", pair)))
    return out


def _dequantize_lane(ctx, words, scales):
    del ctx
    [word], [scale] = words.registers.flat, scales.registers.flat
    words, scales = ([I32(element(vec, i)) for i in range(count)] for vec, count in ((word, 4), (scale, 2)))
    return as_fragments(
        [[each.value for each in registers] for registers in weight_fragments(PtxMachine(90), words, scales)]
    )
