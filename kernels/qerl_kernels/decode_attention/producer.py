"""The producer warpgroup: TMA copies of KV tiles into the pipeline's stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.decode_attention.combine import cluster_wait
from qerl_kernels.decode_attention.config import KV_TILE
from qerl_kernels.decode_attention.work import Shared, Work


def produce(work: Work, shared: Shared) -> None:
    """Copies keys and values of every tile of this CTA's splits, a stage each, in the order in which they are used."""
    refs = work.refs

    def load(cache, pair, first, use):
        stage = lax.rem(use, work.config.stages)

        @pl.when(use >= work.config.stages)
        def _():
            plgpu.barrier_wait(shared.empty.at[stage])

        source = cache.at[pair, pl.ds(first, KV_TILE)]
        plgpu.copy_gmem_to_smem(source, shared.stages.at[stage], shared.full.at[stage])

    def one_tile(use: jax.Array, tile: jax.Array) -> jax.Array:
        @pl.when(tile < work.prompt_tiles)
        def _():
            load(refs.prompt_k, work.prompt_pair, tile * KV_TILE, use)
            load(refs.prompt_v, work.prompt_pair, tile * KV_TILE, use + 1)

        @pl.when(tile >= work.prompt_tiles)
        def _():
            load(refs.k, work.pair, (tile - work.prompt_tiles) * KV_TILE, use)
            load(refs.v, work.pair, (tile - work.prompt_tiles) * KV_TILE, use + 1)

        return use + 2

    work.fold_splits(lambda use, split: work.fold_tiles(split, one_tile, use), jnp.int32(0))
    if work.config.ctas > 1:
        cluster_wait()
