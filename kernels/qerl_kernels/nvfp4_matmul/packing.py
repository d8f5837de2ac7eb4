"""The packed form of a 4-bit weight: `pack`, its exact inverse `unpack`, and the kernels' arithmetic in plain JAX.

Hopper's `wgmma` multiplies a 64 × 16 matrix A, which may lie in registers, with a matrix B in shared memory. The
weight is A: a tile of 64 output features (rows) times four k16 steps, of 16 input features each (columns). PTX fixes
which eight elements of a k16 step one thread holds:

    warp w, lane 4 g + q, register j = h + 2 c, half e  <->  row 16 w + 8 h + g,  column 8 c + 2 q + e

so one 32-bit word stores exactly those eight codes, and the four k16 steps of a thread lie side by side: one 128-bit
load brings 32 weights, and no element ever moves between threads.

**Codes.** An E2M1 code is sign S and magnitude bits EEM. In a bf16 the pattern `S 000000EE M000000` is the code's
value times 2^-126 (subnormals included), so a register is made from the word by shifts and ANDs. Half e of a word
holds, from bit 15 down:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code  S0 S2 S3 S1 E3 E3 M3 E0 E0 M0 E1 E1 M1 E2 E2 M2

Registers 0 and 1 cost a shift by 0 or 3 and an AND; for 2 and 3 the sign is fetched apart. Left shifts and
multiplications issue beside logic operations. A word takes seven of these: the ALU pipe bounds the dequantization of a
skinny GEMM.

**Scales.** E4M3 with its subnormals becomes E5M3 with an exponent bias of 16 (no subnormals in range, so no branch).
Placed at bits 4-11 of a half and OR-ed with 0x7000 the byte is the bf16 scale × 2^113. One word holds the scales of
rows g and g + 8 for two k16 steps: those of the second appear at the same bits after a rotation by 8. Code × 2^-126
times scale × 2^113 is weight × 2^-13, exactly; `multiplier` carries 2^13.

MXFP4 fits where the exponents of a row's non-zero blocks span at most 30 binades: they are counted down from the row's
largest, which goes to the multiplier, and each is stored for two blocks of 16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, UInt8, UInt32

from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4, Nvfp4, PackedNvfp4
from qerl_kernels.nvfp4_matmul.reference import E2M1_VALUES, multiplier

TILE = 64
SCALE_MASK = 0x0FF00FF0
SCALE_BIAS = 0x70007000
PRODUCT_LOG2 = 13  # code × scale as the kernels form it is the weight × 2^-PRODUCT_LOG2
MXFP4_SPAN = 30
_E4M3_NAN = 0x7F


def _e5m3_of_e4m3() -> np.ndarray:
    """E5M3 byte (value `2^(e - 16) (1 + m / 8)`) of every non-negative finite E4M3 byte; 0 for zero."""
    table = np.zeros(128, np.uint8)
    for byte in range(1, 127):
        exponent, mantissa = byte >> 3, byte & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        log2 = int(np.floor(np.log2(value)))
        table[byte] = ((log2 + 16) << 3) | round((value / 2.0**log2 - 1) * 8)
    return table


E5M3_OF_E4M3 = _e5m3_of_e4m3()


def _e4m3_of_e5m3() -> np.ndarray:
    table = np.zeros(256, np.uint8)
    table[E5M3_OF_E4M3[:127]] = np.arange(127)
    return table


E4M3_OF_E5M3 = _e4m3_of_e5m3()


def pack(weight: Nvfp4 | Mxfp4) -> PackedNvfp4:
    """The kernels' form of `weight`; `unpack` gives it back.

    A block whose scale is zero is worth zero whatever its codes; its codes are stored as zeros (so `unpack` returns
    zeros there). Runs under `jit` too, where `uniform` is then False because the values are not known.

    Raises:
      ValueError: k is not a multiple of 16 (32 for MXFP4), or, outside `jit`, a block scale is negative or no number,
        or the exponents of a row of an MXFP4 weight span more than 30 binades (use the XLA path for such a weight).
    """
    n, k = weight.shape
    block = MXFP4_BLOCK if isinstance(weight, Mxfp4) else NVFP4_BLOCK
    if k % block:
        raise ValueError(f"pack: {k} input features are not a multiple of the block of {block}")
    concrete = not isinstance(weight.codes, jax.core.Tracer)
    if isinstance(weight, Mxfp4):
        if concrete and (missing := missing_for_packing(weight)):
            raise ValueError(f"pack: the packed form needs {missing}")
        words, scales, factor, padded, is_one = _pack_mxfp4(weight)
        stored, divides = factor, False
    else:
        words, scales, _, padded, is_one, are_scales = _pack_nvfp4(weight)
        stored, divides = weight.global_scale, weight.divides
        if concrete and not are_scales:
            raise ValueError("pack: a block scale is negative or no number, which the packed form cannot hold")
    return PackedNvfp4(words, scales, padded, stored, (n, k), divides, block, concrete and bool(is_one))


def missing_for_packing(weight: Nvfp4 | Mxfp4) -> str | None:
    """What keeps a weight from being packed; None where it can be."""
    if isinstance(weight, Mxfp4) and (span := int(_exponent_span(weight))) > MXFP4_SPAN:
        return f"the block exponents of a row to span at most {MXFP4_SPAN} binades (they span {span})"
    return None


@jax.jit
def _pack_nvfp4(weight: Nvfp4):
    byte = jax.lax.bitcast_convert_type(weight.scales, jnp.uint8)
    is_zero = byte & 127 == 0  # -0, too, the only one with a sign
    codes = jnp.where(jnp.repeat(is_zero, NVFP4_BLOCK, axis=1), 0, _nibbles(weight.codes))
    are_scales = jnp.all(is_zero | (byte < _E4M3_NAN))
    return _words(codes), pack_scales(weight.scales), *_factors(multiplier(weight)), are_scales


def _factors(factor: Float32[Array, " n"]) -> tuple[Float32[Array, " n"], Float32[Array, " m"], Array]:
    """The multipliers of the rows, those of the rows of whole tiles as the kernels take them, and whether all are one.

    Within the program that packs: each operation on its own waits for the interpreter while programs are lowered.
    """
    padded = jnp.pad(factor * 2.0**PRODUCT_LOG2, (0, -len(factor) % TILE), mode="edge")
    return factor, padded, jnp.all(factor == factor[0])


def pack_scales(scales: Float8e4m3fn[Array, "n k/16"]) -> UInt32[Array, "n/64 k/64 64"]:
    """The block scales as the packed form holds them."""
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    return _scale_words(jnp.asarray(E5M3_OF_E4M3)[byte & 127])


def _block_has_value(codes: UInt8[Array, "n k/2"]) -> Array:
    """[n, k/32]: whether a block has a code other than +0 and -0."""
    return jnp.any((codes & 0x77).reshape(codes.shape[0], -1, MXFP4_BLOCK // 2) != 0, axis=-1)


def _top_exponent(weight: Mxfp4) -> Array:
    return jnp.max(jnp.where(_block_has_value(weight.codes), weight.exponents.astype(jnp.int32), 0), axis=1)


@jax.jit
def _exponent_span(weight: Mxfp4) -> Array:
    """Largest difference, over the rows, between the exponents of blocks that hold a value."""
    exponents = jnp.where(_block_has_value(weight.codes), weight.exponents.astype(jnp.int32), 1 << 20)
    return jnp.max(_top_exponent(weight) - jnp.min(exponents, axis=1))


@jax.jit
def _pack_mxfp4(weight: Mxfp4):
    top = _top_exponent(weight)
    level = weight.exponents.astype(jnp.int32) - top[:, None] + MXFP4_SPAN
    byte = jnp.where(_block_has_value(weight.codes), level << 3, 0).astype(jnp.uint8)
    # weight = code × 2^(exponent - 127), and the byte reads as 2^(level - 16).
    factor = jnp.ldexp(jnp.float32(1), top - MXFP4_SPAN + 16 - 127)
    return _words(_nibbles(weight.codes)), _scale_words(jnp.repeat(byte, 2, axis=1)), *_factors(factor)


def _nibbles(codes: UInt8[Array, "n k/2"]) -> UInt32[Array, "n k"]:
    return jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(codes.shape[0], -1).astype(jnp.uint32)


def _padded(values: Array, columns: int) -> Array:
    n, k = values.shape
    return jnp.pad(values, ((0, -n % TILE), (0, -k % columns)))


def _words(codes: UInt32[Array, "n k"]) -> UInt32[Array, "n/64 k/64 4 128"]:
    codes = _padded(codes, TILE)
    n_tiles, k_tiles = codes.shape[0] // TILE, codes.shape[1] // TILE
    # row = 16 w + 8 h + g; column = 16 s + 8 c + 2 q + e
    codes = codes.reshape(n_tiles, 4, 2, 8, k_tiles, 4, 2, 4, 2)
    word = 0
    for h in range(2):
        for c in range(2):
            for e in range(2):
                word |= _place(codes[:, :, h, :, :, :, c, :, e], h + 2 * c) << (16 * e)
    return word.transpose(0, 3, 1, 2, 5, 4).reshape(n_tiles, k_tiles, 4, 128)  # t w g u s q -> t u w (g q s)


def _place(code: Array, register: int) -> Array:
    """Where the code of a register goes within its half of the word (the table in the module's docstring)."""
    if register < 2:
        return (((code & 8) << 12) | ((code & 7) << 6)) >> (3 * register)
    if register == 2:
        return ((code & 8) << 11) | (code & 7)
    return ((code & 8) << 10) | ((code & 7) << 9)


def _scale_words(byte: UInt8[Array, "n k/16"]) -> UInt32[Array, "n/64 k/64 64"]:
    byte = _padded(byte, 4).astype(jnp.uint32)
    n_tiles, k_tiles = byte.shape[0] // TILE, byte.shape[1] // 4
    b = byte.reshape(n_tiles, 4, 2, 8, k_tiles, 2, 2)  # t w h g u (pair of k16 steps) (k16 step of the pair)
    b = b.transpose(0, 4, 1, 3, 5, 2, 6)  # t u w g pair h s
    first, second = b[..., 0], b[..., 1]
    word = (first[..., 0] << 4) | (first[..., 1] << 20)
    word |= (second[..., 0] << 12) | (second[..., 1] << 28) | (second[..., 1] >> 4)  # rotated left by 8
    return word.reshape(n_tiles, k_tiles, 64)


# ---- the way back, and the arithmetic of the kernels ----


def registers(words: UInt32[Array, "n/64 k/64 4 128"]) -> tuple[Array, Array, Array, Array]:
    """The four 32-bit registers that a thread makes of each word: two bf16 of code × 2^-126 in each."""
    both, sign, magnitude = jnp.uint32(0x81C081C0), jnp.uint32(0x80008000), jnp.uint32(0x01C001C0)
    third = ((words << 6) & magnitude) | ((words << 1) & sign)
    fourth = ((words >> 3) & magnitude) | ((words << 2) & sign)
    return words & both, (words << 3) & both, third, fourth


def scale_pairs(scales: UInt32[Array, "n/64 k/64 64"]) -> tuple[Array, Array]:
    """The bf16 scales × 2^113 of rows g (low half) and g + 8 (high) for the two k16 steps of each word."""
    rotated = (scales >> 8) | (scales << 24)
    return tuple((word & jnp.uint32(SCALE_MASK)) | jnp.uint32(SCALE_BIAS) for word in (scales, rotated))


def _codes(packed: PackedNvfp4) -> UInt8[Array, "n k"]:
    n_tiles, k_tiles = packed.words.shape[:2]
    halves = []
    for register in registers(packed.words):
        for e in range(2):
            half = (register >> (16 * e)) & 0xFFFF
            halves.append(((half >> 12) & 8) | ((half >> 6) & 7))
    code = (
        jnp.stack(halves, axis=-1).astype(jnp.uint8).reshape(n_tiles, k_tiles, 4, 8, 4, 4, 2, 2, 2)
    )  # t u w g q s c h e
    code = code.transpose(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(n_tiles * TILE, k_tiles * TILE)
    return code[: packed.shape[0], : packed.shape[1]]


def _scale_halves(packed: PackedNvfp4) -> UInt32[Array, "n k/16"]:
    """bf16 bits of scale × 2^113 for every row and block of 16."""
    n_tiles, k_tiles = packed.scales.shape[:2]
    pairs = jnp.stack(scale_pairs(packed.scales), axis=-1)
    pairs = jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).reshape(
        n_tiles, k_tiles, 4, 8, 2, 2, 2
    )  # t u w g pair s h
    pairs = pairs.transpose(0, 2, 6, 3, 1, 4, 5).reshape(n_tiles * TILE, k_tiles * 4)
    return pairs[: packed.shape[0], : packed.shape[1] // NVFP4_BLOCK]


@jax.jit
def unpack(packed: PackedNvfp4) -> Nvfp4 | Mxfp4:
    """The canonical form, byte for byte; zero blocks return zero codes (NVFP4) or a zero exponent (MXFP4)."""
    codes = _codes(packed)
    codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    byte = ((_scale_halves(packed) >> 4) & 0xFF).astype(jnp.uint8)
    if packed.block == NVFP4_BLOCK:
        scales = jax.lax.bitcast_convert_type(jnp.asarray(E4M3_OF_E5M3)[byte], jnp.float8_e4m3fn)
        return Nvfp4(codes, scales, packed.global_scale, packed.divides)
    _, log2 = jnp.frexp(packed.global_scale)  # a power of two: 2^(log2 - 1) = 2^(top - SPAN + 16 - 127)
    top = log2 - 1 + MXFP4_SPAN - 16 + 127
    exponents = (byte[:, ::2] >> 3).astype(jnp.int32) + top[:, None] - MXFP4_SPAN
    return Mxfp4(codes, jnp.where(_block_has_value(codes), exponents, 0).astype(jnp.uint8))


@jax.jit
def packed_parts(packed: PackedNvfp4) -> tuple[BFloat16[Array, "n k"], Float32[Array, " n"]]:
    """The weight as the kernels multiply it: an exact bf16 matrix (weight × 2^-13) and the fp32 multiplier of each row.

    The same bit operations as on the GPU. Codes go through a table and not through bf16 subnormals, which the CPU
    backend flushes to zero.
    """
    values = jnp.asarray(E2M1_VALUES, jnp.float32)[_codes(packed)]
    scales = jax.lax.bitcast_convert_type(_scale_halves(packed) << 16, jnp.float32) * 2.0 ** -(113 + PRODUCT_LOG2)
    n, k = packed.shape
    matrix = (values.reshape(n, k // NVFP4_BLOCK, NVFP4_BLOCK) * scales[..., None]).reshape(n, k)
    return matrix.astype(jnp.bfloat16), packed.multiplier[:n]
