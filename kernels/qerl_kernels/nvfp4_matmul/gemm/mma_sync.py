"""The `mma.sync` mainloop's instructions: for a small tile_m, where `wgmma` would take as long as for 32 rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from qerl_kernels.nvfp4_matmul.dequant import element
from qerl_kernels.nvfp4_matmul.gemm.smem import swizzled
from qerl_kernels.nvfp4_matmul.packing import TILE


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
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    sums = total.registers.reshape(-1, 2).copy()  # (n8 tile, row half)
    fragments = a.registers.reshape(8, 2)  # (column half of each step, row half)
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(x_s))
    lane = mgpu.utils.thread_idx()
    start = llvm.inline_asm(
        i32,
        [base, lane],
        """{
        .reg .b32 r, c, t;
        and.b32 r, $2, 7;
        bfe.u32 c, $2, 3, 2;
        xor.b32 c, c, r;
        shl.b32 t, r, 7;
        shl.b32 c, c, 4;
        add.u32 t, t, c;
        add.u32 $0, t, $1;
        }""",
        "=r,r,r",
    )
    other = llvm.inline_asm(i32, [start], "xor.b32 $0, $1, 64;", "=r,r")
    quad = llvm.StructType.get_literal([i32] * 4)
    for n8_tile in range(sums.shape[0]):
        offset = (n8_tile * k_tiles + k_tile) * 1024
        for half, address in enumerate((start, other)):
            loaded = llvm.inline_asm(
                quad,
                [address],
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];",
                "=r,=r,=r,=r,r",
                has_side_effects=True,
            )
            b = [llvm.extractvalue(i32, loaded, [j]) for j in range(4)]
            for step in (2 * half, 2 * half + 1):
                low, high = sums[n8_tile]
                regs = [
                    fragments[2 * step, 0],
                    fragments[2 * step, 1],
                    fragments[2 * step + 1, 0],
                    fragments[2 * step + 1, 1],
                ]
                sum_ = [element(low, 0), element(low, 1), element(high, 0), element(high, 1)]
                out = llvm.inline_asm(
                    llvm.StructType.get_literal([f32] * 4),
                    [*(mgpu.utils.bitcast(reg, i32) for reg in regs), *b[2 * (step % 2) :][:2], *sum_],
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                    "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                )
                new = [llvm.extractvalue(f32, out, [j]) for j in range(4)]
                pair = ir.VectorType.get((2,), f32)
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
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "fence.proxy.async.shared::cta;", "", has_side_effects=True)

    plgpu.inline_mgpu()(fence)()
