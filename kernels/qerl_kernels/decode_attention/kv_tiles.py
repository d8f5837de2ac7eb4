"""KV tiles in shared memory and their way into the A operands of an `mma`.

TMA writes a tile as blocks of 8 tokens × 128 bytes, in which the 16-byte chunk j of token t lies at j ^ t. Where a
token has 64 bytes, the blocks are 8 tokens × 64 bytes with the chunk at j ^ (t / 2).

In scores A = K, in the output A = Vᵀ. `ldmatrix` brings A from shared memory, transposed for the values.

Caches in e4m3 are multiplied in f16, which holds every e4m3 number and to which one instruction converts two of them.
`ldmatrix` moves pairs of bytes, so that a thread's register holds four numbers in place of two. Both matmuls therefore
take the head dim in another order:

- Of K the four are neighbours of one key, 4 c to 4 c + 3 of every 16. The first two stand in A's columns 2 c and
  2 c + 1, the others in those plus 8. The queries lie likewise (`layouts.B_OPERAND_FP8`), and a sum may take any order.
- Of V, transposed, they are dims 2 g and 2 g + 1 of tokens 2 c and 2 c + 1. The even dim stands in row g of A and hence
  of C, the odd one in row g + 8: `warp_mma.store_output` writes the rows where they belong.
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


def smem_transforms(width: int, dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Tiling and swizzle of a tile in shared memory whose rows have `width` elements, as TMA writes it."""
    itemsize = jnp.dtype(dtype).itemsize
    row = _row_bytes(width, itemsize)
    return plgpu.TilingTransform((8, row // itemsize)), plgpu.SwizzleTransform(row)


def lane_and_warp(machine: PtxMachine) -> tuple[I32, I32]:
    """This thread's lane, and its warp in the warpgroup."""
    thread = machine.thread_index()
    return thread & 31, (thread >> 5) & 3


def load_keys(machine: PtxMachine, tile: ir.Value, width: int, fp8: bool) -> list[Operand]:
    """A = K of this warp's 16 tokens, for every 16 numbers of the head dim."""
    registers = _ldmatrix(machine, tile, width, transposed=False, fp8=fp8)
    return [a for four in registers for a in _keys_from_fp8(machine, four)] if fp8 else registers


def load_values(machine: PtxMachine, tile: ir.Value, width: int, fp8: bool, tokens: I32) -> list[Operand]:
    """A = Vᵀ of this warp's 16 tokens, for every 16 numbers of the head dim; zeros past the first `tokens` of the tile.

    What lies past them may be anything, NaN included.
    """
    lane, warp = lane_and_warp(machine)
    first = warp * 16 + (lane & 3) * 2
    masks = [_mask(machine, tokens - (first + more)) for more in (0, 8)]
    registers = _ldmatrix(machine, tile, width, transposed=True, fp8=fp8)
    of_tokens = (0, 1, 0, 1) if fp8 else (0, 0, 1, 1)  # which mask; a register's halves are two tokens either way
    registers = [[word & masks[i] for i, word in zip(of_tokens, four, strict=True)] for four in registers]
    return [a for four in registers for a in _values_from_fp8(machine, four)] if fp8 else registers


def _row_bytes(width: int, itemsize: int) -> int:
    return min(128, width * itemsize)


def _ldmatrix(machine: PtxMachine, tile: ir.Value, width: int, transposed: bool, fp8: bool) -> list[Operand]:
    """This warp's 16 tokens against every 32 bytes of the head dim: four registers each.

    Lane 8 j + r gives the address of row r of the j-th matrix of 8 tokens × 16 bytes. In bf16 they are A: with A = K,
    j = 1 is the next eight tokens and j = 2 the next 16 bytes; with A = Vᵀ the two change places. In e4m3 they are two
    A before they are converted, the tokens of each side by side.
    """
    itemsize = 1 if fp8 else 2
    row = _row_bytes(width, itemsize)
    lane, warp = lane_and_warp(machine)
    r, j = lane & 7, lane >> 3
    low, high = j & 1, j >> 1
    next_tokens, next_bytes = (high, low) if transposed and not fp8 else (low, high)
    block = warp * 2 + next_tokens
    swizzle = r if row == 128 else r >> 1
    start = machine.shared_address(tile) + r * row
    start = start + block * (8 * width * itemsize)
    start = start + (swizzle ^ next_bytes) * 16
    starts = [start ^ 32 * i for i in range(row // 32)]
    return [
        machine.ldmatrix(starts[i % len(starts)], i // len(starts) * 1024, transposed)
        for i in range(width * itemsize // 32)
    ]


def _to_f16(machine: PtxMachine, four: I32) -> list[I32]:
    """Four e4m3 numbers as two pairs of f16; exact."""
    text = """
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    """
    return machine.asm(text, "rr", four)


def _keys_from_fp8(machine: PtxMachine, four: list[I32]) -> list[Operand]:
    """Two A = K in f16 from e4m3 keys as `_ldmatrix` brings them."""
    found = []
    for some_keys, next_keys in (four[:2], four[2:]):
        (low, high), (next_low, next_high) = _to_f16(machine, some_keys), _to_f16(machine, next_keys)
        found.append([low, next_low, high, next_high])
    return found


def _values_from_fp8(machine: PtxMachine, four: list[I32]) -> list[Operand]:
    """Two A = Vᵀ in f16 likewise: bytes 0 and 2 of a register are one dim of two tokens, bytes 1 and 3 the next."""
    apart = [machine.asm("prmt.b32 $0, $1, 0, 0x3120;", "r", word)[0] for word in four]
    return [[*_to_f16(machine, some), *_to_f16(machine, others)] for some, others in (apart[:2], apart[2:])]


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
