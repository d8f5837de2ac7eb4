"""The launch of a kernel whose instructions are written for one thread (`lanes`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from qerl_kernels import lanes

Place = tuple[ir.Value, ir.Value, ir.Value]
Emit = Callable[[Place, list[ir.Value], dict[str, ir.Value]], None]


def launch(
    emit: Emit,
    inputs: Sequence[jax.Array],
    out: Any,
    *,
    name: str,
    clusters: int,
    blocks: int,
    warps: int,
    shared_bytes: Mapping[str, int],
) -> Any:
    """Runs a kernel.

    Args:
      emit: of (the cluster, the block in it, the thread in that), pointers to the inputs and the outputs, and the
        addresses of the arrays in shared memory: emits the instructions.
      inputs: of the kernel.
      out: shapes and dtypes of the outputs.
      name: of the kernel.
      clusters: of the grid.
      blocks: of a cluster.
      warps: of a block, a multiple of 4.
      shared_bytes: of each array in a block's shared memory, multiples of 4.

    Returns:
      The outputs, in the structure of `out`.
    """
    scratch = {key: plgpu.SMEM((size // 4,), jnp.uint32) for key, size in shared_bytes.items()}

    def body(*refs, **scratch):
        operands = (*refs, *scratch.values())

        def program(ctx, *operands):
            del ctx
            pointers = [mgpu.utils.memref_ptr(ref) for ref in operands[: len(refs)]]
            shared = {key: lanes.shared_base(ref) for key, ref in zip(scratch, operands[len(refs) :], strict=True)}
            emit((*lanes.place_in_grid(blocks), mgpu.utils.thread_idx()), pointers, shared)

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(operands))(program)(*operands)

    call = plgpu.kernel(
        body,
        out_type=out,
        grid=(clusters,),
        grid_names=("cluster",),
        **({"cluster": (blocks,), "cluster_names": ("block",)} if blocks > 1 else {}),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return call(*inputs)
