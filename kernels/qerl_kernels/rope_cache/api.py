"""`rope_and_cache`: the step between the q/k/v projection and attention in decode.

Axes: B sequences, N query heads, K key/value heads, M = (N + 2 K) · H, S slots of a cache, H head dim, A = H / 2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from qerl_kernels import dispatch
from qerl_kernels.rope_cache import reference


def rope_and_cache(
    qkv: Float[Array, "B M"],
    angles: Float32[Array, "B A"],
    slots: Int32[Array, " B"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Rotary embedding of q and k of one new token a sequence, and the write of its k and v into the caches.

    `(x_i, x_{i+H/2}) -> (x_i cos_i − x_{i+H/2} sin_i, x_{i+H/2} cos_i + x_i sin_i)` in fp32, and the result rounded
    once to the dtype of qkv. The kernel has the bits of XLA on a GPU, which rounds each product and each sum; on a CPU
    XLA may contract them to multiply-adds. Within a jit the caches are updated in place where the old ones are not read
    later.

    Args:
      qkv: the token's projections, heads of q first, then of k, then of v; bf16 for the kernel.
      angles: rotary angles of the token's position. Their cosines and sines are computed outside the kernel, once for
        all layers.
      slots: slot of the token in the caches; outside of 0 ... S − 1 nothing is written.
      keys: cache of the keys, of qkv's dtype.
      values: cache of the values.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).

    Returns:
      Rotated q, and both caches with the token.

    Raises:
      ValueError: the shapes do not belong together, or the implementation asked for cannot run here.
    """
    _check_shapes(qkv, angles, slots, keys, values)
    missing = dispatch.missing_for_mosaic_gpu(qkv.dtype) or _missing(qkv, keys, values)
    if dispatch.choose("rope_and_cache", implementation, missing) == "xla":
        return reference.rope_and_cache(qkv, angles, slots, keys, values)
    from qerl_kernels.rope_cache import kernel  # jax ≥ 0.11: imported where it runs

    angles, slots = angles.astype(jnp.float32), slots.astype(jnp.int32)  # what the kernel reads
    return kernel.rope_and_cache(qkv, jnp.cos(angles), jnp.sin(angles), slots, keys, values)


def _missing(qkv: Array, keys: Array, values: Array) -> str | None:
    """What the kernel needs and these arrays lack; None where it takes them."""
    if keys.dtype != qkv.dtype or values.dtype != qkv.dtype:
        return f"caches of {qkv.dtype} (these are {keys.dtype} and {values.dtype})"
    if keys.shape[3] not in (64, 128):
        return f"a head dim of 64 or 128 (this is {keys.shape[3]})"
    return None


def _check_shapes(qkv: Array, angles: Array, slots: Array, keys: Array, values: Array) -> None:
    rows, kv_heads, _, width = keys.shape
    wanted = {"angles": (angles, (rows, width // 2)), "slots": (slots, (rows,)), "values": (values, keys.shape)}
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"rope_and_cache: {name} is {array.shape}, not {shape}, which goes with keys {keys.shape}")
    if qkv.shape[0] != rows or qkv.shape[1] % width or qkv.shape[1] <= 2 * kv_heads * width:
        raise ValueError(
            f"rope_and_cache: qkv {qkv.shape} is not {rows} rows of more than {2 * kv_heads} heads of {width}"
        )
