"""dx: the GEMM with W instead of Wᵀ, `dx[m, k] = multiplier · Σ_n dy[m, n] · w[n, k]`.

It is the kernel of `kernel` with another A operand: words are loaded by `ldmatrix.trans`, so that no element moves
between threads, and output features are stored back into their order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from qerl_kernels.dispatch import SMS
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul.dequant import DEQUANTIZE, as_fragments, asm, element
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import launch, pad_rows
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms
from qerl_kernels.nvfp4_matmul.packing import SCALE_BIAS, SCALE_MASK, TILE

# What a thread holds: the words of the four steps, and for each two words of scales.
WORDS_T = plgpu.Layout.WG_STRIDED((4, 128), vec_size=1)
SCALES_T = plgpu.Layout.WG_STRIDED((8, 128), vec_size=1)

# $0: the scales of two neighbouring rows. $1, $2: their words. $3: the bytes to take of each.
_SCALES_T = f"""{{
.reg .b32 p;
prmt.b32 p, $1, $2, $3;
and.b32 p, p, {SCALE_MASK:#x};
or.b32 $0, p, {SCALE_BIAS:#x};
}}"""


@functools.partial(jax.jit, static_argnames=("config", "sms"))
def gemm_dx(dy: jax.Array, weight: PackedNvfp4, config: GemmConfig, *, sms: int = SMS) -> jax.Array:
    """The equation of the module's docstring: dy bf16 [m, n] -> bf16 [m, k].

    Args:
      dy: gradient of the GEMM's output.
      weight: the packed weight, with one multiplier for all its rows.
      config: the tuning config.
      sms: SMs of the GPU.

    Raises:
      ValueError: the config fits neither the GPU nor these shapes.
    """
    (n, k), m = weight.shape, dy.shape[0]
    if dy.shape != (m, n):
        raise ValueError(f"gemm_dx: dy is {dy.shape}, the weight {n} x {k}")
    return launch(pad_rows(dy), weight, TRANSPOSED, config, Terms(), (), k, sms)[:m, :k]


class Transposed:
    """`Operand` of dx."""

    name = "dx"

    def words(self, words: jax.Array) -> jax.Array:
        """The same bytes in rows of 128 bytes, as the swizzle wants them."""
        return words.reshape(*words.shape[:2], 16, 32)

    def word_transforms(self) -> tuple:
        """The swizzle of 128 bytes: rows of a matrix of `ldmatrix` lie in other banks."""
        return swizzled(32, 4)

    def place(self, along_n: Any, along_k: Any) -> tuple[Any, Any]:
        """The weight lies as (contraction, output features)."""
        return along_k, along_n

    def load(self, words_s: jax.Ref, scales_s: jax.Ref) -> tuple[jax.Array, jax.Array]:
        """By `ldmatrix.trans`, see `load_transposed`."""
        return load_transposed(words_s, scales_s)

    def dequantize(self, words: jax.Array, scales: jax.Array) -> jax.Array:
        """[64 k, 64 n], rows in the order of `load_transposed`."""
        return dequantize_transposed(words, scales)

    def multiplier_row(self, first: jax.Array) -> jax.Array | int:
        """One multiplier stands for all."""
        return 0

    def store(self, out_s: jax.Ref, y: jax.Array) -> None:
        """Puts features back into their order."""
        store_transposed(out_s, y)


TRANSPOSED = Transposed()


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
    [address] = asm(
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
    found = asm(4, [address], load, has_side_effects=True)
    # lane 8 s + 4 e + q' needs words 4 q' + s / 2 and 2 after it, in each 16
    [address] = asm(
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
        pairs += asm(2, [address], text, has_side_effects=True)
    return _as_words(found, WORDS_T, (4, 128)), _as_words(pairs, SCALES_T, (8, 128))


def _as_words(registers: list[ir.Value], layout, shape: tuple[int, int]) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    flat = np.array([mgpu.utils.bitcast(register, one) for register in registers], dtype=object)
    return mgpu.FragmentedArray(_registers=flat, _layout=layout.to_mgpu(), _is_signed=False)


def store_transposed(out_s: jax.Ref, y: jax.Array) -> None:
    """Stores y [64, tile_m] bf16 of the transposed GEMM, in `WGMMA_TRANSPOSED` and with its rows as `load_transposed`
    leaves them, into out_s [tile_m, 64], features in their order."""
    args = (plgpu.RefType(swizzled(TILE, 2)), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.inline_mgpu(arg_types=args)(_store_lane_transposed)(out_s, y)


def _store_lane_transposed(ctx, out_s, y):
    """Lane 8 s + t holds features 16 s + 8 c + 2 w, + 1 of token 8 o + t', t' = 2 (t % 4) + t / 4, in register (o, c).
    A token's 16-byte chunk 2 s + c lies at (2 s + c) ^ t'."""
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    start, other = asm(
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
    for m8_tile, pair in enumerate(y.registers.reshape(-1, 2)):
        for address, register in zip((start, other), pair, strict=True):
            text = f"st.shared.b32 [$0 + {1024 * m8_tile}], $1;"
            llvm.inline_asm(void, [address, mgpu.utils.bitcast(register, i32)], text, "r,r", has_side_effects=True)


def dequantize_transposed(words: jax.Array, scales: jax.Array) -> jax.Array:
    """Words and scales of `load_transposed` -> the transposed tile [64, 64] bf16 (weight × 2^-13) as `wgmma` wants A,
    its rows in the order given there."""
    out = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    arg_types = (WORDS_T, SCALES_T)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=out)(_dequantize_lane_transposed)(words, scales)


def _dequantize_lane_transposed(ctx, words, scales):
    """Registers h + 2 c of a word are those of row half c and column half h here; a pair of values has two scales."""
    del ctx
    # The scale of row half h and step s lies in bytes (0, 1), (2, 3), (1, 2), (3, 0) for (h, s % 2) = (0, 0), (1, 0),
    # (0, 1), (1, 1). This thread's step is bits 3 and 4 of its lane.
    lane = mgpu.utils.thread_idx()
    odd = "{{ .reg .pred p; .reg .b32 t; and.b32 t, $1, 8; setp.ne.u32 p, t, 0; selp.b32 $0, {}, {}, p; }}"
    bytes_of = [asm(1, [lane], odd.format(*choice))[0] for choice in (("0x6521", "0x5410"), ("0x4703", "0x7632"))]
    pairs = [element(pair, 0) for pair in scales.registers.flat]
    out = []
    for j, word in enumerate(words.registers.flat):
        halves = [asm(1, [*pairs[2 * j :][:2], which], _SCALES_T)[0] for which in bytes_of]
        regs = asm(4, [element(word, 0), *halves], DEQUANTIZE)
        out.append([regs[0], regs[2], regs[1], regs[3]])
    return as_fragments(out)
