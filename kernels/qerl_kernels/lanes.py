"""What one thread of the fused decode kernels does: loads, elementwise arithmetic, exchanges and `mma.sync`, as inline
PTX.

Every function here emits instructions for all threads; values are MLIR values of one thread (i32 words that hold two
bf16, or f32). Side effects keep loads, stores and barriers in the order in which they are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def asm(text: str, out: str = "", *inputs: tuple[str, ir.Value], effects: bool = False) -> list[ir.Value]:
    """Inline PTX.

    Args:
      text: the instructions; `$0` is the first output, inputs follow the outputs.
      out: a letter for each output: "r" i32, "f" f32, "l" i64.
      inputs: (letter, value).
      effects: True for what reads or writes memory that others see, and for barriers.
    """
    types = {"r": ir.IntegerType.get_signless(32), "l": ir.IntegerType.get_signless(64), "f": ir.F32Type.get()}
    outs = [types[letter] for letter in out]
    void = ir.Type.parse("!llvm.void")
    returned = void if not outs else outs[0] if len(outs) == 1 else llvm.StructType.get_literal(outs)
    kinds = ",".join([f"=&{letter}" for letter in out] + [letter for letter, _ in inputs])
    value = llvm.inline_asm(
        returned, [value for _, value in inputs], "{\n" + text + "\n}", kinds, has_side_effects=effects
    )
    if len(outs) <= 1:
        return [value] if outs else []
    return [llvm.extractvalue(kind, value, [i]) for i, kind in enumerate(outs)]


def const(value: int) -> ir.Value:
    """An i32."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def fconst(value: float) -> ir.Value:
    """An f32."""
    return mgpu.c(float(value), ir.F32Type.get())


def _value(x: ir.Value | int) -> ir.Value:
    return const(x) if isinstance(x, int) else x


def add(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
    """a + b of i32 (either may be a Python int)."""
    return arith.addi(_value(a), _value(b))


def mul(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
    """a · b of i32."""
    return arith.muli(_value(a), _value(b))


def div(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
    """a // b of unsigned i32."""
    return arith.divui(_value(a), _value(b))


def rem(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
    """a % b of unsigned i32."""
    return arith.remui(_value(a), _value(b))


def less(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
    """1 where a < b (signed), else 0, as i32."""
    bit = arith.cmpi(arith.CmpIPredicate.slt, _value(a), _value(b))
    return arith.extui(ir.IntegerType.get_signless(32), bit)


def smaller(a: ir.Value | int, b: ir.Value | int) -> ir.Value:
    """The smaller of two signed i32."""
    return arith.minsi(_value(a), _value(b))


def xor(a: ir.Value, b: ir.Value | int) -> ir.Value:
    """a ^ b of i32."""
    return arith.xori(a, _value(b))


def both(a: ir.Value, b: ir.Value) -> ir.Value:
    """1 where both flags are 1."""
    return arith.andi(a, b)


def either(flag: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """a where the flag is 1, else b."""
    return arith.select(arith.cmpi(arith.CmpIPredicate.ne, flag, const(0)), a, b)


def fadd(a: ir.Value, b: ir.Value) -> ir.Value:
    """a + b in fp32, not contracted into anything."""
    return asm("add.rn.f32 $0, $1, $2;", "f", ("f", a), ("f", b))[0]


def fmul(a: ir.Value, b: ir.Value) -> ir.Value:
    """a · b in fp32."""
    return asm("mul.rn.f32 $0, $1, $2;", "f", ("f", a), ("f", b))[0]


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a · b + c in fp32, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", "f", ("f", a), ("f", b), ("f", c))[0]


def as_float(word: ir.Value) -> ir.Value:
    """The fp32 value whose bits a word has."""
    return asm("mov.b32 $0, $1;", "f", ("r", word))[0]


def as_word(value: ir.Value) -> ir.Value:
    """The bits of an fp32 value."""
    return asm("mov.b32 $0, $1;", "r", ("f", value))[0]


def total(values: Sequence[ir.Value]) -> ir.Value:
    """Sum in fp32 as a balanced tree: the order depends only on how many there are."""
    values = list(values)
    while len(values) > 1:
        pairs = [fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


# ---- control ----


def repeat(count: ir.Value, carry: Sequence[ir.Value], body: Callable[..., list[ir.Value]]) -> list[ir.Value]:
    """`carry = body(i, carry)` for i in 0 ... count - 1."""
    return list(mgpu.utils.fori(count, list(carry))(body).results)


def only(flag: ir.Value) -> contextlib.AbstractContextManager[None]:
    """What is emitted within is done where the flag is 1; no value leaves it."""
    return mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ne, flag, const(0)))


# ---- memory ----


def address(base: ir.Value, byte_offset: ir.Value) -> ir.Value:
    """Global address: a memref's pointer and an offset in bytes (below 2^32)."""
    return asm(".reg .b64 t; cvt.u64.u32 t, $2; add.s64 $0, $1, t;", "l", ("l", base), ("r", byte_offset))[0]


def load(at: ir.Value, words: int, flag: ir.Value, byte: int = 0) -> list[ir.Value]:
    """`words` (1, 2 or 4) 32-bit words of global memory; zeros where `flag` is 0.

    Relaxed, not weak, so that loads are issued in the order in which they are written and before what follows:
    otherwise the assembler puts arithmetic, which waits for the first of them, before the last. And of the block's
    scope: loads of the system's scope, as volatile ones are, came late where many blocks read the same lines
    (tools/results/LOG.md).
    """
    names = [f"${i}" for i in range(words)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    vector = "" if words == 1 else f".v{words}"
    listed = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    text = (
        f".reg .pred p; setp.ne.b32 p, ${words + 1}, 0; {zeros}"
        f" @p ld.relaxed.cta.global{vector}.b32 {listed}, [${words} + {byte}];"
    )
    return asm(text, "r" * words, ("l", at), ("r", flag), effects=True)


def load_half(at: ir.Value, flag: ir.Value, byte: int = 0) -> ir.Value:
    """One 16-bit value of global memory in the low half of a word; zero where `flag` is 0."""
    text = (
        f".reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; mov.b16 h, 0; @p ld.relaxed.cta.global.b16 h, [$1 + {byte}];"
        " cvt.u32.u16 $0, h;"
    )
    return asm(text, "r", ("l", at), ("r", flag), effects=True)[0]


def store(at: ir.Value, words: Sequence[ir.Value], flag: ir.Value, byte: int = 0) -> None:
    """1, 2 or 4 words to global memory where `flag` is 1."""
    names = [f"${i + 1}" for i in range(len(words))]
    vector = "" if len(words) == 1 else f".v{len(words)}"
    listed = names[0] if len(words) == 1 else "{" + ", ".join(names) + "}"
    text = f".reg .pred p; setp.ne.b32 p, ${len(words) + 1}, 0; @p st.global{vector}.b32 [$0 + {byte}], {listed};"
    asm(text, "", ("l", at), *(("r", word) for word in words), ("r", flag), effects=True)


def store_bf16(at: ir.Value, value: ir.Value, flag: ir.Value) -> None:
    """One fp32 value, rounded to bf16, to global memory where `flag` is 1."""
    text = ".reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; cvt.rn.bf16.f32 h, $1; @p st.global.b16 [$0], h;"
    asm(text, "", ("l", at), ("f", value), ("r", flag), effects=True)


def shared_base(ref: ir.Value) -> ir.Value:
    """32-bit address of a shared-memory array."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def load_shared(at: ir.Value, words: int = 1, byte: int = 0) -> list[ir.Value]:
    """`words` (1, 2 or 4) fp32 values of this block's shared memory."""
    names = [f"${i}" for i in range(words)]
    vector = "" if words == 1 else f".v{words}"
    listed = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    return asm(f"ld.shared{vector}.f32 {listed}, [${words} + {byte}];", "f" * words, ("r", at), effects=True)


def store_shared(at: ir.Value, values: Sequence[ir.Value], flag: ir.Value | None = None, byte: int = 0) -> None:
    """1, 2 or 4 fp32 values to this block's shared memory, where `flag` is 1."""
    names = [f"${i + 1}" for i in range(len(values))]
    listed = names[0] if len(values) == 1 else "{" + ", ".join(names) + "}"
    vector = "" if len(values) == 1 else f".v{len(values)}"
    guard = "" if flag is None else f".reg .pred p; setp.ne.b32 p, ${len(values) + 1}, 0; @p "
    inputs = [("r", at), *(("f", value) for value in values), *([("r", flag)] if flag is not None else [])]
    asm(f"{guard}st.shared{vector}.f32 [$0 + {byte}], {listed};", "", *inputs, effects=True)


def copy(to: ir.Value, source: ir.Value, offsets: Sequence[tuple[int, int]], flag: ir.Value) -> None:
    """Starts copies of 16 bytes from global to shared memory, one for each (byte of `to`, byte of `source`), where
    `flag` is 1.

    Source: PTX ISA, "cp.async". The copies that a thread starts between two calls of `end_group` are a group.
    """
    text = ".reg .pred p; setp.ne.b32 p, $2, 0;"
    for there, here in offsets:
        text += f" @p cp.async.cg.shared.global [$0 + {there}], [$1 + {here}], 16;"
    asm(text, "", ("r", to), ("l", source), ("r", flag), effects=True)


def end_group() -> None:
    """The copies that this thread started since the last call are one group."""
    asm("cp.async.commit_group;", effects=True)


def wait_groups(pending: int) -> None:
    """All groups of this thread but the last `pending` have come."""
    asm(f"cp.async.wait_group {pending};", effects=True)


def warp_barrier() -> None:
    """All threads of the warp have come here, and see each other's shared memory."""
    asm("bar.warp.sync -1;", effects=True)


def read_shared(at: ir.Value, words: int, byte: int = 0) -> list[ir.Value]:
    """2 or 4 words of this block's shared memory."""
    listed = "{" + ", ".join(f"${i}" for i in range(words)) + "}"
    return asm(f"ld.shared.v{words}.b32 {listed}, [${words} + {byte}];", "r" * words, ("r", at), effects=True)


def read_matrices(at: ir.Value, byte: int = 0, transposed: bool = False) -> list[ir.Value]:
    """Four 8 x 8 matrices of bf16: lane 8 i + r has the address of row r of matrix i, lane 4 g + q gets elements 2 q
    and 2 q + 1 of row g of each (`transposed`: of column g). Source: PTX ISA, "ldmatrix".
    """
    kind = "x4.trans" if transposed else "x4"
    text = f"ldmatrix.sync.aligned.m8n8.{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {byte}];"
    return asm(text, "rrrr", ("r", at), effects=True)


def transposed(word: ir.Value) -> ir.Value:
    """The word of halves (2 q, 2 q + 1) of row g of an 8 × 8 matrix that a warp has -> the same of its transpose."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", ("r", word), effects=True)[0]


def send(at: ir.Value, block: ir.Value, values: Sequence[ir.Value], arrived: ir.Value, flag: ir.Value) -> None:
    """One or four fp32 values to the same place `at` in the shared memory of another block of the cluster, and their
    bytes to its barrier `arrived`, where `flag` is 1.
    """
    count = len(values)
    listed, vector = ("$3", "") if count == 1 else ("{$3, $4, $5, $6}", ".v4")
    text = (
        f".reg .pred p; .reg .b32 far, bar; setp.ne.b32 p, ${count + 3}, 0;"
        " @p mapa.shared::cluster.u32 far, $0, $1; @p mapa.shared::cluster.u32 bar, $2, $1;"
        f" @p st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [far], {listed}, [bar];"
    )
    words = [asm("mov.b32 $0, $1;", "r", ("f", value))[0] for value in values]
    asm(text, "", ("r", at), ("r", block), ("r", arrived), *(("r", w) for w in words), ("r", flag), effects=True)


def place_in_grid(blocks: int) -> tuple[ir.Value, ir.Value]:
    """(the cluster, of so many blocks, and this block in it), without the division by a number that only the launch
    knows, by which a grid's index is taken apart."""
    block = asm("mov.u32 $0, %ctaid.x;", "r")[0]
    return (div(block, blocks), block_of_cluster()) if blocks > 1 else (block, const(0))


def block_of_cluster() -> ir.Value:
    """This block's number in its cluster."""
    return asm("mov.u32 $0, %cluster_ctarank;", "r")[0]


def begin_exchange(barriers: Sequence[tuple[ir.Value, int]], thread: ir.Value) -> None:
    """Thread 0 prepares (barrier, bytes that will be sent to this block) and tells the cluster so."""
    text = ".reg .pred p; .reg .b64 state; setp.eq.b32 p, $0, 0;"
    for i, (_, expected) in enumerate(barriers, 1):
        text += (
            f" @p mbarrier.init.shared::cta.b64 [${i}], 1;"
            f" @p mbarrier.arrive.expect_tx.shared::cta.b64 state, [${i}], {expected};"
        )
    text += " fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"
    asm(text, "", ("r", thread), *(("r", at) for at, _ in barriers), effects=True)


def all_began() -> None:
    """All blocks of the cluster have begun the exchange."""
    asm("barrier.cluster.wait.aligned;", effects=True)


def wait_for(barrier: ir.Value) -> None:
    """All that was to be sent to this block has come."""
    text = """
    .reg .pred done;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 0;
    @done bra CAME;
    bra WAIT;
    CAME:
    """
    asm(text, "", ("r", barrier), effects=True)


def block_barrier() -> None:
    """All threads of the block have come here, and see each other's shared memory."""
    asm("bar.sync 0;", effects=True)


# ---- arithmetic on words of two bf16 ----


def unpacked(word: str, name: str) -> str:
    """PTX that puts the two bf16 of a word into the fp32 registers `name`0 and `name`1."""
    return (
        f".reg .b32 {name}t; .reg .f32 {name}0, {name}1; shl.b32 {name}t, {word}, 16; mov.b32 {name}0, {name}t;"
        f" and.b32 {name}t, {word}, 0xFFFF0000; mov.b32 {name}1, {name}t;\n"
    )


def half_of(word: ir.Value, high: bool) -> ir.Value:
    """One bf16 of a word in fp32."""
    text = "and.b32 t, $1, 0xFFFF0000;" if high else "shl.b32 t, $1, 16;"
    return asm(f".reg .b32 t; {text} mov.b32 $0, t;", "f", ("r", word))[0]


def to_bf16(low: ir.Value, high: ir.Value) -> ir.Value:
    """Two fp32 values rounded to a word of bf16."""
    return asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", ("f", low), ("f", high))[0]


def add_halves(wide: Sequence[ir.Value], word: ir.Value) -> list[ir.Value]:
    """Two fp32 values (as words) + the two bf16 of a word, in fp32."""
    text = unpacked("$4", "d") + ".reg .f32 x; "
    text += " ".join(f"mov.b32 x, ${2 + i}; add.rn.f32 x, x, d{i}; mov.b32 ${i}, x;" for i in range(2))
    return asm(text, "rr", *(("r", w) for w in (*wide, word)))


def add_square(sum_: ir.Value, wide: ir.Value) -> ir.Value:
    """sum + value² of an fp32 value as a word."""
    return asm(".reg .f32 x; mov.b32 x, $2; fma.rn.f32 $0, x, x, $1;", "f", ("f", sum_), ("r", wide))[0]


def weighted_bf16(wide: Sequence[ir.Value], weights: Sequence[ir.Value], factor: ir.Value | None) -> ir.Value:
    """Two fp32 values · factor (None: 1) · their weights in fp32, rounded once to a word of bf16."""
    wide = list(wide) if factor is None else [fmul(as_float(x), factor) for x in wide]
    return to_bf16(*(fmul(as_float(x), as_float(w)) for x, w in zip(wide, weights, strict=True)))


def silu_bf16(gate: ir.Value, up: ir.Value) -> ir.Value:
    """`gate / (1 + exp(−gate)) · up` of each half in fp32, rounded once."""
    text = unpacked("$1", "g") + unpacked("$2", "u") + ".reg .f32 e;\n"
    for i in range(2):
        text += (
            f"mul.rn.f32 e, g{i}, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.rn.f32 e, e, 0f3F800000;"
            f" rcp.approx.ftz.f32 e, e; mul.rn.f32 g{i}, g{i}, e; mul.rn.f32 g{i}, g{i}, u{i};\n"
        )
    return asm(text + "cvt.rn.bf16x2.f32 $0, g1, g0;", "r", ("r", gate), ("r", up))[0]


def inverse_rms(sum_of_squares: ir.Value, count: int, eps: float) -> ir.Value:
    """1 / sqrt(sum / count + eps)."""
    text = "fma.rn.f32 $0, $1, $2, $3; rsqrt.approx.f32 $0, $0;"
    return asm(text, "f", ("f", sum_of_squares), ("f", fconst(1.0 / count)), ("f", fconst(eps)))[0]


def over_quad(value: ir.Value) -> ir.Value:
    """Sum of an fp32 value over the four threads of a quad; all four get the same bits."""
    for distance in (1, 2):
        [word] = asm("mov.b32 $0, $1;", "r", ("f", value))
        [other] = asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "r", ("r", word), effects=True)
        value = asm(".reg .f32 t; mov.b32 t, $2; add.rn.f32 $0, $1, t;", "f", ("f", value), ("r", other))[0]
    return value


def pair(first: ir.Value, second: ir.Value, high: bool) -> ir.Value:
    """The same half of two words side by side."""
    return asm(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", "r", ("r", first), ("r", second))[0]


def multiply(sums: Sequence[ir.Value], a: Sequence[ir.Value], b: Sequence[ir.Value]) -> list[ir.Value]:
    """sums [16 × 8] + a [16 × 16] · b [16 × 8] by the tensor core; sums in fp32."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};"
    )
    return asm(text, "ffff", *(("r", x) for x in (*a, *b)), *(("f", x) for x in sums))
