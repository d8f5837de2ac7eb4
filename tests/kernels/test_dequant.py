"""The inner loop's own PTX, run for the 128 threads of a warpgroup on numpy: what a thread holds afterwards is the
element of the weight that `wgmma` (PTX manual, fragments of A) expects there, exactly, forward and transposed."""

import re
import types

import jax
import numpy as np
import pytest
from numpy_machine import NumpyMachine
from qerl_kernels.nvfp4_matmul import cases, dequant, packing
from qerl_kernels.nvfp4_matmul.gemm import transposed

U32 = np.uint32
THREAD = np.arange(128, dtype=U32)
WARP, GROUP, QUAD = THREAD // 32, THREAD % 32 // 4, THREAD % 4
SCALES_AT, WORDS_AT, OUT_AT = 0, 4096, 8192


class Machine:
    """Shared memory and the few instructions that the lane functions use; a register is an array of 128 words."""

    def __init__(self):
        self.shared = np.zeros(1 << 16, np.uint8)
        self.wavefronts = 0  # ldmatrix wavefronts, by the banks of its rows

    def run(self, results: int, operands: list, text: str, **options) -> list:
        registers = {f"${results + i}": np.asarray(value, U32) for i, value in enumerate(operands)}
        for statement in re.findall(r"[a-z][\w.:]+ [^;]*(?=;)", text.replace(".reg", "")):
            name, rest = statement.split(None, 1)
            if name not in ("b32", "b16", "pred"):
                self.step(registers, name, [part.strip() for part in re.split(r",\s*(?![^{]*\})", rest)])
        return [registers[f"${i}"] for i in range(results)]

    def step(self, registers: dict, name: str, parts: list[str]) -> None:
        def value(i):
            return registers[parts[i]] if parts[i] in registers else np.full(128, int(parts[i], 0), U32)

        def address(i):
            base, _, offset = parts[i].strip("[]").partition(" + ")
            return registers[base] + U32(int(offset or 0))

        def named(i):
            return [part.strip() for part in parts[i].strip("{}").split(",")]

        match name:
            case "and.b32":
                registers[parts[0]] = value(1) & value(2)
            case "or.b32":
                registers[parts[0]] = value(1) | value(2)
            case "xor.b32":
                registers[parts[0]] = value(1) ^ value(2)
            case "add.u32":
                registers[parts[0]] = value(1) + value(2)
            case "shl.b32":
                registers[parts[0]] = value(1) << value(2)
            case "shr.b32":
                registers[parts[0]] = value(1) >> value(2)
            case "bfe.u32":
                registers[parts[0]] = (value(1) >> value(2)) & ((U32(1) << value(3)) - U32(1))
            case "shf.r.wrap.b32":
                registers[parts[0]] = (value(1) >> value(3)) | (value(2) << (U32(32) - value(3)))
            case "lop3.b32":
                assert parts[4] == "0xEA"
                registers[parts[0]] = (value(1) & value(2)) | value(3)
            case "setp.ne.u32":
                registers[parts[0]] = value(1) != value(2)
            case "selp.b32":
                registers[parts[0]] = np.where(registers[parts[3]], value(1), value(2))
            case "prmt.b32":
                source = np.stack([v >> U32(8 * i) & U32(255) for v in (value(1), value(2)) for i in range(4)])
                picked = [source[value(3) >> U32(4 * i) & U32(7), THREAD] << U32(8 * i) for i in range(4)]
                registers[parts[0]] = picked[0] | picked[1] | picked[2] | picked[3]
            case "mov.b32" if parts[0].startswith("{"):
                low, high = named(0)
                registers[low], registers[high] = value(1) & U32(0xFFFF), value(1) >> U32(16)
            case "mov.b32":
                low, high = named(1)
                registers[parts[0]] = registers[low] | registers[high] << U32(16)
            case "mul.rn.bf16x2":
                product = [as_float(value(1), half) * as_float(value(2), half) for half in range(2)]
                bits = [p.astype(np.float32).view(U32) for p in product]
                assert not any((b & U32(0xFFFF)).any() for b in bits)  # exact
                registers[parts[0]] = bits[0] >> U32(16) | bits[1]
            case "ld.shared.b32":
                registers[parts[0]] = np.array([self.shared[at : at + 4].view(U32)[0] for at in address(1)])
            case "st.shared.b32":
                for at, word in zip(address(0), value(1), strict=True):
                    self.shared[at : at + 4] = np.array([word], U32).view(np.uint8)
            case "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16":
                rows = address(1).reshape(4, 4, 8)  # warp, matrix, row
                matrices = np.stack([self.shared[at : at + 16].view(np.uint16) for at in rows.flat])
                matrices = matrices.reshape(4, 4, 8, 8).astype(U32)
                for i, target in enumerate(named(0)):
                    low, high = (matrices[WARP, i, 2 * QUAD + e, GROUP] for e in range(2))
                    registers[target] = low | high << U32(16)
                banks = (rows // 16 % 8).reshape(16, 8)
                self.wavefronts += sum(int(np.bincount(row).max()) for row in banks)
            case _:
                raise NotImplementedError(name)


def as_float(register, half: int) -> np.ndarray:
    """One bf16 of a register in fp64; a bf16 subnormal stays what it is."""
    return (register >> U32(16 * half) << U32(16)).view(np.float32).astype(np.float64)


def operand(steps: list) -> np.ndarray:
    """A [64, 64] from the registers of its four k-steps: row 16 w + 8 h + g, column 16 s + 8 c + 2 q + e."""
    out = np.zeros((64, 64))
    for s, registers in enumerate(steps):
        for j, register in enumerate(registers):
            for e in range(2):
                out[16 * WARP + 8 * (j % 2) + GROUP, 16 * s + 8 * (j // 2) + 2 * QUAD + e] = as_float(register, e)
    return out


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    array = lambda registers, *_: types.SimpleNamespace(registers=registers, is_signed=None)  # noqa: E731
    monkeypatch.setattr(transposed, "asm", machine.run)
    monkeypatch.setattr(transposed, "as_fragments", operand)
    monkeypatch.setattr(transposed, "element", lambda vector, i: vector[i])
    monkeypatch.setattr(transposed, "_as_words", lambda found, *_: array(objects([[word] for word in found])))
    utils = types.SimpleNamespace(
        memref_ptr=lambda at: at, thread_idx=lambda: THREAD, bitcast=lambda register, _: register
    )
    monkeypatch.setattr(transposed, "mgpu", types.SimpleNamespace(utils=utils))
    run = lambda _, operands, text, *__, **___: machine.run(0, operands, text)  # noqa: E731
    llvm = types.SimpleNamespace(ptrtoint=lambda _, at: np.full(128, at, U32), inline_asm=run)
    monkeypatch.setattr(transposed, "llvm", llvm)
    types_ = types.SimpleNamespace(
        IntegerType=types.SimpleNamespace(get_signless=lambda bits: bits),
        Type=types.SimpleNamespace(parse=lambda text: text),
    )
    monkeypatch.setattr(transposed, "ir", types_)
    return machine


def objects(values: list) -> np.ndarray:
    """An object array of one axis: numpy would make one of numbers."""
    out = np.empty(len(values), object)
    out[:] = values
    return out


@pytest.fixture(scope="module")
def weight():
    packed = packing.pack(cases.random_weight(jax.random.key(3), 128, 192))
    return packed, np.asarray(packing.packed_parts(packed)[0], np.float64)


def swizzle(at):
    """Where the 128-byte swizzle puts byte `at`."""
    return at ^ ((at >> 7 & 7) << 4)


@pytest.mark.parametrize("tile, unit", [(0, 0), (1, 2)])
def test_forward_operand(weight, tile, unit):
    packed, matrix = weight
    words = np.asarray(packed.words)[tile, unit].reshape(128, 4)
    scales = np.asarray(packed.scales)[tile, unit]
    of_thread = [scales[16 * WARP + 2 * GROUP + pair] for pair in range(2)]
    steps = dequant.operands(NumpyMachine(128), list(words.T), of_thread)
    out = operand([[np.asarray(register, U32) for register in step] for step in steps])
    np.testing.assert_array_equal(out, matrix[64 * tile :, 64 * unit :][:64, :64])


@pytest.mark.parametrize("tile, unit", [(0, 0), (1, 2)])
def test_transposed_operand(machine, weight, tile, unit):
    """Row 16 w + 8 c + 2 s + e is feature 16 s + 8 c + 2 w + e, as `load_transposed` says; no bank is asked twice."""
    packed, matrix = weight
    raw = np.asarray(packed.words)[tile, unit].reshape(-1).view(np.uint8)
    machine.shared[WORDS_AT + swizzle(np.arange(2048))] = raw
    machine.shared[SCALES_AT : SCALES_AT + 256] = np.asarray(packed.scales)[tile, unit].view(np.uint8)
    out = transposed._dequantize_lane_transposed(None, *transposed._load_lane_transposed(None, WORDS_AT, SCALES_AT))
    expected = matrix[64 * tile :, 64 * unit :][:64, :64].T
    np.testing.assert_array_equal(out, expected[feature_of_row()])
    assert machine.wavefronts == 16


def feature_of_row() -> np.ndarray:
    row = np.arange(64)
    return 16 * (row >> 1 & 3) + (row & 8) + 2 * (row >> 4) + (row & 1)


def test_transposed_store(machine):
    """Registers (n8 tile, c) of `WGMMA_TRANSPOSED`: lane 8 f + 4 a + b: rows 16 w + 8 c + 2 f, + 1, token 2 b + a."""
    y = np.random.default_rng(0).integers(0, 1 << 16, (64, 32)).astype(U32)
    lane = THREAD % 32
    held = []
    for octet in range(4):
        for c in range(2):
            row, token = 16 * WARP + 8 * c + 2 * (lane >> 3), 8 * octet + 2 * (lane & 3) + (lane >> 2 & 1)
            held.append(y[row, token] | y[row + 1, token] << U32(16))
    transposed._store_lane_transposed(None, OUT_AT, types.SimpleNamespace(registers=objects(held)))
    stored = machine.shared[OUT_AT + swizzle(np.arange(32 * 128))].view(np.uint16).reshape(32, 64)
    np.testing.assert_array_equal(stored[:, feature_of_row()], y.T)
