"""Register layouts of decode attention: how the values of an `mma.m16n8k16` lie in the threads of a warp.

With lane = 4 g + c, a thread holds of C rows g and g + 8, columns 2 c and 2 c + 1; of A the same rows, columns 2 c,
2 c + 1 and those plus 8; of B column g, rows 2 c, 2 c + 1 and those plus 8. Source: PTX ISA, "Matrix fragments for
mma.m16n8k16".
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels.ptx.arrays import f32_pair, fragmented_array
from qerl_kernels.ptx.values import F32, I32, as_word

# [warps, rows, queries] as the accumulators C lie: each warp has its own.
ACCUMULATOR = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 16, 8), (8, 8), (2,))), warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1
)
# [queries, head dim] as B lies, the same in all warps.
B_OPERAND = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 8), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -2), vector_dim=-1
)
# [head dim, queries] spread over the threads of the warpgroup, two queries each.
MERGED = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
PER_QUERY = MERGED.reduce(0)


def accumulator(tiles: Sequence[Sequence[F32]], shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    """Accumulators of 16 rows each, four registers, as an array in `ACCUMULATOR`."""
    pairs = [half for a, b, c, d in tiles for half in ((a, b), (c, d))]
    return fragmented_array([f32_pair(*pair) for pair in pairs], shape, ACCUMULATOR)


def words(registers: Sequence[ir.Value]) -> list[I32]:
    """Vectors of two 16-bit numbers as 32-bit words."""
    return [as_word(register) for register in registers]
