"""The launch of a kernel whose instructions are written for one thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.gpu import Gpu
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32, Ptr


class Position(NamedTuple):
    """A thread's place in the grid: its cluster, the CTA's rank in that, the thread's index in the CTA."""

    cluster: I32
    rank: I32
    thread: I32


Emit = Callable[[PtxMachine, Position, list[Ptr], dict[str, I32]], None]


def launch(
    emit: Emit,
    inputs: Sequence[jax.Array],
    out: Any,
    *,
    name: str,
    clusters: int,
    ctas: int,
    warps: int,
    shared_bytes: Mapping[str, int],
    gpu: Gpu,
) -> Any:
    """Runs a kernel.

    Args:
      emit: `emit(machine, position, pointers, shared)` emits the instructions of one thread; pointers to the inputs and
        then the outputs, and the address of each array in shared memory.
      inputs: the kernel's arrays.
      out: shapes and dtypes of the outputs.
      name: the kernel's name.
      clusters: clusters of the grid.
      ctas: CTAs of a cluster.
      warps: warps of a CTA, a multiple of 4.
      shared_bytes: bytes of each array in a CTA's shared memory, multiples of 4.
      gpu: the target.

    Returns:
      The outputs, in the structure of `out`.
    """
    # One array of shared memory, because jax 0.11 prints the whole kernel for each that is an operand (inference of
    # layouts, several ms each). The arrays within it lie as Mosaic lays out arrays of their own.
    names = sorted(shared_bytes)
    *starts, end = itertools.accumulate((-(-shared_bytes[key] // 1024) * 1024 for key in names), initial=0)

    def body(*refs):
        *refs, all_s = refs

        def program(ctx, *operands):
            del ctx
            machine = PtxMachine(gpu.arch)
            *pointers, all_s = operands
            pointers = [Ptr(mgpu.utils.memref_ptr(ref)) for ref in pointers]
            shared = {
                key: machine.shared_address(mgpu.utils.memref_slice(all_s, mgpu.ds(start // 4, shared_bytes[key] // 4)))
                for key, start in zip(names, starts, strict=True)
            }
            emit(machine, Position(*machine.cluster_and_rank(ctas), machine.thread_index()), pointers, shared)

        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(refs) + 1))(program)(*refs, all_s)

    call = plgpu.kernel(
        body,
        out_type=out,
        grid=(clusters,),
        grid_names=("cluster",),
        **({"cluster": (ctas,), "cluster_names": ("cta",)} if ctas > 1 else {}),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((end // 4,), jnp.uint32)],
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return call(*inputs)
