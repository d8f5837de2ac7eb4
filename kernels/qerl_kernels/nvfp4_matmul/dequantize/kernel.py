"""Dequantizes a packed weight to bf16 in global memory, for GEMMs by XLA's library: on any GPU from sm_80 on.

Each warp of a CTA has 16 of a tile's 64 output features and `K_TILES` tiles side by side, all of whose words it asks
for at once. Registers of A (`dequant`) hold two neighbouring weights each; through 2 KiB of shared memory of its own a
warp turns them to rows of 128 bytes, which it stores whole. No warp waits for another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16

from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import Gpu
from qerl_kernels.nvfp4_matmul.dequant import weight_fragments
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.launch import Position, launch
from qerl_kernels.ptx.values import I32, Ptr

WARPS = 4  # of a CTA; 16 output features each
K_TILES = 4  # tiles of a CTA
ROW_BYTES = 2 * TILE  # of a tile in bf16
WARP_BYTES = 16 * ROW_BYTES


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames="gpu")
def dequantize(weight: PackedNvfp4, *, gpu: Gpu) -> BFloat16[Array, "n k"]:
    """The exact matrix of `packing.packed_parts`: weight × 2^-13 without the multiplier of its row."""
    return run(launch, weight, gpu)


def run(launch: Callable, weight: PackedNvfp4, gpu: Gpu) -> BFloat16[Array, "n k"]:
    """`dequantize` with `ptx.launch.launch` or with that of another machine."""
    n_tiles, k_tiles = weight.words.shape[:2]
    return launch(
        functools.partial(_emit, shape=weight.shape, k_tiles=k_tiles),
        [weight.words, weight.scales],
        jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16),
        name="nvfp4_dequantize",
        clusters=n_tiles * -(-k_tiles // K_TILES),
        ctas=1,
        warps=WARPS,
        shared_bytes={"tiles_s": WARPS * WARP_BYTES},
        gpu=gpu,
    )


def _emit(
    machine: PtxMachine,
    position: Position,
    pointers: list[Ptr],
    shared: dict[str, I32],
    *,
    shape: tuple[int, int],
    k_tiles: int,
) -> None:
    """The instructions of one thread. `pointers`: words, scales, the matrix."""
    words, scales, out = pointers
    runs = -(-k_tiles // K_TILES)
    n_tile, first = position.cluster // runs, position.cluster % runs * K_TILES
    warp, lane = machine.warp_index(), position.thread % 32
    g, q = lane // 4, lane % 4
    loaded = []
    for i in range(K_TILES):
        tile, exists = n_tile * k_tiles + first + i, first + i < k_tiles
        of_words = machine.mad_wide(words, (tile, 64 * 32), (warp * 32 + lane, 16))
        of_scales = machine.mad_wide(scales, (tile, 64 * 4), (warp * 8 + g, 8))
        loaded.append((machine.load_global(of_words, 4, exists), machine.load_global(of_scales, 2, exists)))
    memory = shared["tiles_s"] + warp * WARP_BYTES
    row, chunk = lane // 8, lane % 8
    for i, (codes, of_codes) in enumerate(loaded):
        for k16_step, registers in enumerate(weight_fragments(machine, codes, of_codes)):
            for j, register in enumerate(registers):  # row 8 (j % 2) + g, chunk 2 k16_step + j / 2 of 16 bytes
                at = memory + ((g ^ (2 * k16_step + j // 2)) * 16 + (g * ROW_BYTES + q * 4))
                machine.store_shared_words(at, [register], byte=8 * ROW_BYTES * (j % 2))
        machine.warp_sync()
        for rows in range(0, 16, 4):
            swizzled = (chunk ^ ((row + rows) % 8)) * 16
            stored = machine.load_shared_words(memory + row * ROW_BYTES + swizzled, 4, byte=rows * ROW_BYTES)
            feature, column = n_tile * TILE + warp * 16 + (row + rows), (first + i) * TILE + chunk * 8
            exists = (feature < shape[0]) & (column < shape[1])
            machine.store_global(machine.mad_wide(out, (feature, 2 * shape[1]), (column, 2)), stored, exists)
        machine.warp_sync()
