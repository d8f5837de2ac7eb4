"""Split-KV flash decoding in Pallas Mosaic GPU: see `api.decode_attention` for the equation.

Order of the sums. The tokens of a pair (one sequence, one key/value head), prompt first, lie in KV tiles of 64, none of
which mixes prompt and own tokens. Tile i belongs to split i mod 4, and the splits are merged in order. So the order of
every sum depends on the sequence's own lengths alone: neither the batch nor the other sequences can change a bit. How
many CTAs compute the splits is another matter: a cluster of four, two or one, as there are few pairs or many.

A CTA. The producer warpgroup (`producer`) streams KV tiles into pipeline stages by TMA, keys and values of a tile in a
stage each. In the consumer warpgroup (`consumer`) each warp has 16 of a tile's 64 tokens and runs its own online
softmax. The tensor cores multiply by `mma.m16n8k16` with the tokens in m and the queries, of which there are at most
eight, in n (`warp_mma`). At the end of a split the warps' partials are merged through shared memory. CTA 0 of a cluster
gets the partials of the others through distributed shared memory (`combine`), divides, and writes the result.

On GPUs of tier "warp" a cluster has one CTA and there is no producer: each warp copies its own tokens by `cp.async`
(`stages`). The order of the sums is the same.

Tokens past the lengths are not loaded, but for the rest of the last tile: there scores are set to -inf and values to 0,
so that the caches may hold anything. A prompt is read from HBM once for the sequences that follow one another in the
batch and share it; the L2 serves the others.

Barriers, and why none can hang. Every wait is answered by arrivals that do not themselves wait for the waiter:
- `full[stage]` completes once for every use of the pipeline, when the producer's copy has come. `empty[stage]`
  completes once for every use: the consumer arrives after its last read, behind a fence that orders the reads before
  the copy engine's next write. Both make the same uses in the same order, use i in stage i mod stages, and the producer
  waits on `empty` only from the second round on.
- `mbarrier` completes once in CTA 0, when all bytes that the other CTAs send there have come. It expects the bytes of
  exactly the splits that have a tile and are not CTA 0's; the CTA of such a split sends always. (The other CTAs' own
  `mbarrier` gets nothing, and nobody waits for it.) It is set up before any CTA sends: every thread of the cluster
  arrives on the hardware's cluster barrier once, after its CTA's set-up, and waits for it once, the consumers before
  their first tile. CTA 0 cannot leave before the bytes sent to it have come.
- `combine.warpgroup_sync` is a barrier of the consumer's four warps.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.decode_attention.combine import OUTPUT_TRANSFORMS, init_mbarrier
from qerl_kernels.decode_attention.config import (
    KV_TILE,
    QUERIES,
    AttentionConfig,
    best_config,
    partial_bytes,
    partial_slots,
)
from qerl_kernels.decode_attention.consumer import LOG2_E, consume
from qerl_kernels.decode_attention.kv_tiles import smem_transforms
from qerl_kernels.decode_attention.producer import produce
from qerl_kernels.decode_attention.stages import CopiedStages, TmaStages
from qerl_kernels.decode_attention.work import Global, Shared, Work
from qerl_kernels.gpu import H200, Gpu


# A jit of its own, although the callers are jitted: a program then lowers and compiles each shape once, not once for
# every layer.
@functools.partial(jax.jit, static_argnames=("scale", "config", "gpu"))
def decode_attention(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    prompt_index: jax.Array,
    prompt_lengths: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    scale: float,
    *,
    config: AttentionConfig | None = None,
    gpu: Gpu = H200,
) -> jax.Array:
    """As `api.decode_attention`: bf16, caches with a multiple of 8 slots, H 64 or 128, at most 8 query
    heads a key/value head.

    Args:
      config: kernel configuration; None for `config.best_config`. Changes no bit.
      gpu: the GPU. Changes no bit.
    """
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    config = config or best_config(rows * kv_heads, width, gpu)
    padding = max(0, QUERIES - rows * heads)  # the kernel reads eight queries at a time
    q = jnp.pad(q.reshape(rows * heads, width), ((0, padding), (0, 0)))
    by_tma = gpu.tier != "warp"
    if not by_tma and (config.ctas > 1 or config.stages % 2):
        raise ValueError(f"decode_attention: {config} takes TMA and clusters, this is for {gpu.name}")
    barriers = plgpu.Barrier(num_barriers=config.stages)
    work = {"kv_heads": kv_heads, "group": heads // kv_heads, "config": config}
    call = plgpu.kernel(
        functools.partial(_body if by_tma else _body_of_warps, **work, scale=scale * LOG2_E),
        out_type=jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        grid=(rows * kv_heads,),
        grid_names=("pair",),
        **({"cluster": (config.ctas,), "cluster_names": ("cta",)} if by_tma else {}),
        num_threads=2 if by_tma else 1,
        thread_name="warpgroup",
        scratch_types={
            "stages": plgpu.SMEM((config.stages, KV_TILE, width), k.dtype, transforms=smem_transforms(width, k.dtype)),
            **({"full": barriers, "empty": barriers} if by_tma else {}),
            "warp_max": plgpu.SMEM((4, QUERIES), jnp.float32),
            "warp_sum": plgpu.SMEM((4, QUERIES), jnp.float32),
            "outputs": plgpu.SMEM((4, width, QUERIES), jnp.float32, transforms=OUTPUT_TRANSFORMS),
            "inbox": plgpu.SMEM((partial_slots(config.ctas), partial_bytes(width) // 4), jnp.float32),
            **({"mbarrier": plgpu.SMEM((2,), jnp.uint32)} if by_tma else {}),
        },
        kernel_name=f"decode_attention_h{width}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
    )
    caches = [c.reshape(-1, *c.shape[2:]) for c in (prompt_k, prompt_v, k, v)]
    out = call(q, *caches, prompt_index, prompt_lengths, lengths)
    return out[: rows * heads].reshape(rows, heads, width)


def _body(*refs, kv_heads: int, group: int, scale: float, config: AttentionConfig, **scratch) -> None:
    """One CTA: sets up the cluster's mbarrier, then the producer and the consumer warpgroup."""
    work, shared = Work(Global(*refs), config, kv_heads, group), Shared(**scratch)
    if config.ctas > 1:
        init_mbarrier(shared.mbarrier, work.sent * partial_bytes(work.width))

    @pl.when(work.warpgroup == 1)
    def _():
        produce(work, shared)

    @pl.when(work.warpgroup == 0)
    def _():
        consume(work, shared, scale, TmaStages(work, shared))


def _body_of_warps(*refs, kv_heads: int, group: int, scale: float, config: AttentionConfig, **scratch) -> None:
    """One CTA of tier "warp": a consumer warpgroup, whose warps fill the stages."""
    work, shared = Work(Global(*refs), config, kv_heads, group, is_cluster=False), Shared(**scratch)
    consume(work, shared, scale, CopiedStages(work, shared))
