"""The products that are tested and timed: the fused projections of Qwen2.5, and random weights for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from qerl_kernels.nvfp4_matmul import packing
from qerl_kernels.nvfp4_matmul.api import Nvfp4, PackedNvfp4

# case -> (n, k). qkv and o of 32B equal those of 14B.
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
}
LAYER_7B = ("qkv_7b", "o_7b", "gate_up_7b", "down_7b")
# case -> output features of each part of a fused projection: each carries an adapter of its own
PARTS = {
    "qkv_7b": (3584, 512, 512),
    "qkv_14b": (5120, 1024, 1024),
    "gate_up_7b": (18944, 18944),
    "gate_up_14b": (13824, 13824),
    "gate_up_32b": (27648, 27648),
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
    """A packed weight like that of `random_weight`, n and k multiples of 64. Any word is eight codes, so that these are
    drawn as words: packing takes longer to compile than all products of a shape to time."""
    words_key, scales_key = jax.random.split(key)
    words = jax.random.bits(words_key, (n // 64, k // 64, 4, 128), jnp.uint32)
    scales = jnp.exp2(jax.random.uniform(scales_key, (n, k // 16), minval=-4.0, maxval=2.5)).astype(jnp.float8_e4m3fn)
    world = jnp.full((n,), 0.37 / k**0.5, jnp.float32)
    return PackedNvfp4(
        words, packing.pack_scales(scales), world * 2.0**packing.PRODUCT_LOG2, world, (n, k), False, 16, True
    )
