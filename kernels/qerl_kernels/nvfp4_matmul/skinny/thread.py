"""Where a thread of the skinny GEMM stands."""

from __future__ import annotations

import dataclasses

from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.values import I32


@dataclasses.dataclass(frozen=True)
class Thread:
    """A thread's coordinates.

    Attributes:
      machine: emits the instructions.
      rank: rank of its CTA in the cluster.
      is_first: flag of rank 0, which adds up the cluster's sums.
      first_tile: first m16 tile of the cluster's output features.
      block: block of rows.
      rows: rows of the block: a number where all blocks have the same.
      index: index of the thread in its CTA.
      warp: index of its warp in the CTA.
      lane: lane in the warp.
      g: lane / 4, row of an `mma` fragment.
      q: lane % 4, column of an `mma` fragment.
      memory: address of its warp's own shared memory.
    """

    machine: PtxMachine
    rank: I32
    is_first: I32
    first_tile: I32
    block: I32
    rows: I32 | int
    index: I32
    warp: I32
    lane: I32
    g: I32
    q: I32
    memory: I32
