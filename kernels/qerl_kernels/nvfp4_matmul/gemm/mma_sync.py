"""The `mma.sync` mainloop's instructions: for a small tile_m, where `wgmma` would take as long as for 32 rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import F32, as_word, element

# $0: address of this lane's row of the first `ldmatrix`. $1: the k-tile of x. $2: the thread.
_B_ADDRESS = """.reg .b32 r, c, t;
and.b32 r, $2, 7;
bfe.u32 c, $2, 3, 2;
xor.b32 c, c, r;
shl.b32 t, r, 7;
shl.b32 c, c, 4;
add.u32 t, t, c;
add.u32 $0, t, $1;"""


def mma_k_tile(total: jax.Array, a: jax.Array, x_s: jax.Ref, k_tile: int, k_tiles: int) -> jax.Array:
    """total [64, tile_m] + a [64, 64] · xᵀ for one k-tile of x_s [tile_m, k_tiles · 64], by `mma.sync.m16n8k16`."""
    tile_m = total.shape[1]
    lane = functools.partial(_mma_lane, k_tile=k_tile, k_tiles=k_tiles)
    return plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(swizzled(TILE, 2))),
        return_type=plgpu.ShapeDtypeStruct((TILE, tile_m), jnp.float32, layout=plgpu.Layout.WGMMA),
    )(lane)(total, a, x_s)


def _mma_lane(ctx, total, a, x_s, *, k_tile, k_tiles):
    """Accumulators and A lie as for `wgmma`; B comes by `ldmatrix`: 8 rows of x × 32 input features at a time.

    x_s is stored in 8 × 64 tiles of 1 KiB whose 16-byte chunks are swizzled: chunk c of row r lies at c ^ r.
    """
    del ctx
    machine = PtxMachine()
    sums = total.registers.reshape(-1, 2).copy()  # (n8 tile, row half)
    fragments = a.registers.reshape(8, 2)  # (column half of each k16 step, row half)
    [start] = machine.asm(_B_ADDRESS, "r", machine.shared_address(x_s), machine.thread_index())
    [other] = machine.asm("xor.b32 $0, $1, 64;", "r", start)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for n8_tile in range(sums.shape[0]):
        for half, address in enumerate((start, other)):
            b = machine.ldmatrix(address, byte=(n8_tile * k_tiles + k_tile) * 1024)
            for k16_step in (2 * half, 2 * half + 1):
                regs = [as_word(register) for register in fragments[2 * k16_step : 2 * k16_step + 2].flat]
                accumulator = [F32(element(vec, i)) for vec in sums[n8_tile] for i in range(2)]
                new = [each.value for each in machine.mma(accumulator, regs, b[2 * (k16_step % 2) :][:2])]
                sums[n8_tile] = [vector.from_elements(pair, new[:2]), vector.from_elements(pair, new[2:])]
    return mgpu.FragmentedArray(
        _registers=sums.reshape(total.registers.shape), _layout=total.layout, _is_signed=total.is_signed
    )


def order_reads() -> None:
    """Orders this thread's reads of shared memory before what the copy engine writes there next.

    An arrival alone does not wait for an `ldmatrix` under way: the stage could be filled anew beneath it. `wgmma` needs
    no fence, because its own wait comes after all reads.
    """

    def fence(ctx):
        del ctx
        PtxMachine().fence_proxy_async()

    plgpu.inline_mgpu()(fence)()
