"""The GEMMs under test and benchmark: the fused projections of Qwen2.5, and random weights for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from qerl_kernels.formats import Nvfp4, PackedNvfp4
from qerl_kernels.nvfp4_matmul import packing

# case -> (n, k); "05b" and "15b" are 0.5B and 1.5B. qkv and o of 32B equal those of 14B.
SHAPES = {
    "qkv_7b": (4608, 3584),
    "o_7b": (3584, 3584),
    "gate_up_7b": (37888, 3584),
    "down_7b": (3584, 18944),
    "qkv_14b": (7168, 5120),
    "o_14b": (5120, 5120),
    "gate_up_14b": (27648, 5120),
    "down_14b": (5120, 13824),
    "gate_up_32b": (55296, 5120),
    "down_32b": (5120, 27648),
    "qkv_05b": (1152, 896),
    "o_05b": (896, 896),
    "gate_up_05b": (9728, 896),
    "down_05b": (896, 4864),
    "qkv_15b": (2048, 1536),
    "o_15b": (1536, 1536),
    "gate_up_15b": (17920, 1536),
    "down_15b": (1536, 8960),
    "qkv_3b": (2560, 2048),
    "o_3b": (2048, 2048),
    "gate_up_3b": (22016, 2048),
    "down_3b": (2048, 11008),
    "qkv_72b": (10240, 8192),
    "o_72b": (8192, 8192),
    "gate_up_72b": (59136, 8192),
    "down_72b": (8192, 29568),
}
TIMED = tuple(SHAPES)[:10]  # those of 7B, 14B and 32B, over which means are taken
LAYER_7B = ("qkv_7b", "o_7b", "gate_up_7b", "down_7b")
# case -> output features of each part of a fused projection: each carries an adapter of its own
PARTS = {
    "qkv_7b": (3584, 512, 512),
    "qkv_14b": (5120, 1024, 1024),
    "gate_up_7b": (18944, 18944),
    "gate_up_14b": (13824, 13824),
    "gate_up_32b": (27648, 27648),
    "qkv_05b": (896, 128, 128),
    "gate_up_05b": (4864, 4864),
    "qkv_15b": (1536, 256, 256),
    "gate_up_15b": (8960, 8960),
    "qkv_3b": (2048, 256, 256),
    "gate_up_3b": (11008, 11008),
    "qkv_72b": (8192, 1024, 1024),
    "gate_up_72b": (29568, 29568),
}
TOKENS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)


def parts(case: str) -> tuple[int, ...]:
    """Output features of the parts of a projection."""
    return PARTS.get(case, (SHAPES[case][0],))


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_weight(key: jax.Array, n: int, k: int) -> Nvfp4:
    """Random codes, block scales over more than six binades, one global scale for all rows."""
    codes_key, scales_key = jax.random.split(key)
    codes = jax.random.bits(codes_key, (n, k // 2), jnp.uint8)
    scales = jnp.exp2(jax.random.uniform(scales_key, (n, k // 16), minval=-4.0, maxval=2.5))
    return Nvfp4(codes, scales.astype(jnp.float8_e4m3fn), jnp.full((n,), 0.37 / k**0.5, jnp.float32), False)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_packed(key: jax.Array, n: int, k: int) -> PackedNvfp4:
    """A packed weight like that of `random_weight`, n and k multiples of 64. Any word is eight codes, so that words are
    drawn directly: packing takes longer to compile than all GEMMs of a shape to time."""
    words_key, scales_key = jax.random.split(key)
    words = jax.random.bits(words_key, (n // 64, k // 64, 4, 128), jnp.uint32)
    scales = jnp.exp2(jax.random.uniform(scales_key, (n, k // 16), minval=-4.0, maxval=2.5)).astype(jnp.float8_e4m3fn)
    world = jnp.full((n,), 0.37 / k**0.5, jnp.float32)
    return PackedNvfp4(
        words, packing.pack_scales(scales), world * 2.0**packing.PRODUCT_LOG2, world, (n, k), False, 16, True
    )
