"""Tensors of a checkpoint, checked and brought into a weight format: the reading half of `io.load`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from qerl_kernels import dispatch
from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK
from qerl_kernels.nvfp4_matmul.packing import missing_for_packing, pack

from qerl_jax.io import bitsandbytes, names
from qerl_jax.io.quantize import max_magnitude
from qerl_jax.io.safetensors import FLOATS, CheckpointError, TensorSource
from qerl_jax.io.tensor_names import refuse_other_form
from qerl_jax.models.formats import Dense, Mxfp4, Nf4, Nvfp4, Weight, mxfp4, nf4, nvfp4

_BLOCK = {"nvfp4": NVFP4_BLOCK, "mxfp4": MXFP4_BLOCK, "nf4": nf4.NF4_BLOCK, "bf16": 1}
_E4M3_LARGEST, _E8M0_NAN = 0x7E, 0xFF
# Bounds of a global scale as a multiplier: normal in fp32, and code · scale · multiplier at most its largest number.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max) / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)


class WeightReader:
    """Reads the tensors of a checkpoint by name, checks them, and remembers which were used.

    Args:
      tensors: the checkpoint.
      scheme: layout of its quantized weights, a key of `names.QUANTIZED`; None if it is not quantized.
      weight_format: format into which unquantized projections are quantized, one of `WEIGHT_FORMATS`.
      dtype: compute dtype, the dtype of dense weights and vectors.
      matmul_kernel: as in `load_policy`.

    All methods raise CheckpointError for a missing, misshapen or non-finite tensor, with its file and name.
    """

    def __init__(
        self, tensors: TensorSource, scheme: str | None, weight_format: str, dtype: DTypeLike, matmul_kernel: str
    ):
        self.tensors, self.scheme, self.weight_format = tensors, scheme, weight_format
        self.dtype, self.matmul_kernel = dtype, matmul_kernel
        self.used: set[str] = set()

    def _read(self, name: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> np.ndarray:
        self.tensors.require(name)
        self.used.add(name)
        (dtype, found), where = self.tensors.spec(name), self.tensors.file_of(name)
        if found != shape:
            raise CheckpointError(f"{where}: {name!r} has shape {list(found)}, the config asks for {list(shape)}")
        if dtype.name not in kinds:
            raise CheckpointError(f"{where}: {name!r} has dtype {dtype.name}, expected one of {list(kinds)}")
        return self.tensors[name]

    def _finite(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, float]:
        """An unquantized tensor and its largest magnitude; every value is finite in the compute dtype."""
        array = self._read(name, shape, FLOATS)
        largest = max_magnitude(self.tensors, name, array)
        if not np.isfinite(jnp.asarray(largest, self.dtype)):
            raise CheckpointError(
                f"{self.tensors.file_of(name)}: {name!r} holds a value of magnitude {largest:.3g}, which "
                f"{jnp.dtype(self.dtype).name} cannot hold"
            )
        return array, largest

    def on_host(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An unquantized tensor as it is stored, memory-mapped."""
        return self._finite(name, shape)[0]

    def dense(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """An unquantized tensor on the device, in the compute dtype."""
        return jnp.asarray(self._finite(name, shape)[0]).astype(self.dtype)

    def vector(self, name: str, size: int, dtype: DTypeLike) -> np.ndarray:
        """An unquantized vector on the host."""
        return self._finite(name, (size,))[0].astype(dtype)

    def to_device(self, value: Weight | np.ndarray | None) -> Weight | jax.Array | None:
        """None and a vector unchanged; a projection in the form that the matmul kernel reads."""
        if value is None:
            return None
        weight = jax.tree.map(jnp.asarray, value)
        if isinstance(weight, jax.Array):
            if weight.ndim == 1:
                return weight
            weight = Dense(weight)
        return kernel_form(weight, self.dtype, self.matmul_kernel)

    def projection(self, parts: list[tuple[str, tuple[int, int]]]) -> Weight | np.ndarray:
        """A fused projection on the host, dense or quantized; parts (module name, shape) are concatenated by rows."""
        for module, _ in parts:
            refuse_other_form(self.tensors, module, self.scheme)
        if self.scheme is not None:
            readers = {"nvfp4": self._stored_nvfp4, "mxfp4": self._stored_mxfp4, "nf4": self._stored_nf4}
            read = readers[names.STORED_FORMAT[self.scheme]]
            return _concatenate([read(module, shape) for module, shape in parts])
        arrays, largest = zip(*(self._finite(f"{module}.weight", shape) for module, shape in parts), strict=True)
        if self.weight_format == "bf16":
            return np.concatenate(arrays).astype(self.dtype, copy=False)
        block, k = _BLOCK[self.weight_format], parts[0][1][1]
        if k % block:
            raise ValueError(
                f"{parts[0][0]}: {k} input features are not a multiple of {block}, which {self.weight_format} needs"
            )
        dtype = nvfp4.common_dtype(array.dtype for array in arrays)
        quantize = _quantizer(self.weight_format, max(largest), dtype)
        return _concatenate([quantize(array) for array in arrays])

    def _codes(self, module: str, shape: tuple[int, int]) -> np.ndarray:
        """Two codes a byte. The activation scale for W4A4 inference beside them is unused by weight-only arithmetic."""
        n, k = shape
        codes_name, _, _, activation = (f"{module}.{suffix}" for suffix in names.QUANTIZED[self.scheme])
        if activation in self.tensors:
            self.used.add(activation)
        return self._read(codes_name, (n, k // 2), ("uint8",))

    def _stored_mxfp4(self, module: str, shape: tuple[int, int]) -> Mxfp4:
        codes, (n, k) = self._codes(module, shape), shape
        scale_name = f"{module}.{names.QUANTIZED[self.scheme][1]}"
        exponents = self._read(scale_name, (n, k // MXFP4_BLOCK), ("uint8", "float8_e8m0fnu")).view(np.uint8)
        if exponents.max() == _E8M0_NAN:
            row, column = np.argwhere(exponents == _E8M0_NAN)[0]
            raise CheckpointError(
                f"{self.tensors.file_of(scale_name)}: {scale_name!r}[{row}, {column}] is 255, which is no number"
            )
        return Mxfp4(codes, exponents)

    def _stored_nf4(self, module: str, shape: tuple[int, int]) -> Nf4:
        return bitsandbytes.read_nf4(self.tensors, self._read, module, shape)

    def _stored_nvfp4(self, module: str, shape: tuple[int, int]) -> Nvfp4:
        codes, (n, k) = self._codes(module, shape), shape
        _, scale_name, global_name, _ = (f"{module}.{suffix}" for suffix in names.QUANTIZED[self.scheme])
        scales = self._read(scale_name, (n, k // NVFP4_BLOCK), ("float8_e4m3fn",))
        divides = self.scheme == "compressed-tensors"
        value = self._read(global_name, (1,) if divides else (), ("float32",)).reshape(-1)
        where = self.tensors.file_of(scale_name)
        if not (np.isfinite(value[0]) and value[0] > 0):
            raise CheckpointError(
                f"{self.tensors.file_of(global_name)}: {global_name!r} is {value[0]}, must be finite and above 0"
            )
        multiplier = 1 / float(value[0]) if divides else float(value[0])
        if not _SMALLEST <= multiplier <= _LARGEST:
            raise CheckpointError(
                f"{self.tensors.file_of(global_name)}: {global_name!r} is {value[0]}, which multiplies weights by "
                f"{multiplier:.3g}; it must lie between {_SMALLEST:.3g} and {_LARGEST:.3g} for them to be numbers"
            )
        bits = np.asarray(scales).view(np.uint8)
        if bits.max() > _E4M3_LARGEST:  # sign bit set, or the NaN 0x7F
            row, column = np.argwhere(bits > _E4M3_LARGEST)[0]
            raise CheckpointError(
                f"{where}: {scale_name!r}[{row}, {column}] is {scales[row, column]}, must be a number of at least 0"
            )
        return Nvfp4(codes, scales, np.full(n, value[0], np.float32), divides)

    def refuse_other_head(self, shape: tuple[int, int]) -> None:
        """Raise CheckpointError if the stored head of a tied model differs from its embedding."""
        head, embedding = (self._read(name, shape, FLOATS) for name in (names.LM_HEAD, names.EMBED))
        bits = f"u{head.dtype.itemsize}"
        if head.dtype != embedding.dtype or not np.array_equal(head.view(bits), embedding.view(bits)):
            raise CheckpointError(
                f"{self.tensors.file_of(names.LM_HEAD)}: {names.LM_HEAD!r} differs from {names.EMBED!r}, but "
                "config.json says tie_word_embeddings true"
            )

    def refuse_unknown(self) -> None:
        """Raise CheckpointError if the checkpoint holds tensors that the model has no place for."""
        unknown = sorted(set(self.tensors) - self.used - {n for n in self.tensors if n.endswith("rotary_emb.inv_freq")})
        if unknown:
            raise CheckpointError(
                f"{self.tensors.file_of(unknown[0])}: {len(unknown)} tensors have no place in the model, "
                f"first {unknown[0]!r}"
            )


def kernel_form(weight: Weight, dtype: DTypeLike, matmul_kernel: str) -> Weight:
    """The weight in the form that `matmul_kernel` reads: unchanged for "xla", packed for "mosaic_gpu", and for "auto"
    packed where the Pallas kernels can run.

    An MXFP4 weight whose exponents span too wide a range for the packed form is left unpacked, with one warning.

    Raises ValueError if "mosaic_gpu" cannot run, with the missing requirement, or if the weight is not 4-bit.
    """
    missing = dispatch.missing_for_mosaic_gpu(dtype)
    if matmul_kernel == "mosaic_gpu":
        if not isinstance(weight, Nvfp4 | Mxfp4):
            raise ValueError(
                f"matmul_kernel {matmul_kernel!r} needs NVFP4 or MXFP4 weights, these are {type(weight).__name__}"
            )
        dispatch.choose("nvfp4_matmul", matmul_kernel, missing)
    if matmul_kernel == "xla" or not isinstance(weight, Nvfp4 | Mxfp4):
        return weight
    return (
        pack(weight)
        if dispatch.choose("nvfp4_matmul", None, missing or missing_for_packing(weight)) == "mosaic_gpu"
        else weight
    )


def _quantizer(weight_format: str, largest: float, dtype: np.dtype) -> Callable[[np.ndarray], Weight]:
    """Quantizer for the parts of a fused projection.

    Args:
      weight_format: "nvfp4", "mxfp4" or "nf4".
      largest: largest magnitude over all parts.
      dtype: their dtype.
    """
    if weight_format == "nvfp4":  # one global scale for the whole fused projection, as llm-compressor writes it
        return functools.partial(nvfp4.quantize, divisor=nvfp4.global_scale(largest, dtype))
    return {"mxfp4": mxfp4.quantize, "nf4": nf4.quantize}[weight_format]


def _concatenate(parts: list[Nvfp4] | list[Mxfp4] | list[Nf4]) -> Weight:
    """Concatenate the parts of a fused projection: every field has a row for each output feature.

    On the host, because the device would need twice the memory and one more program for each shape.
    """
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
