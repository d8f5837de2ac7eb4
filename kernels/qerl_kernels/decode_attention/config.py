"""Kernel configuration of decode attention: CTAs that share a pair, and pipeline stages."""

from __future__ import annotations

import dataclasses

from qerl_kernels.gpu import H200, Gpu

QUERIES = 8  # n of an `mma`: at most so many query heads share a key head
WARP_TOKENS = 16  # tokens of a KV tile that a warp takes
KV_TILE = 4 * WARP_TOKENS  # tokens of a KV tile
SPLITS = 4  # ways that the KV tiles of a pair are split
# Limit of a CTA, half of Hopper's shared memory in whole KiB: two fit an SM.
HALF_SMEM_BYTES = 113 * 1024
MAX_COPIED_STAGES = 8  # tier "warp": each is unrolled code at the start


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The kernel configuration. It changes no bit of the result.

    Attributes:
      ctas: CTAs of a cluster, which share the splits of a pair: 1, 2 or 4; 1 on GPUs of tier "warp".
      stages: stages of the pipeline, each a KV tile of keys or of values; an even number on tier "warp".
    """

    ctas: int
    stages: int

    @property
    def splits(self) -> int:
        """Splits of each CTA."""
        return SPLITS // self.ctas


def best_config(pairs: int, width: int, gpu: Gpu = H200) -> AttentionConfig:
    """The configuration for so many pairs of a sequence and a key/value head.

    Args:
      pairs: sequences times key/value heads.
      width: head dim.
      gpu: the GPU.
    """
    if gpu.tier == "warp":
        stages = stages_for(width, 1, min(gpu.smem_bytes, HALF_SMEM_BYTES))
        return AttentionConfig(1, min(stages, MAX_COPIED_STAGES) // 2 * 2)
    ctas = ctas_for(pairs, gpu.sms)
    return AttentionConfig(ctas, stages_for(width, ctas))


def ctas_for(pairs: int, sms: int = H200.sms) -> int:
    """CTAs that share a pair: more than one only as long as that keeps idle SMs busy."""
    return 4 if 4 * pairs <= sms else 2 if pairs <= sms else 1


def stages_for(width: int, ctas: int, smem_bytes: int = HALF_SMEM_BYTES) -> int:
    """Stages that fit beside the warps' sums.

    Not more where a CTA could have an SM to itself: clusters of four with one CTA on each SM do not all fit on the GPU
    at once.
    """
    sums = 4 * QUERIES * width * 4 + partial_slots(ctas) * partial_bytes(width)
    small = 6 * 1024  # maxima, sums of weights and the mbarrier, a KiB each, Mosaic's own scratch, and the barriers
    return (smem_bytes - sums - small) // (KV_TILE * width * 2)


def partial_slots(ctas: int) -> int:
    """Places in CTA 0 for the partial result of a split: one for each that is sent, and one for its own if it has
    several splits."""
    return SPLITS - SPLITS // ctas + (ctas < SPLITS)


def partial_bytes(width: int) -> int:
    """Bytes of a partial result: output [H, 8], maximum and sum [8], the latter two once for every thread."""
    return (width // 32 + 2) * 128 * 8
