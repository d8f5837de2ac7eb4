"""The kernels of a lowered program as programs of their own, so that several compile at a time.

XLA compiles the Mosaic GPU kernels of one program one after the other: the eleven of a decode program took 5 of its 9 s
on an H100 (jax 0.11.2). Mosaic GPU sets options of LLVM that are not XLA's, and a process has one set at a time, so
that meanwhile the XLA code of every other program waits. Mosaic GPU keeps the kernels that it has compiled in a cache
of the process, by the hash of their module, and looks there first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

TARGET = "mosaic_gpu_v2"  # as jax's Mosaic GPU names its custom call
KERNEL_PROGRAM_NAME = "mosaic_gpu_kernel"
"""Name of the functions that `kernel_programs` makes."""


def kernel_programs(lowered: jax.stages.Lowered) -> dict[bytes, jax.stages.Wrapped]:
    """Programs without arguments, by the hash of their kernel's module and in the order of the program: compiling one
    for the program's device, in the same process, compiles the kernel for every program whose module has this hash.
    They must not be called. (In jax 0.11 a kernel's module has its number among all that the process lowers, so that no
    two programs share one.)

    A future jax may write its kernels in another way; what is not understood is left out, and is compiled with its
    program.

    Args:
      lowered: a program lowered for a GPU; any other has no such kernel.
    """
    found = {}
    for operation in _operations(lowered.compiler_ir("stablehlo").operation):
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == TARGET:
            settings = {named.name: _value(named.attr) for named in attributes.get("mhlo.backend_config", ())}
            if "kernel_hash" in settings and None not in settings.values():
                found[settings["kernel_hash"]] = _program(settings)
    return found


def _program(settings: dict[str, Any]) -> jax.stages.Wrapped:
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)  # else it is left out

    def kernel() -> jax.Array:
        return call(**settings)

    kernel.__name__ = KERNEL_PROGRAM_NAME
    return jax.jit(kernel)


def _value(attribute: Any) -> bytes | bool | None:
    """A string or a truth value; None for another attribute, which might be written differently again."""
    if hasattr(attribute, "value_bytes"):
        return attribute.value_bytes
    return attribute.value if type(attribute).__name__ == "BoolAttr" else None


def _operations(operation: Any) -> Iterator[Any]:
    """All operations within one."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
