"""The inner loop's own PTX, run for the 128 threads of a warpgroup on numpy: what a thread holds afterwards is the
element of the weight that `wgmma` (PTX manual, fragments of A) expects there, exactly, forward and transposed."""

import jax
import numpy as np
import pytest
from numpy_machine import NumpyMachine
from ptx_interpreter import bf16_of
from qerl_kernels.nvfp4_matmul import cases, dequant, packing
from qerl_kernels.nvfp4_matmul.gemm import transposed

U32 = np.uint32
THREAD = np.arange(128, dtype=U32)
WARP, GROUP, QUAD = THREAD // 32, THREAD % 32 // 4, THREAD % 4
SCALES_AT, WORDS_AT, OUT_AT = 0, 4096, 8192


def operand(steps: list) -> np.ndarray:
    """A [64, 64] from the registers of its four k16 steps: row 16 w + 8 h + g, column 16 s + 8 c + 2 q + e."""
    out = np.zeros((64, 64))
    for s, registers in enumerate(steps):
        for j, register in enumerate(registers):
            row, column = 16 * WARP + 8 * (j % 2) + GROUP, 16 * s + 8 * (j // 2) + 2 * QUAD
            for e in range(2):
                out[row, column + e] = bf16_of(register.astype(U32), e)
    return out


@pytest.fixture
def machine():
    return NumpyMachine(128, shared_bytes=1 << 16)


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
    steps = dequant.weight_fragments(NumpyMachine(128), list(words.T), of_thread)
    np.testing.assert_array_equal(operand(steps), matrix[64 * tile :, 64 * unit :][:64, :64])


@pytest.mark.parametrize("tile, unit", [(0, 0), (1, 2)])
def test_transposed_operand(machine, weight, tile, unit):
    """Row 16 w + 8 c + 2 s + e is feature 16 s + 8 c + 2 w + e, as `load_transposed` says; the machine refuses an
    `ldmatrix` that asks a bank twice."""
    packed, matrix = weight
    raw = np.asarray(packed.words)[tile, unit].reshape(-1).view(np.uint8)
    machine.shared[WORDS_AT + swizzle(np.arange(2048))] = raw
    machine.shared[SCALES_AT : SCALES_AT + 256] = np.asarray(packed.scales)[tile, unit].view(np.uint8)
    held = transposed.emit_load(machine, np.int64(WORDS_AT), np.int64(SCALES_AT), THREAD)
    steps = transposed.emit_dequantize(machine, *held, THREAD)
    expected = matrix[64 * tile :, 64 * unit :][:64, :64].T
    np.testing.assert_array_equal(operand(steps), expected[feature_of_row()])


def feature_of_row() -> np.ndarray:
    row = np.arange(64)
    return 16 * (row >> 1 & 3) + (row & 8) + 2 * (row >> 4) + (row & 1)


def test_transposed_store(machine):
    """Registers (n8 tile, c) of `WGMMA_TRANSPOSED`: lane 8 f + 4 a + b: rows 16 w + 8 c + 2 f, + 1, token 2 b + a."""
    y = np.random.default_rng(0).integers(0, 1 << 16, (64, 32)).astype(U32)
    lane = THREAD % 32
    held = []
    for n8_tile in range(4):
        for c in range(2):
            row, token = 16 * WARP + 8 * c + 2 * (lane >> 3), 8 * n8_tile + 2 * (lane & 3) + (lane >> 2 & 1)
            held.append(y[row, token] | y[row + 1, token] << U32(16))
    transposed.emit_store(machine, np.int64(OUT_AT), THREAD, held)
    stored = machine.shared[OUT_AT + swizzle(np.arange(32 * 128))].view(np.uint16).reshape(32, 64)
    np.testing.assert_array_equal(stored[:, feature_of_row()], y.T)
