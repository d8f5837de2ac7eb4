"""Tensors of a checkpoint, checked and brought into a weight format: the reading half of `checkpoint.load`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from qerl_kernels import dispatch
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul.packing import missing_for_packing, pack

from qerl_jax import partition
from qerl_jax.checkpoint import names
from qerl_jax.checkpoint.check import check_names
from qerl_jax.checkpoint.layouts import Quantization
from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors
from qerl_jax.models.config import ModelConfig, TensorSpec
from qerl_jax.models.formats import FORMATS, Dense, Weight, format_of, host


class WeightReader:
    """Reads the tensors of a checkpoint by the table of its config.

    Args:
      tensors: the checkpoint, checked by `check_names`.
      config: its shape.
      quantization: of its weights; None if it is not quantized.
      weight_format: format into which the projections of a checkpoint that is not quantized are, one of
        `WEIGHT_FORMATS`.
      dtype: compute dtype, the dtype of dense weights and biases.
      matmul_kernel: as in `load_policy`.

    It and its methods raise CheckpointError for a missing, misshapen, unknown or non-finite tensor, with its file and
    name.
    """

    def __init__(
        self,
        tensors: Tensors,
        config: ModelConfig,
        quantization: Quantization | None,
        weight_format: str,
        dtype: DTypeLike,
        matmul_kernel: str,
    ):
        check_names(tensors, config, quantization)
        self.tensors, self.config, self.weight_format = tensors, config, weight_format
        self.quantization = quantization
        self.dtype, self.matmul_kernel = dtype, matmul_kernel
        self.missing = dispatch.missing_for_mosaic_gpu(dtype)

    def read(self, spec: TensorSpec, layer: int | None = None) -> Weight | np.ndarray:
        """A tensor on the host: a projection dense or quantized, a bias in the compute dtype, a norm in fp32, and a
        table as it is stored, memory-mapped.
        """
        if spec.kind == "projection":
            return _concatenate(list(self.parts(spec, layer).values()))
        arrays = [self._finite(name)[0] for name in spec.stored(layer)]
        if spec.kind == "table":
            return arrays[0]
        dtype = np.float32 if spec.kind == "norm" else self.dtype
        return np.concatenate([array.astype(dtype, copy=False) for array in arrays])

    def parts(self, spec: TensorSpec, layer: int) -> dict[str, Weight]:
        """The parts of a (fused) projection by module, dense or quantized; those that are quantized here share what
        their format shares.
        """
        modules = dict(zip(spec.modules(layer), spec.stored(layer).values(), strict=True))
        layout = None if self.quantization is None else self.quantization.layout_of(next(iter(modules)))
        if layout is not None:
            return {module: layout.read(self.tensors, module, shape) for module, shape in modules.items()}
        arrays, largest = zip(*(self._finite(name) for name in spec.stored(layer)), strict=True)
        quantizer = None if self.quantization is not None else FORMATS[self.weight_format].quantizer
        if quantizer is None:
            weights = [Dense(array.astype(self.dtype, copy=False)) for array in arrays]
        else:
            quantize = quantizer(lambda: max(largest), host.common_dtype(array.dtype for array in arrays))
            try:
                weights = [quantize(array) for array in arrays]
            except ValueError as error:  # input features that are no whole blocks
                name = next(iter(spec.stored(layer)))
                raise CheckpointError(f"{self.tensors.file_of(name)}: {name!r}: {error}") from error
        return dict(zip(modules, weights, strict=True))

    def to_device(self, value: Weight | np.ndarray | None, spec: TensorSpec) -> Weight | jax.Array | None:
        """A projection in the form that the matmul kernel reads; None, any other array, and a projection left
        unquantized in a quantized checkpoint, unchanged. Over devices they are divided as `on_devices` does.
        """

        # For each shape `jnp.asarray` compiles a copy, which a table needs: a CPU would read the mapped file.
        put = jnp.asarray if spec.kind == "table" else jax.device_put

        def formed(value: Weight | np.ndarray | None) -> Weight | jax.Array | None:
            value = jax.tree.map(put, value)
            if not isinstance(value, Weight) or (self.quantization is not None and isinstance(value, Dense)):
                return value
            return kernel_form(value, self.matmul_kernel, self.missing)

        return on_devices(value, spec, self.config.tensor_parallel, formed)

    def _finite(self, name: str) -> tuple[np.ndarray, float]:
        """An unquantized tensor and its largest magnitude; every value is finite in the compute dtype."""
        array = self.tensors[name]
        largest = max_magnitude(self.tensors, name, array)
        if not np.isfinite(np.float32(largest).astype(self.dtype)):  # on the host: no thread waits for the device
            raise CheckpointError(
                f"{self.tensors.file_of(name)}: {name!r} holds a value of magnitude {largest:.3g}, which "
                f"{jnp.dtype(self.dtype).name} cannot hold"
            )
        return array, largest

    def refuse_other_head(self) -> None:
        """Raise CheckpointError if a tied model stores its head once more and that differs from its embedding."""
        if not self.config.tie_word_embeddings or names.LM_HEAD not in self.tensors:
            return
        head, embedding = self.tensors[names.LM_HEAD], self.tensors[names.EMBED]
        is_same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        bits = f"u{head.dtype.itemsize}"
        if not is_same or not np.array_equal(head.view(bits), embedding.view(bits)):
            raise CheckpointError(
                f"{self.tensors.file_of(names.LM_HEAD)}: {names.LM_HEAD!r} differs from {names.EMBED!r}, but "
                "config.json says tie_word_embeddings true"
            )


def max_magnitude(tensors: Tensors, name: str, array: np.ndarray) -> float:
    """Largest |value| of a tensor. Raises CheckpointError naming file and tensor if a value is not finite."""
    try:
        return host.max_magnitude(array.reshape(array.shape[0], -1))
    except ValueError as error:
        raise CheckpointError(f"{tensors.file_of(name)}: {name!r}: {error}") from error


def kernel_form(weight: Weight, matmul_kernel: str, missing: str | None) -> Weight:
    """The weight in the form that `matmul_kernel` reads: unchanged for "xla", packed for "mosaic_gpu", and for "auto"
    packed where the Pallas kernels can run, which is where they miss nothing (`dispatch.missing_for_mosaic_gpu`).

    With "auto" an MXFP4 weight whose exponents span too wide a range for the packed form is left unpacked, with one
    warning.

    Raises ValueError if "mosaic_gpu" cannot run, with the missing requirement, or if the weight is not 4-bit.
    """
    if matmul_kernel == "xla":
        return weight
    if not format_of(weight).packs:
        if matmul_kernel == "auto":
            return weight
        packed = [name.upper() for name, own in FORMATS.items() if own.packs]
        raise ValueError(
            f"matmul_kernel {matmul_kernel!r} needs weights of {' or '.join(packed)}, these are {type(weight).__name__}"
        )
    asked = None if matmul_kernel == "auto" else matmul_kernel
    kernel = dispatch.choose("nvfp4_matmul", asked, missing or missing_for_packing(weight))
    return pack(weight) if kernel == "mosaic_gpu" else weight


def on_devices(
    value: Weight | np.ndarray | jax.Array,
    spec: TensorSpec,
    count: int,
    formed: Callable[[Any], Weight | jax.Array],
) -> Weight | jax.Array:
    """A tensor on `count` devices, divided as `partition` says, so that each gets its part alone.

    Args:
      value: whole, on the host or on a device.
      spec: which one.
      count: devices, T; 1: the default one.
      formed: the form of a weight, or of a part of it, on the device.
    """
    if count == 1:
        return formed(value)
    mesh, division = partition.mesh_of(count), partition.division_of(spec.path)
    if division is None:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
    parts = partition.parts_of(value, division, tuple(spec.part_rows().values()), count)
    parts = [jax.device_put(part, device) for part, device in zip(parts, mesh.devices.flat, strict=True)]
    ready = [formed(part) for part in parts]
    if len({type(part) for part in ready}) > 1:  # one of MXFP4 that cannot be packed
        ready = parts
    if isinstance(ready[0], PackedNvfp4):
        uniform = all(part.uniform for part in ready)
        ready = [dataclasses.replace(part, uniform=uniform) for part in ready]
    return partition.joined(ready, division, mesh)


def _concatenate(parts: list[Weight]) -> Weight:
    """Concatenate the parts of a fused projection: every field has a row for each output feature.

    On the host, because the device would need twice the memory and one more program for each shape.
    """
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
