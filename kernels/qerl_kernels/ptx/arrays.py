"""Mosaic GPU's arrays from a thread's registers, for kernels that mix them with inline PTX."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from qerl_kernels.ptx.values import F32

SCALAR = plgpu.Layout.WG_SPLAT(())


def fragmented_array(
    registers: Sequence[ir.Value], shape: tuple[int, ...], layout: plgpu.Layout
) -> mgpu.FragmentedArray:
    """A thread's registers, in the order of the layout, as an array."""
    layout = layout.to_mgpu()
    flat = np.empty(len(registers), dtype=object)
    flat[:] = registers
    return mgpu.FragmentedArray(_registers=flat.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)


def f32_pair(first: F32, second: F32) -> ir.Value:
    """Two values as a register of an array."""
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [first.value, second.value])
