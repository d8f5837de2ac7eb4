"""`peer_sum`: the sum over GPUs that stands behind a row-parallel projection in decode.

Axes: D devices, C packets of a sum, G CTAs; a device holds its own slice of what has a leading axis D.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import re
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Int32, UInt32

from qerl_kernels import dispatch

VALUES = 4  # bf16 values of a packet
THREADS = 128  # of a CTA
MAX_CTAS = 228  # two for each SM of the smallest Hopper GPU
_PACKETS_OF_A_THREAD = 9
_NVSHMEM = "xla_gpu_experimental_enable_nvshmem"  # with it JAX gives kernels other addresses of peers
Packets = UInt32[Array, "1 2 D C 4"]
Calls = Int32[Array, "1 G"]


def missing(features: int, dtype: jax.typing.DTypeLike, devices: int, version: str = jax.__version__) -> str | None:
    """What keeps the kernel from sums of rows of so many features over the first `devices` of this process by JAX of
    this version; None: it runs.
    """
    if reason := dispatch.missing_for_mosaic_gpu(dtype):
        return reason
    if dispatch.this_gpu().arch != 90:
        return f"a Hopper GPU, as it ran on no other (this is {dispatch.this_gpu().name})"
    if os.environ.get("NCCL_P2P_DISABLE") == "1" or _NVSHMEM in os.environ.get("XLA_FLAGS", ""):
        return f"an environment without NCCL_P2P_DISABLE=1, and XLA_FLAGS without {_NVSHMEM}"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (0, 11, 2):
        return f"jax 0.11.2 or later (this is {version})"  # an earlier one has a barrier in front of each call
    if jax.process_count() > 1:
        return "one process for all GPUs of a run"
    if features % VALUES:
        return f"a hidden size that {VALUES} divides (this is {features})"
    if dispatch.target() is None and jax.default_backend() == "gpu" and not _are_peers(devices):
        return "GPUs that reach each other's memory"
    return None


def most_rows(features: int, devices: int) -> int:
    """Rows of a sum, at most: what a device sends grows with the number of the others."""
    return VALUES * _PACKETS_OF_A_THREAD * THREADS * MAX_CTAS // (devices - 1) // features


def shapes(elements: int, devices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `packets`, uint32, and `calls`, int32, of all devices for sums of up to `elements` values. Both begin
    as zeros, on each device before another one begins its first sum.
    """
    packets = math.ceil(elements / VALUES)
    return (devices, 2, devices, packets, 4), (devices, min(math.ceil(packets / THREADS), MAX_CTAS))


def room(packets: Packets) -> int:
    """Values of the largest sum that they hold."""
    return VALUES * packets.shape[3]


def peer_sum(
    x: Float[Array, "*B N"], packets: Packets, calls: Calls, axis: str
) -> tuple[Float[Array, "*B N"], Packets, Calls]:
    """`Σ_d x_d` in fp32 in the order of the devices, rounded once to bf16: the same bits on each, those of a `psum` of
    two. Within `shard_map` over all devices of a mesh of one axis, and only there; each device makes the same calls.

    Args:
      x: this device's part of the sum, bf16, at most `room(packets)` values.
      packets: what other devices write here, consumed: two sets of packets for each device that sends.
      calls: calls so far, once for each CTA, consumed.
      axis: name of the mesh's axis.

    Returns:
      The sum, and `packets` and `calls` for the next call.
    """
    from qerl_kernels.peer_sum import kernel  # jax ≥ 0.11: imported where it runs

    return kernel.peer_sum(x, packets, calls, axis)


@functools.cache
def _are_peers(count: int) -> bool:
    return reach_each_other(jax.local_devices()[:count], ctypes.CDLL("libcuda.so.1"))


def reach_each_other(devices: Sequence[jax.Device], cuda: ctypes.CDLL) -> bool:
    """Whether each of the GPUs can map the memory of the others, as CUDA's driver says."""
    ordinals, answer = [device.local_hardware_id for device in devices], ctypes.c_int()
    return all(
        cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), *pair) == 0 and answer.value == 1
        for pair in itertools.permutations(ordinals, 2)
    )
