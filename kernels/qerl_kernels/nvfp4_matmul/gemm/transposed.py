"""dx: the GEMM with W instead of Wᵀ, `dx[m, k] = multiplier · Σ_n dy[m, n] · w[n, k]`.

It is the kernel of `kernel` with another A operand: words are loaded by `ldmatrix.trans`, so that no element moves
between threads, and output features are stored back into their order.
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

from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul.dequant import DEQUANTIZE, as_fragments
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import launch, pad_rows
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms
from qerl_kernels.nvfp4_matmul.packing import SCALE_BIAS, SCALE_MASK, TILE
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32, as_word, element

# What a thread holds: the words of the four k16 steps, and for each two words of scales.
WORDS_T = plgpu.Layout.WG_STRIDED((4, 128), vec_size=1)
SCALES_T = plgpu.Layout.WG_STRIDED((8, 128), vec_size=1)

# $0: address for `ldmatrix`: lane 8 j + g has that of chunk 32 j + 4 g + w. $1: the words of the tile. $2: the thread.
_WORDS_ADDRESS = """.reg .b32 l, w, t;
and.b32 l, $2, 31;
bfe.u32 w, $2, 5, 2;
shl.b32 l, l, 6;
shl.b32 w, w, 4;
add.u32 l, l, w;
add.u32 l, l, $1;
shr.b32 t, l, 3;
and.b32 t, t, 0x70;
xor.b32 $0, l, t;"""
# $0: address of the first scales: lane 8 s + 4 e + q' needs words 4 q' + s / 2 and 2 after it, in each 16. $1: the
# scales of the tile. $2: the thread.
_SCALES_ADDRESS = """.reg .b32 p, q;
bfe.u32 p, $2, 4, 1;
and.b32 q, $2, 3;
shl.b32 p, p, 2;
shl.b32 q, q, 4;
add.u32 p, p, q;
add.u32 $0, p, $1;"""
# $0: the bytes of scales to take, one choice for odd k16 steps and one for even ones. $1: the thread.
_BYTES = ".reg .pred p; .reg .b32 t; and.b32 t, $1, 8; setp.ne.u32 p, t, 0; selp.b32 $0, {}, {}, p;"
# $0: the scales of two neighbouring rows. $1, $2: their words. $3: the bytes to take of each.
_SCALES_T = f""".reg .b32 p;
prmt.b32 p, $1, $2, $3;
and.b32 p, p, {SCALE_MASK:#x};
or.b32 $0, p, {SCALE_BIAS:#x};"""
# $0, $1: addresses of a thread's features, column halves 0 and 1. $2: the output tile. $3: the thread.
_OUT_ADDRESSES = """.reg .b32 s, t, u, w;
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
add.u32 $1, u, $2;"""


@functools.partial(jax.jit, static_argnames=("config", "gpu"))
def gemm_dx(dy: jax.Array, weight: PackedNvfp4, config: GemmConfig, *, gpu: Gpu = H200) -> jax.Array:
    """The equation of the module's docstring: dy bf16 [m, n] -> bf16 [m, k].

    Args:
      dy: gradient of the GEMM's output.
      weight: the packed weight, with one multiplier for all its rows.
      config: the tuning config.
      gpu: the GPU, of tier "wgmma".

    Raises:
      ValueError: the config fits neither the GPU nor these shapes.
    """
    (n, k), m = weight.shape, dy.shape[0]
    if dy.shape != (m, n):
        raise ValueError(f"gemm_dx: dy is {dy.shape}, the weight {n} x {k}")
    return launch(pad_rows(dy), weight, TRANSPOSED, config, Terms(), (), k, gpu)[:m, :k]


class Transposed:
    """`WeightOperand` of dx."""

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

    As packed, a word of k16 step s holds eight codes, one half of it those of one e. The 16 bytes of a packed thread
    (j, g, q) are its words of the four s, so that the rows g = 0 ... 7 are an 8 × 8 matrix of halves, (2 s + e) across.

        packed word      lane 4 g + q of warp j, half e  <->  row 16 j + 8 h + g,  column 16 s + 8 c + 2 q + e
        ldmatrix.trans   lane 4 g' + q' of warp w        <->  half g' = 2 s + e of g = 2 q' and 2 q' + 1, for q = w
        transposed word  row half c, column half h       <->  row 16 w + 8 c + 2 s + e,  column 16 j + 8 h + g
        stored           by `store_transposed`           <->  feature 16 s + 8 c + 2 w + e of that row

    So nothing moves between threads. Rows of a matrix lie 64 bytes apart; the swizzle (16-byte chunk ^= 128-byte line
    modulo 8) spreads them over all banks.
    """

    def program(ctx, words_s, scales_s):
        del ctx
        machine = PtxMachine(90)
        thread = machine.thread_index()
        addresses = [machine.shared_address(ref) for ref in (words_s, scales_s)]
        words, scales = emit_load(machine, *addresses, thread)
        return _as_array(words, WORDS_T, (4, 128)), _as_array(scales, SCALES_T, (8, 128))

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(32, 4)), plgpu.RefType()),
        return_type=(
            plgpu.ShapeDtypeStruct((4, 128), jnp.uint32, layout=WORDS_T),
            plgpu.ShapeDtypeStruct((8, 128), jnp.uint32, layout=SCALES_T),
        ),
    )(program)(words_s, scales_s)


def emit_load(machine: PtxMachine, words_at: I32, scales_at: I32, thread: I32) -> tuple[list[I32], list[I32]]:
    """The instructions of `load_transposed`: a thread's word of each k16 step, and two words of scales for each."""
    words = machine.ldmatrix(machine.asm(_WORDS_ADDRESS, "r", words_at, thread)[0], transposed=True)
    [at] = machine.asm(_SCALES_ADDRESS, "r", scales_at, thread)
    scales = [machine.load_shared_words(at, 1, offset + pair)[0] for offset in range(0, 256, 64) for pair in (0, 8)]
    return words, scales


def _as_array(words: list[I32], layout: plgpu.Layout, shape: tuple[int, int]) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    flat = np.array([mgpu.utils.bitcast(word.value, one) for word in words], dtype=object)
    return mgpu.FragmentedArray(_registers=flat, _layout=layout.to_mgpu(), _is_signed=False)


def store_transposed(out_s: jax.Ref, y: jax.Array) -> None:
    """Stores y [64, tile_m] bf16 of the transposed GEMM, in `WGMMA_TRANSPOSED` and with its rows as `load_transposed`
    leaves them, into out_s [tile_m, 64], features in their order."""

    def program(ctx, out_s, y):
        del ctx
        machine = PtxMachine(90)
        at, thread = machine.shared_address(out_s), machine.thread_index()
        emit_store(machine, at, thread, [as_word(register) for register in y.registers.flat])

    arg_types = (plgpu.RefType(swizzled(TILE, 2)), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.inline_mgpu(arg_types=arg_types)(program)(out_s, y)


def emit_store(machine: PtxMachine, out_at: I32, thread: I32, words: Sequence[I32]) -> None:
    """The instructions of `store_transposed` for a thread's words in the order (n8 tile, column half).

    Lane 8 s + t holds features 16 s + 8 c + 2 w, + 1 of row 8 o + t', t' = 2 (t % 4) + t / 4, in word (o, c). The
    16-byte chunk 2 s + c of a row lies at (2 s + c) ^ t'.
    """
    addresses = machine.asm(_OUT_ADDRESSES, "rr", out_at, thread)
    for i, word in enumerate(words):
        machine.store_shared_words(addresses[i % 2], [word], byte=1024 * (i // 2))


def dequantize_transposed(words: jax.Array, scales: jax.Array) -> jax.Array:
    """Words and scales of `load_transposed` -> the transposed tile [64, 64] bf16 (weight × 2^-13) as `wgmma` wants A,
    its rows in the order given there."""

    def program(ctx, words, scales):
        del ctx
        machine = PtxMachine(90)
        thread = machine.thread_index()
        pairs, words = ([I32(element(vec, 0)) for vec in array.registers.flat] for array in (scales, words))
        fragments = emit_dequantize(machine, words, pairs, thread)
        return as_fragments([[word.value for word in registers] for registers in fragments])

    out = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(WORDS_T, SCALES_T), return_type=out)(program)(words, scales)


def emit_dequantize(machine: PtxMachine, words: Sequence[I32], scales: Sequence[I32], thread: I32) -> list[list[I32]]:
    """The instructions of `dequantize_transposed` for the words and scales of `emit_load`: the registers of A of a
    thread for each of the four k16 steps.

    Registers h + 2 c of a word are those of row half c and column half h here; a pair of values has two scales. The
    scale of row half h and k16 step s lies in bytes (0, 1), (2, 3), (1, 2), (3, 0) for (h, s % 2) = (0, 0), (1, 0),
    (0, 1), (1, 1). This thread's k16 step is bits 3 and 4 of its lane.
    """
    choices = (("0x6521", "0x5410"), ("0x4703", "0x7632"))
    bytes_of = [machine.asm(_BYTES.format(*choice), "r", thread)[0] for choice in choices]
    out = []
    for j, word in enumerate(words):
        halves = [machine.asm(_SCALES_T, "r", *scales[2 * j :][:2], which)[0] for which in bytes_of]
        regs = machine.asm(DEQUANTIZE, "rrrr", word, *halves)
        out.append([regs[0], regs[2], regs[1], regs[3]])
    return out
