"""Values of one thread with operators: 32-bit words and flags, fp32, 64-bit addresses.

An operand may be a Python int. Operators emit their instruction at once, operands from left to right. Of words, `//`,
`%` and `>>` are unsigned; comparisons and `minimum` are signed, and a comparison is a `Flag`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


class Value:
    """An MLIR value of one thread.

    Attributes:
      value: the MLIR value.
      letter: its kind as a constraint of inline PTX.
    """

    __slots__ = ("value",)
    letter: str

    def __init__(self, value: ir.Value):
        self.value = value


class I32(Value):
    """A 32-bit word: a number, an address in shared memory, two bf16, or the bits of an fp32."""

    __slots__ = ()
    letter = "r"

    @staticmethod
    def of(x: I32 | int) -> I32:
        """A Python int as a constant; a word as it is."""
        return I32(mgpu.c(x, ir.IntegerType.get_signless(32))) if isinstance(x, int) else x

    def __add__(self, other: I32 | int) -> I32:
        return I32(arith.addi(self.value, I32.of(other).value))

    def __radd__(self, other: int) -> I32:
        return I32(arith.addi(I32.of(other).value, self.value))

    def __sub__(self, other: I32 | int) -> I32:
        return self + -other if isinstance(other, int) else I32(arith.subi(self.value, other.value))

    def __rsub__(self, other: int) -> I32:
        return I32(arith.subi(I32.of(other).value, self.value))

    def __mul__(self, other: I32 | int) -> I32:
        return I32(arith.muli(self.value, I32.of(other).value))

    def __rmul__(self, other: int) -> I32:
        return I32(arith.muli(I32.of(other).value, self.value))

    def __floordiv__(self, other: I32 | int) -> I32:
        """Unsigned."""
        return I32(arith.divui(self.value, I32.of(other).value))

    def __mod__(self, other: I32 | int) -> I32:
        """Unsigned."""
        return I32(arith.remui(self.value, I32.of(other).value))

    def __and__(self, other: I32 | int) -> I32:
        both = arith.andi(self.value, I32.of(other).value)
        return Flag(both) if isinstance(self, Flag) and isinstance(other, Flag) else I32(both)

    def __or__(self, other: I32 | int) -> I32:
        either = arith.ori(self.value, I32.of(other).value)
        return Flag(either) if isinstance(self, Flag) and isinstance(other, Flag) else I32(either)

    def __xor__(self, other: I32 | int) -> I32:
        return I32(arith.xori(self.value, I32.of(other).value))

    def __lshift__(self, other: I32 | int) -> I32:
        return I32(arith.shli(self.value, I32.of(other).value))

    def __rshift__(self, other: I32 | int) -> I32:
        """Unsigned."""
        return I32(arith.shrui(self.value, I32.of(other).value))

    def __lt__(self, other: I32 | int) -> Flag:
        return _compare(arith.CmpIPredicate.slt, self, other)

    def __gt__(self, other: I32 | int) -> Flag:
        return _compare(arith.CmpIPredicate.slt, other, self)

    def __le__(self, other: I32 | int) -> Flag:
        return _compare(arith.CmpIPredicate.sle, self, other)

    def __ge__(self, other: I32 | int) -> Flag:
        return _compare(arith.CmpIPredicate.sle, other, self)

    def __eq__(self, other: I32 | int) -> Flag:
        return _compare(arith.CmpIPredicate.eq, self, other)

    def __ne__(self, other: I32 | int) -> Flag:
        return _compare(arith.CmpIPredicate.ne, self, other)

    __hash__ = None


class Flag(I32):
    """1 or 0, the result of a signed comparison."""

    __slots__ = ()

    def __invert__(self) -> Flag:
        return self < 1

    def __add__(self, other: I32 | int) -> I32:
        if isinstance(other, Flag):
            raise TypeError("the sum of two flags: on the numpy machine flags are booleans")
        return super().__add__(other)


class F32(Value):
    """An fp32 value; sums and products are rounded one by one, never contracted."""

    __slots__ = ()
    letter = "f"

    @staticmethod
    def of(x: F32 | float) -> F32:
        """A Python float as a constant; a value as it is."""
        return x if isinstance(x, F32) else F32(mgpu.c(float(x), ir.F32Type.get()))

    def __add__(self, other: F32) -> F32:
        return asm("add.rn.f32 $0, $1, $2;", "f", self, other)[0]

    def __mul__(self, other: F32) -> F32:
        return asm("mul.rn.f32 $0, $1, $2;", "f", self, other)[0]


class Ptr(Value):
    """A 64-bit address in global memory; an offset is in bytes, unsigned and below 2^32."""

    __slots__ = ()
    letter = "l"

    def __add__(self, offset: I32 | int) -> Ptr:
        text = ".reg .b64 t; cvt.u64.u32 t, $2; add.s64 $0, $1, t;"
        return asm(text, "l", self, I32.of(offset))[0]


AnyValue = TypeVar("AnyValue", I32, F32, Ptr)
_KINDS = {"r": I32, "f": F32, "l": Ptr}


def asm(text: str, out: str, *inputs: Value, effects: bool = False) -> list[Value]:
    """Inline PTX.

    Args:
      text: the instructions; `$0` is the first output, the inputs follow the outputs.
      out: a letter for each output: "r" I32, "f" F32, "l" Ptr.
      inputs: the operands.
      effects: True for an instruction that reads or writes shared or global memory, and for barriers: such ones keep
        the order in which they are written.
    """
    types = {"r": ir.IntegerType.get_signless(32), "l": ir.IntegerType.get_signless(64), "f": ir.F32Type.get()}
    outs = [types[letter] for letter in out]
    returned = llvm.StructType.get_literal(outs) if len(outs) > 1 else outs[0] if outs else ir.Type.parse("!llvm.void")
    constraints = ",".join([f"=&{letter}" for letter in out] + [operand.letter for operand in inputs])
    operands = [operand.value for operand in inputs]
    found = llvm.inline_asm(returned, operands, "{\n" + text + "\n}", constraints, has_side_effects=effects)
    if len(outs) > 1:
        found = [llvm.extractvalue(kind, found, [i]) for i, kind in enumerate(outs)]
    else:
        found = [found] * len(outs)
    return [_KINDS[letter](value) for letter, value in zip(out, found, strict=True)]


def element(of: ir.Value, i: int) -> ir.Value:
    """Element i of an MLIR vector."""
    return vector.extract(of, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def as_word(register: ir.Value) -> I32:
    """A 32-bit register of any type as a word."""
    return I32(mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32)))


def select(flag: I32, a: AnyValue | int, b: AnyValue | int) -> AnyValue:
    """a where the flag is not 0, else b."""
    a, b = (I32.of(x) if isinstance(x, int) else x for x in (a, b))
    return type(a)(arith.select(is_set(flag), a.value, b.value))


def is_set(flag: I32) -> ir.Value:
    """The flag as MLIR's i1."""
    return arith.cmpi(arith.CmpIPredicate.ne, flag.value, I32.of(0).value)


def minimum(a: I32 | int, b: I32 | int) -> I32:
    """The smaller of two signed words."""
    return I32(arith.minsi(I32.of(a).value, I32.of(b).value))


def tree_sum(values: Sequence[F32]) -> F32:
    """Sum as a balanced tree: the order depends only on the number of values."""
    values = list(values)
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


def _compare(predicate: arith.CmpIPredicate, a: I32 | int, b: I32 | int) -> Flag:
    bit = arith.cmpi(predicate, I32.of(a).value, I32.of(b).value)
    return Flag(arith.extui(ir.IntegerType.get_signless(32), bit))
