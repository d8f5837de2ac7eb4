"""The mbarriers of a CTA, and why none of them can hang.

Every wait is answered by arrivals that do not themselves wait for the waiter; the lines at each barrier say which. They
rest on three facts:

- The producer and the consumers of a CTA make the same uses of the pipeline in the same order (`schedule.Segments`).
- All CTAs of a cluster count the same shared tiles.
- The barriers of a CTA are initialized before another CTA arrives on them. Mosaic does it where a kernel starts
  (`_launch` in jax/experimental/mosaic/gpu/core.py, region "Init"): one thread initializes them, then every thread of
  the cluster runs `fence.mbarrier_init.release.cluster`, `barrier.cluster.arrive` and `barrier.cluster.wait`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms

_FIELDS = (
    "empty", "lora_b_empty", "full", "sums_from_cluster_empty", "lora_x_full", "warpgroup_sums_full",
    "warpgroup_sums_empty",
)  # fmt: skip


@functools.partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=())
@dataclasses.dataclass(frozen=True)
class Barriers:
    """A name for each array of mbarriers; None where the config or the terms need none."""

    # empty[stage] completes once for each use of the stage: every consumer warpgroup arrives after its last read (after
    # the wait for `wgmma`). The producer waits for it only from a stage's second use on, and consumers reach that
    # arrival needing only stages that the producer filled before. With lookahead a consumer waits for `full` of one
    # k-iteration while it still holds the stage of the k-iteration before and no other (the one before that it has
    # freed). There are two stages or more, so the producer fills the stage waited for without needing the one held.
    empty: jax.Ref
    # lora_b_empty: B of the adapters has one place. The producer refills it after this barrier, on which each of the
    # `warpgroups_n` readers arrives for every segment but the last: as often as the producer waits. A reader arrives
    # when it has read B, for which it waits on `full`, and in a shared tile for the other CTAs' sums.
    lora_b_empty: jax.Ref | None
    # full[stage] completes once for each use of the stage: the producer's copies arrive on it, 2 + `warpgroups_k` of a
    # k-iteration or those of the LoRA input; where a use has fewer copies than the other kind, the producer arrives by
    # hand for the rest. Copies wait for nobody; the producer issues them after `empty` (and `lora_b_empty`), see there.
    full: jax.Ref
    # sums_from_cluster_empty[r] completes once for each shared tile. Every CTA arrives at all of the cluster when its
    # own places for their sums are free: at the start, when it has prepared the mbarrier behind them, and after each
    # shared tile but the last, when it has stored its part. It waits before it sends; so nobody arrives at a CTA that
    # has left. The mbarriers `Smem.sums_from_cluster_full_s`, which Mosaic's barriers cannot be (`exchange` sends with
    # instructions of its own), complete once for each shared tile in a CTA that finishes a part of it: its threads
    # arrive, and every other CTA sends. All have the same shared tiles in the same order. A CTA sends all that it has
    # before it waits for sums; for that it needs its own pipeline and `sums_from_cluster_empty` alone. None leaves
    # before the sums sent to it have come. (A CTA without a part passes no barrier of a warpgroup between its wait and
    # its next arrival; a late warp of it misses no phase, since the next takes CTA 0, which needs bytes of every warp.)
    sums_from_cluster_empty: jax.Ref | None
    # lora_x_full completes once in a kernel where `x A` comes as split-K partials: warps 1 to 3 of the producer arrive
    # when their sums are in shared memory (`reduce_partials`), and wait for nobody. Consumers wait for it once, before
    # they finish the first segment. In such a kernel warp 0 issues the copies alone and arrives for its whole
    # warpgroup. Otherwise all four warps would arrive on `full`, which would wait for the sums, and wait on `empty`, of
    # which a warp that comes late could miss a phase and wait for one that never ends. `setmaxnreg` needs the whole
    # warpgroup and stands before the warps part; behind it the producer meets at no barrier of a warpgroup, and none of
    # its warps is needed once its own work is done.
    lora_x_full: jax.Ref | None
    # warpgroup_sums_full[r] completes once for each segment: the `warpgroups_k` - 1 consumers that share the features
    # of warpgroup 0 arrive with their sums, for which they need the pipeline and `warpgroup_sums_empty`.
    warpgroup_sums_full: jax.Ref | None
    # warpgroup_sums_empty[r]: those consumers reuse their place only after it. The reader arrives for every segment but
    # the last, when it has read the sums and before it waits for anything else.
    warpgroup_sums_empty: jax.Ref | None


def declare_barriers(config: GemmConfig, terms: Terms) -> Barriers:
    """The barriers as scratch types of a kernel."""
    shares_k, shares_tiles = config.warpgroups_k > 1, config.cluster > 1
    n = config.warpgroups_n
    return Barriers(
        empty=plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
        lora_b_empty=plgpu.Barrier(num_arrivals=n) if terms.has_lora else None,
        full=plgpu.Barrier(num_arrivals=full_arrivals(config, terms), num_barriers=config.stages),
        sums_from_cluster_empty=plgpu.ClusterBarrier(collective_axes=("cluster_rank",), num_barriers=n)
        if shares_tiles
        else None,
        lora_x_full=plgpu.Barrier(num_arrivals=3) if terms.has_partials else None,
        warpgroup_sums_full=plgpu.Barrier(num_arrivals=config.warpgroups_k - 1, num_barriers=n) if shares_k else None,
        warpgroup_sums_empty=plgpu.Barrier(num_barriers=n) if shares_k else None,
    )


def k_iteration_copies(config: GemmConfig) -> int:
    """Copies of a k-iteration: words, scales, and x for each warpgroup along k."""
    return 2 + config.warpgroups_k


def lora_copies(config: GemmConfig, terms: Terms) -> int:
    """Copies of a tile's LoRA input: B for each warpgroup along n, and `x A` where it comes whole."""
    return config.warpgroups_n + (not terms.has_partials) if terms.has_lora else 0


def full_arrivals(config: GemmConfig, terms: Terms) -> int:
    """Arrivals that complete `full`."""
    return max(k_iteration_copies(config), lora_copies(config, terms))
