"""The kernel of rotary embedding and cache write, its instructions run for all threads on the numpy machine, bit by bit
against fp32 arithmetic that rounds each product and each sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_machine import Memory, NumpyMachine
from qerl_kernels.rope_cache import kernel

SLOTS = 6
WRITTEN = [0, 5, -1, 6, 3]  # rows 2 and 3 are idle


def bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))


def expected(qkv, cos, sin, heads, kv_heads, width):
    """q, and k and v as the caches hold them, [B, heads, H]."""
    x = qkv.astype(np.float32).reshape(len(qkv), heads + 2 * kv_heads, width)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return np.split(bf16(np.where(np.arange(x.shape[1])[:, None] < heads + kv_heads, turned, x)),
                    (heads, heads + kv_heads), axis=1)  # fmt: skip


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(14, 2, 64), (3, 1, 128), (10, 2, 128)])
def test_bits(heads, kv_heads, width):
    """A token goes into its slot, and every other byte of the caches stays; no byte is written twice."""
    rng, rows = np.random.default_rng(heads), len(WRITTEN)
    qkv = bf16(rng.normal(size=(rows, (heads + 2 * kv_heads) * width)) * 3)
    angles = rng.uniform(0, 1000, (rows, width // 2)).astype(np.float32)
    cos, sin, slots = np.cos(angles), np.sin(angles), np.asarray(WRITTEN, np.int32)
    cache = jax.ShapeDtypeStruct((rows, kv_heads, SLOTS, width), jnp.bfloat16)
    caches = [rng.normal(size=cache.shape).astype(jnp.bfloat16) for _ in "kv"]
    memory = Memory(qkv, cos, sin, slots, *caches, np.zeros((rows, heads, width), qkv.dtype))
    blocks = -(-kernel.threads_of_row(heads, cache) // kernel.THREADS)
    for row, block in np.ndindex(rows, blocks):
        machine = NumpyMachine(kernel.THREADS, memory=memory)
        thread = block * kernel.THREADS + machine.thread_index()
        kernel.emit(machine, np.int64(row), thread, kernel.Pointers(*memory.begins), heads=heads, cache=cache)
    q, *new = expected(qkv, cos, sin, heads, kv_heads, width)
    assert memory.written_once(6)
    np.testing.assert_array_equal(memory.array(6, np.uint8), bits(q).ravel())
    for place, old, part in zip((4, 5), caches, new, strict=True):
        wanted, writes = old.copy(), np.zeros(cache.shape, bool)
        for row, slot in enumerate(WRITTEN):
            if 0 <= slot < SLOTS:
                wanted[row, :, slot], writes[row, :, slot] = part[row], True
        np.testing.assert_array_equal(memory.array(place, np.uint8), bits(wanted).ravel())
        counted = memory.writes[memory.begins[place] : memory.ends[place]].reshape(*cache.shape, -1)
        np.testing.assert_array_equal(counted, np.broadcast_to(writes[..., None], counted.shape))
