"""The shared memory of a CTA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.gemm import exchange
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms
from qerl_kernels.nvfp4_matmul.packing import TILE

_FIELDS = (
    "lora_b_s", "warpgroup_sums_s", "out_s", "sums_from_cluster_s", "sums_from_cluster_full_s", "scales_s", "lora_x_s",
    "words_s", "x_s",
)  # fmt: skip


@functools.partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=())
@dataclasses.dataclass(frozen=True)
class Smem:
    """The arrays, in the order in which they lie in memory; None where the config or the terms need none.

    Attributes:
      lora_b_s: B of a tile's adapter, bf16 [warpgroups_n, 64 ranks, 64 features].
      warpgroup_sums_s: fp32 sums [warpgroups_n, warpgroups_k - 1, 64, tile_m] on their way to warpgroup 0 along k.
      out_s: a part of the output tile, bf16 [warpgroups_n, rows of a part, 64], on its way to HBM.
      sums_from_cluster_s: fp32 sums [warpgroups_n, *exchange.places] of the part that this CTA finishes.
      sums_from_cluster_full_s: mbarriers [warpgroups_n, 8 bytes]; see `barriers`.
      scales_s: pipeline stages of block scales.
      lora_x_s: `x A` as this CTA reduced it from split-K partials, bf16 [tile_m, 64].
      words_s: pipeline stages of packed E2M1 codes.
      x_s: pipeline stages of activations, bf16 [stages, warpgroups_k, tile_m, 64 · k_tiles].
    """

    lora_b_s: jax.Ref | None
    warpgroup_sums_s: jax.Ref | None
    out_s: jax.Ref
    sums_from_cluster_s: jax.Ref | None
    sums_from_cluster_full_s: jax.Ref | None
    scales_s: jax.Ref
    lora_x_s: jax.Ref | None
    words_s: jax.Ref
    x_s: jax.Ref


def declare_smem(
    config: GemmConfig, terms: Terms, weight_tiles: tuple[int, int], word_tile: tuple[int, int], word_transforms: tuple
) -> Smem:
    """The arrays as scratch types of a kernel.

    Args:
      config: the tuning config.
      terms: terms of the epilogue.
      weight_tiles: 64 × 64 tiles of the weight in a stage, along its n and its k.
      word_tile: shape of a tile's words.
      word_transforms: tiling and swizzle of the words.
    """
    n, m = config.warpgroups_n, config.tile_m
    part = config.parts[0][1]
    bf16_tile = {"dtype": jnp.bfloat16, "transforms": swizzled(TILE, 2)}
    fp32_sums = {"dtype": jnp.float32, "transforms": swizzled(m, 4)}
    return Smem(
        lora_b_s=plgpu.SMEM((n, TILE, TILE), **bf16_tile) if terms.has_lora else None,
        warpgroup_sums_s=plgpu.SMEM((n, config.warpgroups_k - 1, TILE, m), **fp32_sums)
        if config.warpgroups_k > 1
        else None,
        out_s=plgpu.SMEM((n, part, TILE), **bf16_tile),
        sums_from_cluster_s=plgpu.SMEM((n, *exchange.places(config.cluster, part)), jnp.float32)
        if config.cluster > 1
        else None,
        sums_from_cluster_full_s=plgpu.SMEM((n, 2), jnp.uint32) if config.cluster > 1 else None,
        scales_s=plgpu.SMEM((config.stages, *weight_tiles, 64), jnp.uint32),
        lora_x_s=plgpu.SMEM((m, TILE), **bf16_tile) if terms.has_partials else None,
        words_s=plgpu.SMEM((config.stages, *weight_tiles, *word_tile), jnp.uint32, transforms=word_transforms),
        x_s=plgpu.SMEM((config.stages, config.warpgroups_k, m, config.k_tiles * TILE), **bf16_tile),
    )


def swizzled(columns: int, itemsize: int) -> tuple:
    """Tiling and swizzle of a shared-memory array whose rows have `columns` elements: what TMA and `wgmma` agree on."""
    bytes_ = next(size for size in (128, 64, 32) if columns * itemsize % size == 0)
    return plgpu.TilingTransform((8, bytes_ // itemsize)), plgpu.SwizzleTransform(bytes_)
