"""Gate and up of layers in pinned host memory between the forward and the backward pass of a micro-batch.

A copy overlaps with the programs of the layers that follow, so the host has to issue it before they need it, but not so
early that the device's memory holds many arrays that wait to be copied: a source is freed once its copy is done, and a
destination exists as soon as its copy is issued. `activations.peak_bytes` counts what the bounds here allow.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from qerl_jax.rl.layer import Kept

HOST = "pinned_host"  # JAX's name of the memory kind
MOST_LEAVING = 2
"""Most layers whose gate and up are on the device for a copy to the host that is not done."""
AHEAD = 3
"""Layers by which the copy to the device is issued before the layer's backward pass."""
BEHIND = 2
"""Layers by which the device is at most behind the host then: the backward pass before those has ended."""


def can_offload() -> bool:
    """Whether the device has pinned host memory beside its own: a GPU. The CPU's memory kinds are all the same."""
    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()} - {device.default_memory().kind}
    return device.platform == "gpu" and HOST in kinds


def to_host(kept: Kept, leaving: collections.deque[Array]) -> Kept:
    """What a layer keeps, with gate and up on their way to the host, added to those in `leaving`."""
    on_host = jax.device_put(kept.gate_up, kept.gate_up.sharding.with_memory_kind(HOST))
    leaving.append(on_host)
    return dataclasses.replace(kept, gate_up=on_host)


def to_device(kept: Kept) -> Kept:
    """What a layer keeps, with gate and up on their way back to where the rest is."""
    return dataclasses.replace(kept, gate_up=jax.device_put(kept.gate_up, kept.q.sharding))


def wait_for(leaving: collections.deque[Array], left: int) -> None:
    """Wait until at most `left` copies to the host are not done, the last ones."""
    while len(leaving) > left:
        leaving.popleft().block_until_ready()


def wait_for_gradient(gradients: list[Any], layer: int) -> None:
    """Wait for the backward pass of a layer, if there is such a layer."""
    if layer < len(gradients):
        jax.block_until_ready(gradients[layer])
