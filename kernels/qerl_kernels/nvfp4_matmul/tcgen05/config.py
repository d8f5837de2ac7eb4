"""The config of the `tcgen05` GEMM."""

from __future__ import annotations

import dataclasses

TILE_M, TILE_N, STAGES = 128, 128, 4


@dataclasses.dataclass(frozen=True)
class Tcgen05Config:
    """The only one: on no GPU could another be timed."""
