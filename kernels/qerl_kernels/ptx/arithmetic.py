"""Arithmetic of several instructions on fp32 values and on words of two bf16, for any machine."""

from __future__ import annotations

from collections.abc import Sequence

from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import F32, I32


def fma(machine: PtxMachine, a: F32, b: F32, c: F32) -> F32:
    """a · b + c, rounded once."""
    return machine.asm("fma.rn.f32 $0, $1, $2, $3;", "f", a, b, c)[0]


def as_float(machine: PtxMachine, word: I32) -> F32:
    """The fp32 value with the bits of a word."""
    return machine.asm("mov.b32 $0, $1;", "f", word)[0]


def as_word(machine: PtxMachine, value: F32) -> I32:
    """The bits of an fp32 value."""
    return machine.asm("mov.b32 $0, $1;", "r", value)[0]


def unpack(word: str, name: str) -> str:
    """PTX that puts the two bf16 of a word into the fp32 registers `name`0 and `name`1."""
    return (
        f".reg .b32 {name}t; .reg .f32 {name}0, {name}1; shl.b32 {name}t, {word}, 16; mov.b32 {name}0, {name}t;"
        f" and.b32 {name}t, {word}, 0xFFFF0000; mov.b32 {name}1, {name}t;\n"
    )


def bf16_to_f32(machine: PtxMachine, word: I32, high: bool) -> F32:
    """The low or the high bf16 of a word."""
    text = "and.b32 t, $1, 0xFFFF0000;" if high else "shl.b32 t, $1, 16;"
    return machine.asm(f".reg .b32 t; {text} mov.b32 $0, t;", "f", word)[0]


def pack_bf16(machine: PtxMachine, low: F32, high: F32) -> I32:
    """Two fp32 values rounded to a word of bf16."""
    return machine.asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", low, high)[0]


def pack_halves(machine: PtxMachine, first: I32, second: I32, high: bool) -> I32:
    """The low or the high halves of two words side by side."""
    return machine.asm(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", "r", first, second)[0]


def add_bf16(machine: PtxMachine, wide: Sequence[I32], word: I32) -> list[I32]:
    """Two fp32 values (as words) + the two bf16 of a word, in fp32."""
    text = unpack("$4", "d") + ".reg .f32 x; "
    text += " ".join(f"mov.b32 x, ${2 + i}; add.rn.f32 x, x, d{i}; mov.b32 ${i}, x;" for i in range(2))
    return machine.asm(text, "rr", *wide, word)


def add_square(machine: PtxMachine, total: F32, wide: I32) -> F32:
    """total + value² of an fp32 value as a word."""
    return machine.asm(".reg .f32 x; mov.b32 x, $2; fma.rn.f32 $0, x, x, $1;", "f", total, wide)[0]


def weight_bf16(machine: PtxMachine, wide: Sequence[I32], weights: Sequence[I32], factor: F32 | None) -> I32:
    """Two fp32 values (as words) · factor (None: 1) · their weights, rounded once to a word of bf16."""
    wide = list(wide) if factor is None else [as_float(machine, x) * factor for x in wide]
    scaled = [as_float(machine, x) * as_float(machine, w) for x, w in zip(wide, weights, strict=True)]
    return pack_bf16(machine, *scaled)


def silu_mul_bf16(machine: PtxMachine, gate: I32, up: I32) -> I32:
    """`gate / (1 + exp(−gate)) · up` of each half in fp32, rounded once."""
    text = unpack("$1", "g") + unpack("$2", "u") + ".reg .f32 e;\n"
    for i in range(2):
        text += (
            f"mul.rn.f32 e, g{i}, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.rn.f32 e, e, 0f3F800000;"
            f" rcp.approx.ftz.f32 e, e; mul.rn.f32 g{i}, g{i}, e; mul.rn.f32 g{i}, g{i}, u{i};\n"
        )
    return machine.asm(text + "cvt.rn.bf16x2.f32 $0, g1, g0;", "r", gate, up)[0]


def inverse_rms(machine: PtxMachine, sum_of_squares: F32, count: int, eps: float) -> F32:
    """1 / sqrt(sum / count + eps)."""
    text = "fma.rn.f32 $0, $1, $2, $3; rsqrt.approx.f32 $0, $0;"
    return machine.asm(text, "f", sum_of_squares, machine.f32(1.0 / count), machine.f32(eps))[0]


def quad_sum(machine: PtxMachine, value: F32) -> F32:
    """Sum over the four threads of a quad; all four get the same bits."""
    for distance in (1, 2):
        [word] = machine.asm("mov.b32 $0, $1;", "r", value)
        [other] = machine.asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "r", word, effects=True)
        value = machine.asm(".reg .f32 t; mov.b32 t, $2; add.rn.f32 $0, $1, t;", "f", value, other)[0]
    return value
