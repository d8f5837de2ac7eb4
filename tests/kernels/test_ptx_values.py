"""The operators of `ptx.values` against NumPy's, which the numpy machine has in their place. What they emit, operations
of MLIR and inline PTX, is computed one after the other."""

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from ptx_interpreter import interpret
from qerl_kernels.ptx import values
from qerl_kernels.ptx.values import F32, I32

WORDS = np.array([0, 1, 2, 7, 31, 32, 1000, 2**31 - 1, 2**31, 2**32 - 7, 2**32 - 1], np.uint32)
A, B = (np.repeat(WORDS, len(WORDS)), np.tile(WORDS, len(WORDS)))
SIGNED = np.int32
OPERATIONS = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.divui": np.floor_divide,
    "arith.remui": np.remainder, "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift, "arith.shrui": np.right_shift, "arith.select": np.where,
    "arith.minsi": lambda a, b: np.minimum(a.view(SIGNED), b.view(SIGNED)).view(np.uint32),
    "arith.extui": lambda a: a.astype(np.uint32),
}  # fmt: skip
COMPARISONS = {0: np.equal, 1: np.not_equal, 2: np.less, 3: np.less_equal}  # of arith.cmpi, signed


def computed(emit, *inputs: np.ndarray) -> np.ndarray:
    """`emit` of a word or an fp32 for each input, of every thread at once."""
    kinds = [F32 if array.dtype == np.float32 else I32 for array in inputs]
    with mlir.make_ir_context(), ir.Location.unknown():
        types = [ir.F32Type.get() if kind is F32 else ir.IntegerType.get_signless(32) for kind in kinds]
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("kernel", (types, []))
        block = function.add_entry_block()
        with ir.InsertionPoint(block):
            result = emit(*(kind(argument) for kind, argument in zip(kinds, block.arguments, strict=True)))
        held = {argument.get_name(): array for argument, array in zip(block.arguments, inputs, strict=True)}
        for operation in block.operations:
            given = [held[operand.get_name()] for operand in operation.operands]
            held[operation.results[0].get_name()] = _one(operation.operation, given, len(inputs[0]))
        return held[result.value.get_name()]


def _one(operation: ir.Operation, given: list[np.ndarray], threads: int) -> np.ndarray:
    if operation.name == "arith.constant":
        attribute = operation.attributes["value"]
        if str(operation.results[0].type) == "f32":
            return np.full(threads, ir.FloatAttr(attribute).value, np.float32)
        return np.full(threads, ir.IntegerAttr(attribute).value & 0xFFFFFFFF, np.uint32)
    if operation.name == "llvm.inline_asm":
        text = ir.StringAttr(operation.attributes["asm_string"]).value
        [found] = interpret(text, ir.StringAttr(operation.attributes["constraints"]).value[2], given)
        return found
    if operation.name == "arith.cmpi":
        compare = COMPARISONS[ir.IntegerAttr(operation.attributes["predicate"]).value]
        return compare(*(array.view(SIGNED) for array in given))
    return OPERATIONS[operation.name](*given)


@pytest.mark.parametrize(
    ("emit", "expected"),
    [
        (lambda a, b: a + b, A + B),
        (lambda a, b: a + 5 + (3 + b), A + B + np.uint32(8)),
        (lambda a, b: a - b, A - B),
        (lambda a, b: (a - 5) - (3 - b), A + B - np.uint32(8)),
        (lambda a, b: a * b, A * B),
        (lambda a, b: a * 3 + 7 * b, A * np.uint32(3) + B * np.uint32(7)),
        (lambda a, b: a // (b | 1), A // (B | np.uint32(1))),  # unsigned
        (lambda a, b: a % (b | 1), A % (B | np.uint32(1))),
        (lambda a, b: (a & b) ^ (a | 12), (A & B) ^ (A | np.uint32(12))),
        (lambda a, b: (a >> (b & 31)) + (a << 4), (A >> (B & np.uint32(31))) + (A << np.uint32(4))),
        (lambda a, b: a < b, A.view(SIGNED) < B.view(SIGNED)),
        (lambda a, b: a <= b, A.view(SIGNED) <= B.view(SIGNED)),
        (lambda a, b: a > b, A.view(SIGNED) > B.view(SIGNED)),
        (lambda a, b: a >= b, A.view(SIGNED) >= B.view(SIGNED)),
        (lambda a, b: a == b, A == B),
        (lambda a, b: a != b, A != B),
        (lambda a, b: a > 31, A.view(SIGNED) > 31),
        (lambda a, b: ~(a < b) & (b >= 0), ~(A.view(SIGNED) < B.view(SIGNED)) & (B.view(SIGNED) >= 0)),
        (lambda a, b: values.select(a & 2, a, b), np.where(A & np.uint32(2), A, B)),
        (lambda a, b: values.select(a == b, 4, b), np.where(A == B, np.uint32(4), B)),
        (lambda a, b: values.minimum(a, b), np.minimum(A.view(SIGNED), B.view(SIGNED)).view(np.uint32)),
        (lambda a, b: values.minimum(7, b), np.minimum(7, B.view(SIGNED)).view(np.uint32)),
    ],
)
def test_words(emit, expected):
    np.testing.assert_array_equal(computed(emit, A, B), expected)


def test_fp32():
    a, b = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    np.testing.assert_array_equal(computed(lambda a, b: a * b + F32.of(0.5), a, b), a * b + np.float32(0.5))
    several = computed(lambda a, b: values.tree_sum([a, b, b, a, b]), a, b)
    np.testing.assert_array_equal(several, ((a + b) + (b + a)) + b)
