"""The kernels of a lowered program as programs of their own, so that several compile at a time.

XLA compiles the Mosaic GPU kernels of one program one after the other, which was most of the time: eleven kernels of a
decode program took 5 of its 9 s on an H100 (jax 0.11.2). Mosaic GPU keeps what it compiles in a cache of the process,
by a hash of the kernel, and looks there first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

TARGET = "mosaic_gpu_v2"  # as jax's Mosaic GPU names its custom call
NAME = "mosaic_gpu_kernel"
"""Name of the programs that `kernel_programs` makes."""


def kernel_programs(lowered: jax.stages.Lowered) -> dict[bytes, jax.stages.Wrapped]:
    """Programs without arguments, by the hash of their kernel: compiling one compiles the kernel for all programs that
    contain it. They must not be called.

    A future jax may write its kernels in another way; then none is found, and each is compiled with its program.

    Args:
      lowered: a program lowered for a GPU; any other has no such kernel.
    """
    found = {}
    for operation in _operations(lowered.compiler_ir("stablehlo").operation):
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == TARGET:
            given = attributes.get("mhlo.backend_config", ())
            settings = {named.name: _value(named.attr) for named in given}
            if "kernel_hash" in settings:
                found[settings["kernel_hash"]] = _program(settings)
    return found


def _program(settings: dict[str, Any]) -> jax.stages.Wrapped:
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)  # else it is left out

    def kernel() -> jax.Array:
        return call(**settings)

    kernel.__name__ = NAME
    return jax.jit(kernel)


def _value(attribute: Any) -> bytes | bool:
    return attribute.value_bytes if hasattr(attribute, "value_bytes") else attribute.value


def _operations(operation: Any) -> Iterator[Any]:
    """All operations within one."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
