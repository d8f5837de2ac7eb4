"""The PTX machine: one emitter for each instruction that the kernels use.

Every method emits an instruction for all threads. Instructions that touch memory, and barriers, keep the order in which
they are written. Offsets `byte` are immediate. A `flag` predicates the instruction: 0 leaves memory alone.
Source of the semantics: PTX ISA, under the name of each instruction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import jax.experimental.mosaic.gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from qerl_kernels.ptx import values
from qerl_kernels.ptx.values import F32, I32, Ptr, Value

MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


# Compute capability, times ten, from which on a GPU has an instruction; sm_80 has all others (PTX ISA, "Target ISA").
SINCE = {
    "cluster_rank": 90,
    "fence_proxy_async": 90,
    "init_mbarriers": 90,
    "cluster_wait": 90,
    "mbarrier_wait": 90,
    "mbarrier_expect": 90,
    "mbarrier_init": 90,
    "st_async": 90,
    "mul_bf16": 90,
}


def require(arch: int, instruction: str) -> None:
    """Raises ValueError where a GPU has no such instruction: the compiler's own refusal may end the process."""
    if arch < SINCE.get(instruction, 80):
        raise ValueError(f"{instruction} needs compute capability {SINCE[instruction] / 10}, this is for {arch / 10}")


class PtxMachine:
    """Emits the instructions of one thread; see `values` for its arithmetic.

    Attributes:
      arch: compute capability of the target times ten; by default the least that any kernel runs on.
    """

    def __init__(self, arch: int = 80):
        self.arch = arch

    # ---- values and control ----

    i32 = staticmethod(I32.of)
    f32 = staticmethod(F32.of)
    asm = staticmethod(values.asm)
    select = staticmethod(values.select)
    minimum = staticmethod(values.minimum)

    def fori(self, count: I32, carry: Sequence[Value], body: Callable[[I32, list], list]) -> list:
        """`carry = body(i, carry)` for i in 0 ... count - 1."""
        kinds = [type(each) for each in carry]

        def wrap(raw: Sequence[ir.Value]) -> list[Value]:
            return [kind(value) for kind, value in zip(kinds, raw, strict=True)]

        def step(i: ir.Value, raw: list[ir.Value]) -> list[ir.Value]:
            return [each.value for each in body(I32(i), wrap(raw))]

        return wrap(mgpu.utils.fori(count.value, [each.value for each in carry])(step).results)

    def when(self, flag: I32) -> contextlib.AbstractContextManager[None]:
        """A branch for the threads whose flag is 1; no value leaves it."""
        return mgpu.utils.when(values.is_set(flag))

    # ---- special registers ----

    def thread_index(self) -> I32:
        """Index of this thread in its CTA."""
        return I32(mgpu.utils.thread_idx())

    def warp_index(self) -> I32:
        """Index of this warp in its CTA, known to be uniform over the warp."""
        return I32(mgpu.utils.warp_idx())

    def cluster_rank(self) -> I32:
        """Rank of this CTA in its cluster."""
        require(self.arch, "cluster_rank")
        return self.asm("mov.u32 $0, %cluster_ctarank;", "r")[0]

    def cluster_and_rank(self, ctas: int) -> tuple[I32, I32]:
        """(index of the cluster, rank in it), for clusters of `ctas`.

        Mosaic's own grid indices take a division by a number that only the launch knows.
        """
        cta = self.asm("mov.u32 $0, %ctaid.x;", "r")[0]
        return (cta // ctas, self.cluster_rank()) if ctas > 1 else (cta, self.i32(0))

    # ---- global memory ----

    def load_global(self, at: Ptr, words: int, flag: I32, byte: int = 0) -> list[I32]:
        """1, 2 or 4 words; zeros where the flag is 0.

        Relaxed, not weak: loads are issued in the order in which they are written, before the code behind them.
        Otherwise the assembler moves arithmetic, which waits for the first of them, before the last. CTA scope: loads
        of system scope, as volatile ones are, came late where many CTAs read the same lines
        (tools/results/notes/skinny.md).
        """
        names = [f"${i}" for i in range(words)]
        zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
        text = (
            f".reg .pred p; setp.ne.b32 p, ${words + 1}, 0; {zeros}"
            f" @p ld.relaxed.cta.global{_vector(words)}.b32 {_listed(names)}, [${words} + {byte}];"
        )
        return self.asm(text, "r" * words, at, flag, effects=True)

    def load_global_half(self, at: Ptr, flag: I32, byte: int = 0) -> I32:
        """16 bits in the low half of a word; zero where the flag is 0."""
        text = (
            ".reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; mov.b16 h, 0;"
            f" @p ld.relaxed.cta.global.b16 h, [$1 + {byte}]; cvt.u32.u16 $0, h;"
        )
        return self.asm(text, "r", at, flag, effects=True)[0]

    def store_global(self, at: Ptr, words: Sequence[I32], flag: I32, byte: int = 0) -> None:
        """1, 2 or 4 words."""
        names = [f"${i + 1}" for i in range(len(words))]
        text = (
            f".reg .pred p; setp.ne.b32 p, ${len(words) + 1}, 0;"
            f" @p st.global{_vector(len(words))}.b32 [$0 + {byte}], {_listed(names)};"
        )
        self.asm(text, "", at, *words, flag, effects=True)

    def store_global_bf16(self, at: Ptr, value: F32, flag: I32) -> None:
        """One fp32 value rounded to bf16."""
        text = ".reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; cvt.rn.bf16.f32 h, $1; @p st.global.b16 [$0], h;"
        self.asm(text, "", at, value, flag, effects=True)

    def mad_wide(self, base: Ptr, *terms: tuple[I32, int]) -> Ptr:
        """base + Σ index · stride in 64 bits, for arrays larger than 4 GiB."""
        text = " ".join(f"mad.wide.u32 $0, ${2 + i}, {s}, {'$0' if i else '$1'};" for i, (_, s) in enumerate(terms))
        return self.asm(text, "l", base, *(index for index, _ in terms))[0]

    # ---- packets between GPUs ----

    def send_packet(self, at: Ptr, words: Sequence[I32], mark: I32, flag: I32) -> None:
        """16 bytes to memory of any GPU: each of two words with the mark behind it. As NCCL's protocol "LL" does, this
        relies on the hardware, which writes and reads 8 aligned bytes at once; PTX promises it of 4."""
        text = ".reg .pred p; setp.ne.b32 p, $4, 0; @p st.volatile.global.v4.b32 [$0], {$1, $3, $2, $3};"
        self.asm(text, "", at, *words, mark, flag, effects=True)

    def receive_packet(self, at: Ptr, otherwise: Sequence[I32], mark: I32, flag: I32) -> list[I32]:
        """The two words of a packet, once it has the mark; `otherwise` where the flag is 0."""
        text = """
        .reg .pred on, p; .reg .b32 first, second;
        mov.b32 $0, $3; mov.b32 $1, $4; setp.ne.b32 on, $6, 0;
        @!on bra CAME;
        WAIT:
        ld.volatile.global.v4.b32 {$0, first, $1, second}, [$2];
        setp.ne.b32 p, first, $5;
        @p bra WAIT;
        setp.ne.b32 p, second, $5;
        @p bra WAIT;
        CAME:
        """
        return self.asm(text, "rr", at, *otherwise, mark, flag, effects=True)

    # ---- shared memory ----

    def shared_address(self, ref: ir.Value) -> I32:
        """32-bit address of an array in shared memory."""
        return I32(llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref)))

    def load_shared(self, at: I32, count: int = 1, byte: int = 0) -> list[F32]:
        """1, 2 or 4 fp32 values."""
        names = [f"${i}" for i in range(count)]
        text = f"ld.shared{_vector(count)}.f32 {_listed(names)}, [${count} + {byte}];"
        return self.asm(text, "f" * count, at, effects=True)

    def load_shared_words(self, at: I32, words: int, byte: int = 0) -> list[I32]:
        """1, 2 or 4 words."""
        names = [f"${i}" for i in range(words)]
        text = f"ld.shared{_vector(words)}.b32 {_listed(names)}, [${words} + {byte}];"
        return self.asm(text, "r" * words, at, effects=True)

    def store_shared(self, at: I32, values: Sequence[F32], flag: I32 | None = None, byte: int = 0) -> None:
        """1, 2 or 4 fp32 values."""
        names = [f"${i + 1}" for i in range(len(values))]
        guard = "" if flag is None else f".reg .pred p; setp.ne.b32 p, ${len(values) + 1}, 0; @p "
        text = f"{guard}st.shared{_vector(len(values))}.f32 [$0 + {byte}], {_listed(names)};"
        self.asm(text, "", at, *values, *([] if flag is None else [flag]), effects=True)

    def store_shared_words(self, at: I32, words: Sequence[I32], byte: int = 0) -> None:
        """1, 2 or 4 words."""
        names = [f"${i + 1}" for i in range(len(words))]
        text = f"st.shared{_vector(len(words))}.b32 [$0 + {byte}], {_listed(names)};"
        self.asm(text, "", at, *words, effects=True)

    def cp_async(self, to: I32, source: Ptr, offsets: Sequence[tuple[int, int]], flag: I32) -> None:
        """Starts copies of 16 bytes from global to shared memory, one for each (byte of `to`, byte of `source`)."""
        text = ".reg .pred p; setp.ne.b32 p, $2, 0;"
        for there, here in offsets:
            text += f" @p cp.async.cg.shared.global [$0 + {there}], [$1 + {here}], 16;"
        self.asm(text, "", to, source, flag, effects=True)

    def commit_group(self) -> None:
        """This thread's copies since the last call become one group, be it empty."""
        self.asm("cp.async.commit_group;", "", effects=True)

    def wait_group(self, pending: int) -> None:
        """Waits for all groups of this thread but the last `pending`."""
        self.asm(f"cp.async.wait_group {pending};", "", effects=True)

    def fence_proxy_async(self) -> None:
        """Orders this thread's accesses to shared memory with those of the copy engine and of `wgmma`."""
        require(self.arch, "fence_proxy_async")
        self.asm("fence.proxy.async.shared::cta;", "", effects=True)

    # ---- barriers and the cluster ----

    def warp_sync(self) -> None:
        """All threads of the warp arrive, and see each other's shared memory."""
        self.asm("bar.warp.sync -1;", "", effects=True)

    def cta_sync(self) -> None:
        """All threads of the CTA arrive, and see each other's shared memory."""
        self.asm("bar.sync 0;", "", effects=True)

    def init_mbarriers(self, barriers: Sequence[tuple[I32, int | I32]], thread: I32) -> None:
        """Thread 0 prepares each (mbarrier, bytes that the cluster will send to it), and every thread announces to the
        cluster that those of its CTA are prepared."""
        require(self.arch, "init_mbarriers")
        text = ".reg .pred p; .reg .b64 state; setp.eq.b32 p, $0, 0;"
        operands = [at for at, _ in barriers] + [size for _, size in barriers if not isinstance(size, int)]
        names = iter(f"${i}" for i in range(1 + len(barriers), 1 + len(operands)))
        for i, (_, expected) in enumerate(barriers, 1):
            size = expected if isinstance(expected, int) else next(names)
            text += (
                f" @p mbarrier.init.shared::cta.b64 [${i}], 1;"
                f" @p mbarrier.arrive.expect_tx.shared::cta.b64 state, [${i}], {size};"
            )
        text += " fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"
        self.asm(text, "", thread, *operands, effects=True)

    def cluster_wait(self) -> None:
        """Waits until every CTA of the cluster has announced its mbarriers."""
        require(self.arch, "cluster_wait")
        self.asm("barrier.cluster.wait.aligned;", "", effects=True)

    def mbarrier_init(self, barrier: I32, flag: I32) -> None:
        """Prepares an mbarrier for an arrival of each thread of a warpgroup, where the flag is not 0. Other threads may
        use it after a barrier that they and this one pass."""
        require(self.arch, "mbarrier_init")
        text = ".reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], 128;"
        self.asm(text + " fence.mbarrier_init.release.cluster;", "", barrier, flag, effects=True)

    def mbarrier_expect(self, barrier: I32, size: int) -> None:
        """This thread arrives, and the phase waits for `size` bytes more."""
        require(self.arch, "mbarrier_expect")
        text = f".reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], {size};"
        self.asm(text, "", barrier, effects=True)

    def mbarrier_wait(self, barrier: I32, phase: I32 | int = 0) -> None:
        """Waits for a phase, counted modulo two: all expected bytes have come."""
        require(self.arch, "mbarrier_wait")
        text = """
        .reg .pred done;
        WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
        @done bra CAME;
        bra WAIT;
        CAME:
        """
        self.asm(text, "", barrier, self.i32(phase), effects=True)

    def st_async(
        self, at: I32, rank: I32, values: Sequence[F32], barrier: I32, flag: I32 | None = None, byte: int = 0
    ) -> None:
        """1, 2 or 4 fp32 values to the address `at` in the shared memory of another CTA of the cluster, and their bytes
        to its mbarrier. The instruction counts the bytes beside the data, so that the sender needs no fence."""
        require(self.arch, "st_async")
        count = len(values)
        names = [f"${i + 3}" for i in range(count)]
        text, guard = ".reg .b32 far, bar;", ""
        if flag is not None:
            text, guard = f".reg .pred p; {text} setp.ne.b32 p, ${count + 3}, 0;", "@p "
        text += (
            f" {guard}mapa.shared::cluster.u32 far, $0, $1; {guard}mapa.shared::cluster.u32 bar, $2, $1;"
            f" {guard}st.async.shared::cluster.mbarrier::complete_tx::bytes{_vector(count)}.b32 [far + {byte}],"
            f" {_listed(names)}, [bar];"
        )
        words = [self.asm("mov.b32 $0, $1;", "r", value)[0] for value in values]
        self.asm(text, "", at, rank, barrier, *words, *([] if flag is None else [flag]), effects=True)

    # ---- tensor cores and exchanges within a warp ----

    def ldmatrix(self, at: I32, byte: int = 0, transposed: bool = False) -> list[I32]:
        """Four 8 × 8 matrices of 16-bit elements: lane 8 i + r has the address of row r of matrix i, lane 4 g + q gets
        elements 2 q and 2 q + 1 of row g of each (`transposed`: of column g)."""
        kind = "x4.trans" if transposed else "x4"
        text = f"ldmatrix.sync.aligned.m8n8.{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {byte}];"
        return self.asm(text, "rrrr", at, effects=True)

    def movmatrix(self, word: I32) -> I32:
        """Halves (2 q, 2 q + 1) of row g of an 8 × 8 matrix -> the same of its transpose."""
        return self.asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", word, effects=True)[0]

    def mma(self, sums: Sequence[F32], a: Sequence[I32], b: Sequence[I32]) -> list[F32]:
        """sums [16, 8] + a [16, 16] · b [16, 8] with operands in bf16 and sums in fp32."""
        return self.asm(MMA, "ffff", *a, *b, *sums)


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
