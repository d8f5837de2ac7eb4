"""What the PTX machine emits: operators of `ptx.values`, computed one after the other and compared with those of NumPy,
which the numpy machine has in their place; and the text of its instructions."""

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from ptx_interpreter import interpret
from qerl_kernels.ptx import values
from qerl_kernels.ptx.instructions import PtxMachine
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


class Written(PtxMachine):
    """Keeps the inline PTX in the place of emitting it."""

    i32 = staticmethod(str)

    def asm(self, text, out, *inputs, effects=False):
        self.last = " ".join(text.split()), out, inputs, effects
        return [f"{letter}{i}" for i, letter in enumerate(out)]


P = ".reg .pred p; setp.ne.b32 p, "


@pytest.mark.parametrize(
    ("emit", "text", "out", "inputs"),
    [
        (lambda m: m.load_global("at", 1, "on"),
         P + "$2, 0; mov.b32 $0, 0; @p ld.relaxed.cta.global.b32 $0, [$1 + 0];", "r", "at on"),
        (lambda m: m.load_global("at", 2, "on", 8),
         P + "$3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.relaxed.cta.global.v2.b32 {$0, $1}, [$2 + 8];", "rr", "at on"),
        (lambda m: m.load_global_half("at", "on", 6),
         ".reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; mov.b16 h, 0; @p ld.relaxed.cta.global.b16 h, [$1 + 6];"
         " cvt.u32.u16 $0, h;", "r", "at on"),
        (lambda m: m.store_global("at", ["a", "b"], "on", 8),
         P + "$3, 0; @p st.global.v2.b32 [$0 + 8], {$1, $2};", "", "at a b on"),
        (lambda m: m.store_global_bf16("at", "x", "on"),
         ".reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; cvt.rn.bf16.f32 h, $1; @p st.global.b16 [$0], h;",
         "", "at x on"),
        (lambda m: m.load_shared("at", 2, 8), "ld.shared.v2.f32 {$0, $1}, [$2 + 8];", "ff", "at"),
        (lambda m: m.load_shared_words("at", 4, 16), "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4 + 16];", "rrrr", "at"),
        (lambda m: m.store_shared("at", ["x", "y"], byte=8), "st.shared.v2.f32 [$0 + 8], {$1, $2};", "", "at x y"),
        (lambda m: m.store_shared("at", ["x"], "on", 4), P + "$2, 0; @p st.shared.f32 [$0 + 4], $1;", "", "at x on"),
        (lambda m: m.store_shared_words("at", ["a"], 4), "st.shared.b32 [$0 + 4], $1;", "", "at a"),
        (lambda m: m.cp_async("to", "of", [(0, 32), (16, 48)], "on"),
         P + "$2, 0; @p cp.async.cg.shared.global [$0 + 0], [$1 + 32], 16;"
         " @p cp.async.cg.shared.global [$0 + 16], [$1 + 48], 16;", "", "to of on"),
        (lambda m: m.commit_group(), "cp.async.commit_group;", "", ""),
        (lambda m: m.wait_group(2), "cp.async.wait_group 2;", "", ""),
        (lambda m: m.warp_sync(), "bar.warp.sync -1;", "", ""),
        (lambda m: m.cta_sync(), "bar.sync 0;", "", ""),
        (lambda m: m.init_mbarriers([("one", 64), ("two", "bytes")], "thread"),
         ".reg .pred p; .reg .b64 state; setp.eq.b32 p, $0, 0;"
         " @p mbarrier.init.shared::cta.b64 [$1], 1; @p mbarrier.arrive.expect_tx.shared::cta.b64 state, [$1], 64;"
         " @p mbarrier.init.shared::cta.b64 [$2], 1; @p mbarrier.arrive.expect_tx.shared::cta.b64 state, [$2], $3;"
         " fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;", "", "thread one two bytes"),
        (lambda m: m.cluster_wait(), "barrier.cluster.wait.aligned;", "", ""),
        (lambda m: m.mbarrier_init("bar", "on"),
         P + "$1, 0; @p mbarrier.init.shared::cta.b64 [$0], 128; fence.mbarrier_init.release.cluster;", "", "bar on"),
        (lambda m: m.mbarrier_expect("bar", 64),
         ".reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], 64;", "", "bar"),
        (lambda m: m.mbarrier_wait("bar", "phase"),
         ".reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
         " @done bra CAME; bra WAIT; CAME:",
         "", "bar phase"),
        (lambda m: m.mbarrier_wait("bar"),
         ".reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
         " @done bra CAME; bra WAIT; CAME:",
         "", "bar 0"),
        (lambda m: m.st_async("at", "rank", ["x"], "bar", "on", 4),
         ".reg .pred p; .reg .b32 far, bar; setp.ne.b32 p, $4, 0; @p mapa.shared::cluster.u32 far, $0, $1;"
         " @p mapa.shared::cluster.u32 bar, $2, $1;"
         " @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [far + 4], $3, [bar];",
         "", "at rank bar r0 on"),
        (lambda m: m.ldmatrix("at", 32),
         "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4 + 32];", "rrrr", "at"),
        (lambda m: m.ldmatrix("at", transposed=True),
         "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4 + 0];", "rrrr", "at"),
        (lambda m: m.movmatrix("a"), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "a"),
    ],
)  # fmt: skip
def test_instructions_on_memory_and_between_threads(emit, text, out, inputs):
    """As the PTX ISA has them. None is left out or moved: each has effects."""
    machine = Written(90)
    emit(machine)
    assert machine.last == (text, out, tuple(inputs.split()), True)


def test_instructions_that_compute():
    machine = Written()
    assert machine.mad_wide("base", ("i", 64), ("j", 2)) == "l0"
    assert machine.last[0] == "mad.wide.u32 $0, $2, 64, $1; mad.wide.u32 $0, $3, 2, $0;"
    assert machine.last[1:] == ("l", ("base", "i", "j"), False)
    machine.mma(["c0", "c1", "c2", "c3"], ["a0", "a1", "a2", "a3"], ["b0", "b1"])
    assert machine.last[0] == (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};"
    )
    assert machine.last[1:3] == ("ffff", ("a0", "a1", "a2", "a3", "b0", "b1", "c0", "c1", "c2", "c3"))
