"""The inner loop's own PTX, run for the 128 threads of a warpgroup on numpy: what a thread holds afterwards is the
element of the weight that `wgmma` (PTX manual, fragments of A) expects there, exactly, forward and transposed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_machine import NumpyLaunch, NumpyMachine
from ptx_interpreter import bf16_of
from qerl_kernels.gpu import gpu_of
from qerl_kernels.nvfp4_matmul import cases, dequant, packing
from qerl_kernels.nvfp4_matmul.dequantize import kernel
from qerl_kernels.nvfp4_matmul.gemm import transposed

U32, BF16 = np.uint32, jnp.bfloat16
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


@pytest.fixture(scope="module")
def weight():
    packed = packing.pack(cases.random_weight(jax.random.key(3), 128, 192))
    return packed, np.asarray(packing.packed_parts(packed)[0], np.float64)


def swizzle(at):
    """Where the 128-byte swizzle puts byte `at`."""
    return at ^ ((at >> 7 & 7) << 4)


# ---- the instructions of a warpgroup, for a tile; `test_interpreted.py` runs whole kernels with them ----


def dequantize(words_of_tile: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`dequant.weight_fragments` of a tile in the registers of a warpgroup."""
    pairs = [scales[16 * WARP + 2 * GROUP + pair].astype(np.int64) for pair in range(2)]
    registers = list(words_of_tile.reshape(128, 4).T.astype(np.int64))
    return operand(dequant.weight_fragments(NumpyMachine(128), registers, pairs)).astype(BF16)


def load_transposed(words_of_tile: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`transposed.emit_load` from shared memory in which the words are swizzled; the machine refuses an `ldmatrix` that
    asks a bank twice."""
    machine = NumpyMachine(128, shared_bytes=1 << 14)
    machine.shared[WORDS_AT + swizzle(np.arange(2048))] = words_of_tile.reshape(-1).view(np.uint8)
    machine.shared[SCALES_AT : SCALES_AT + 256] = scales.view(np.uint8)
    held = transposed.emit_load(machine, np.int64(WORDS_AT), np.int64(SCALES_AT), THREAD)
    return tuple(np.stack(registers).astype(np.uint32) for registers in held)


def dequantize_transposed(words_of_thread: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`transposed.emit_dequantize`."""
    registers = [list(each.astype(np.int64)) for each in (words_of_thread, scales)]
    return operand(transposed.emit_dequantize(NumpyMachine(128), *registers, THREAD)).astype(BF16)


def store_transposed(y: np.ndarray) -> np.ndarray:
    """`transposed.emit_store` of y [64, tile_m] in `WGMMA_TRANSPOSED`; the tile [tile_m, 64] in shared memory.

    Registers (n8 tile, c): lane 8 f + 4 a + b: rows 16 w + 8 c + 2 f, + 1, token 2 b + a.
    """
    bits, rows = y.view(np.uint16).astype(np.uint32), y.shape[1]
    lane, held = THREAD % 32, []
    for n8_tile in range(rows // 8):
        for c in range(2):
            row, token = 16 * WARP + 8 * c + 2 * (lane >> 3), 8 * n8_tile + 2 * (lane & 3) + (lane >> 2 & 1)
            held.append(bits[row, token] | bits[row + 1, token] << np.uint32(16))
    machine = NumpyMachine(128, shared_bytes=OUT_AT + 128 * rows)
    transposed.emit_store(machine, np.int64(OUT_AT), THREAD, held)
    return machine.shared[OUT_AT + swizzle(np.arange(128 * rows))].view(BF16).reshape(rows, 64)


# ---- tests ----


def held_by(layout, array: np.ndarray) -> np.ndarray:
    """[128 threads, registers, values] of an array in one of Mosaic's tiled layouts, by its definition: each tile
    splits the last dimensions of what the one before left, tiles in front of what is in a tile."""
    for tile in layout.tiling.tiles:
        kept = array.ndim - len(tile)
        split = [(size // length, length) for size, length in zip(array.shape[kept:], tile, strict=True)]
        array = array.reshape(*array.shape[:kept], *(size for pair in split for size in pair))
        outer = range(kept, array.ndim, 2)
        array = array.transpose(*range(kept), *outer, *(axis + 1 for axis in outer))
    warps, lanes = ([axis for axis in axes if isinstance(axis, int)] for axes in (layout.warp_dims, layout.lane_dims))
    threads = [axis + array.ndim for axis in warps + lanes]
    rest = [axis for axis in range(array.ndim - 1) if axis not in threads]
    width = array.shape[-1]
    array = array.transpose(*threads, *rest, array.ndim - 1).reshape(-1, np.prod([array.shape[i] for i in rest]), width)
    return np.repeat(array, 128 // len(array), axis=0)


@pytest.mark.parametrize("unit", [0, 2])
def test_tcgen05_operand(weight, unit):
    """Each register that a thread makes of its words and scales is the one of `Layout.TCGEN05`."""
    pytest.importorskip("jax", "0.11")
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from qerl_kernels.nvfp4_matmul.tcgen05 import kernel

    packed, matrix = weight
    parts = (kernel.WORDS, packed.words), (kernel.SCALES, packed.scales)
    held = [held_by(layout.to_mgpu(), np.asarray(part)[:2, unit].astype(np.int64)) for layout, part in parts]
    words, scales = ([list(register.T) for register in each.swapaxes(0, 1)] for each in held)
    registers = kernel.emit_dequantize(NumpyMachine(128), words, scales).reshape(-1)
    found = np.stack([[bf16_of(register.astype(U32), e) for e in range(2)] for register in registers])
    expected = held_by(plgpu.Layout.TCGEN05.to_mgpu(), matrix[:, 64 * unit :][:, :64])
    np.testing.assert_array_equal(found.transpose(2, 0, 1), expected)


@pytest.mark.parametrize("tile, unit", [(0, 0), (1, 2)])
def test_forward_operand(weight, tile, unit):
    packed, matrix = weight
    held = dequantize(np.asarray(packed.words)[tile, unit], np.asarray(packed.scales)[tile, unit])
    np.testing.assert_array_equal(held.astype(np.float64), matrix[64 * tile :, 64 * unit :][:64, :64])


@pytest.mark.parametrize("tile, unit", [(0, 0), (1, 2)])
def test_transposed_operand(weight, tile, unit):
    """Row 16 w + 8 c + 2 s + e is feature 16 s + 8 c + 2 w + e, as `load_transposed` says."""
    packed, matrix = weight
    held = load_transposed(np.asarray(packed.words)[tile, unit], np.asarray(packed.scales)[tile, unit])
    expected = matrix[64 * tile :, 64 * unit :][:64, :64].T
    np.testing.assert_array_equal(dequantize_transposed(*held).astype(np.float64), expected[feature_of_row()])


def feature_of_row() -> np.ndarray:
    row = np.arange(64)
    return 16 * (row >> 1 & 3) + (row & 8) + 2 * (row >> 4) + (row & 1)


def test_transposed_store():
    y = np.random.default_rng(0).normal(size=(64, 32)).astype(BF16)
    np.testing.assert_array_equal(store_transposed(y)[:, feature_of_row()], y.T)


@pytest.mark.parametrize(("n", "k"), [(128, 320), (80, 336)])
@pytest.mark.parametrize("arch", [80, 90])
def test_a_whole_weight(n, k, arch):
    """Bit for bit, with tiles that reach past the weight; each byte is written once."""
    packed = packing.pack(cases.random_weight(jax.random.key(n), n, k))
    found = kernel.run(NumpyLaunch(), packed, gpu_of("", arch, 1))
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint16), np.asarray(packing.packed_parts(packed)[0]).view(np.uint16)
    )
