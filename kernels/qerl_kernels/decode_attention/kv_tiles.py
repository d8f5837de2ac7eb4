"""KV tiles in shared memory and their way into the A operands of an `mma`.

TMA writes a tile as blocks of 8 tokens × 128 bytes, in which the 16-byte chunk j of token t lies at j ^ t.

In scores A = K, in the output A = Vᵀ. `ldmatrix` brings A from shared memory, transposed for the values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32

Operand = list[I32]  # four registers
ROW_BYTES = 128  # of a token in a block


def smem_transforms(width: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Tiling and swizzle of a tile in shared memory whose rows have `width` elements, as TMA writes it."""
    itemsize = jnp.dtype(dtype).itemsize
    row = min(ROW_BYTES, width * itemsize)
    return plgpu.TilingTransform((8, row // itemsize)), plgpu.SwizzleTransform(row)


def lane_and_warp(machine: PtxMachine) -> tuple[I32, I32]:
    """This thread's lane, and its warp in the warpgroup."""
    thread = machine.thread_index()
    return thread & 31, (thread >> 5) & 3


def load_keys(machine: PtxMachine, tile: ir.Value, width: int) -> list[Operand]:
    """A = K of this warp's 16 tokens, for every 16 numbers of the head dim."""
    return _ldmatrix(machine, tile, width, transposed=False)


def load_values(machine: PtxMachine, tile: ir.Value, width: int, tokens: I32) -> list[Operand]:
    """A = Vᵀ of this warp's 16 tokens, for every 16 numbers of the head dim; zeros past the first `tokens` of the tile.

    What lies past them may be anything, NaN included.
    """
    lane, warp = lane_and_warp(machine)
    first = warp * 16 + (lane & 3) * 2
    masks = [_mask(machine, tokens - (first + more)) for more in (0, 8)]
    registers = _ldmatrix(machine, tile, width, transposed=True)
    return [[word & masks[i // 2] for i, word in enumerate(four)] for four in registers]


def _ldmatrix(machine: PtxMachine, tile: ir.Value, width: int, transposed: bool) -> list[Operand]:
    """A of this warp's 16 tokens for every 16 numbers of the head dim.

    Lane 8 j + r gives the address of row r of the j-th matrix of 8 tokens × 16 bytes. With A = K, j = 1 is the next
    eight tokens and j = 2 the next 16 bytes; with A = Vᵀ the two change places.
    """
    lane, warp = lane_and_warp(machine)
    r, j = lane & 7, lane >> 3
    low, high = j & 1, j >> 1
    next_tokens, next_bytes = (high, low) if transposed else (low, high)
    block = warp * 2 + next_tokens
    start = machine.shared_address(tile) + r * ROW_BYTES
    start = start + block * (16 * width)
    start = start + (r ^ next_bytes) * 16
    starts = [start ^ 32 * i for i in range(ROW_BYTES // 32)]
    blocks = range(width * 2 // ROW_BYTES)
    return [machine.ldmatrix(at, block * 8 * ROW_BYTES, transposed) for block in blocks for at in starts]


def _mask(machine: PtxMachine, tokens: I32) -> I32:
    """Mask of a register's two halves, of which the first `tokens` (any integer) count."""
    text = """
    .reg .pred one, two;
    setp.gt.s32 one, $1, 0;
    setp.gt.s32 two, $1, 1;
    selp.b32 $0, 0x0000FFFF, 0, one;
    @two mov.b32 $0, 0xFFFFFFFF;
    """
    return machine.asm(text, "r", tokens)[0]
