"""Quantize a checkpoint, to NVFP4 byte for byte as llm-compressor does. Memory holds a shard's quantized tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from qerl_jax.io import hf_config, names
from qerl_jax.io.files import atomic_directory
from qerl_jax.io.layout_nvfp4 import NVFP4, QUANTIZATION_CONFIG
from qerl_jax.io.layouts import WRITTEN
from qerl_jax.io.rewrite import check_output, write_checkpoint
from qerl_jax.io.safetensors import FLOATS, CheckpointError, TensorSource, open_checkpoint
from qerl_jax.io.tensor_names import check_names
from qerl_jax.models.config import FUSED_PROJECTIONS, ModelConfig, tensors_of
from qerl_jax.models.formats import nvfp4, quantizer

FORMATS = tuple(WRITTEN)


@runtime_checkable
class Quantizer(Protocol):
    """How the scales of NVFP4 weights are found. `divisors`: the global scale of each module that is quantized."""

    divisors: Mapping[str, np.float32]

    def block_scales(self, module: str, weight: np.ndarray) -> np.ndarray:
        """The E4M3 scales [n, k/16] of a module's weight [n, k]."""
        ...


@dataclasses.dataclass(frozen=True)
class RoundToNearest:
    """llm-compressor's scales, from the largest magnitudes of tensors and blocks."""

    divisors: Mapping[str, np.float32]

    def block_scales(self, module: str, weight: np.ndarray) -> np.ndarray:
        """`nvfp4.block_scales`, in slices of rows."""
        slices = nvfp4.row_slices(*weight.shape)
        return np.concatenate([nvfp4.block_scales(np.asarray(weight[a:b]), self.divisors[module]) for a, b in slices])


def quantized(quantizer: Quantizer, module: str, weight: np.ndarray) -> nvfp4.Nvfp4:
    """A module's weight [n, k] in NVFP4. Raises ValueError if k is not a multiple of 16."""
    nvfp4.check_input_features(*weight.shape)
    return nvfp4.quantize(weight, quantizer.divisors[module], quantizer.block_scales(module, weight))


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    weight_format: str = "nvfp4",
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> None:
    """Quantize the seven projections of every layer; all other tensors are copied unchanged, shard by shard.

    The bytes and `quantization_config` of NVFP4 are those of llm-compressor 0.14.0.1 (`oneshot` with
    `QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])`, compressed-tensors 0.19.0) on the
    same bf16 or fp32 checkpoint, stored in the dtype that its config.json names. q, k and v share one global scale, and
    so do gate and up: fused kernels need a single one.

    Args:
      src: Hugging Face directory, bf16, fp16 or fp32, single or sharded.
      dst: directory to write, in one atomic step.
      weight_format: "nvfp4"; "mxfp4", in the bytes of compressed-tensors 0.20.0 (`mxfp4-pack-quantized`); or "nf4", in
        those of transformers with bitsandbytes 0.50.2 on a CPU, without double quantization.
      overwrite: replace an existing `dst`.
      progress: called with "scan" and the numbers of layers done and of all layers, then with "quantize" and those of
        tensors.

    Raises:
      FileExistsError: `dst` exists, without `overwrite`; or it is or holds the source, or is no model directory.
      OSError: `dst` cannot be written.
      CheckpointError: the checkpoint is quantized already, incomplete or not finite.
      ValueError: another `weight_format`, or input features that are no whole blocks of it (16, MXFP4 32, NF4 64).
    """
    src, dst = Path(src), Path(dst)
    if weight_format not in FORMATS:
        raise ValueError(f"weight_format {weight_format!r} is not one of {list(FORMATS)}, which can be written")
    check_output([src], dst, overwrite)
    config, raw_config = read_unquantized(src)
    tensors = open_checkpoint(src)
    with atomic_directory(dst) as directory:
        if weight_format == "nvfp4":
            write_quantized(src, directory, tensors, raw_config, config.num_layers, progress)
            return
        check_names(tensors, config, None)
        _write_blocks(weight_format, src, directory, tensors, raw_config, config, progress)


def read_unquantized(src: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Shape and config.json of a model that is to be quantized. Raises CheckpointError for one that is already."""
    config = hf_config.model_config(src)
    if (scheme := hf_config.stored_format(src)) is not None:
        raise CheckpointError(f"{src}: the checkpoint is quantized already ({scheme})")
    return config, hf_config.read_json(src / "config.json")


def write_quantized(
    src: Path,
    directory: Path,
    tensors: TensorSource,
    raw_config: dict[str, Any],
    num_layers: int,
    progress: Callable[[str, int, int], None],
    leave_out: Container[str] = (),
) -> None:
    """Quantize into an empty directory.

    Args:
      src: directory of the other files.
      directory: where to write.
      tensors: an unquantized checkpoint.
      raw_config: its config.json.
      num_layers: L.
      progress: as for `quantize_checkpoint`.
      leave_out: names of files of `src` that are not copied.
    """
    divisors: dict[str, np.float32] = {}
    for layer in range(num_layers):
        divisors |= global_scales(tensors, layer)
        progress("scan", layer + 1, num_layers)
    write_nvfp4(src, directory, tensors, raw_config, RoundToNearest(divisors), progress, leave_out)


def write_nvfp4(
    src: Path,
    directory: Path,
    tensors: TensorSource,
    raw_config: dict[str, Any],
    quantizer: Quantizer,
    progress: Callable[[str, int, int], None],
    leave_out: Container[str] = (),
) -> None:
    """`write_quantized` with the scales of `quantizer`."""

    def convert(name: str) -> dict[str, np.ndarray]:
        module = name.removesuffix(".weight")
        if module not in quantizer.divisors:
            return {name: tensors[name]}
        return NVFP4.stored(module, quantized(quantizer, module, tensors[name]), tensors.spec(name)[0])

    write_checkpoint(
        src,
        directory,
        tensors,
        {**raw_config, "quantization_config": QUANTIZATION_CONFIG},
        convert,
        lambda done: progress("quantize", done, len(tensors)),
        leave_out,
    )


def _write_blocks(
    weight_format: str,
    src: Path,
    directory: Path,
    tensors: TensorSource,
    raw_config: dict[str, Any],
    config: ModelConfig,
    progress: Callable[[str, int, int], None],
) -> None:
    """Quantize to a format whose blocks share nothing, MXFP4 or NF4, so that each weight is quantized alone."""
    layout, quantize = WRITTEN[weight_format], quantizer(weight_format, 0.0, np.float32)
    projections = [spec for spec in tensors_of(config) if spec.kind == "projection"]
    weights = {name for spec in projections for layer in range(config.num_layers) for name in spec.stored(layer)}

    def convert(name: str) -> dict[str, np.ndarray]:
        if name not in weights:
            return {name: tensors[name]}
        try:
            return layout.stored(name.removesuffix(".weight"), quantize(tensors[name]), tensors.spec(name)[0])
        except ValueError as error:
            raise CheckpointError(f"{tensors.file_of(name)}: {name!r}: {error}") from error

    section = layout.quantization_config(tensors.spec(min(weights))[0])
    progress("scan", config.num_layers, config.num_layers)
    write_checkpoint(
        src,
        directory,
        tensors,
        {**raw_config, "quantization_config": section},
        convert,
        lambda done: progress("quantize", done, len(tensors)),
    )


def global_scales(tensors: TensorSource, layer: int) -> dict[str, np.float32]:
    """Global scale of each module of a layer, by name; modules that are fused at run time share one."""
    divisors = {}
    for group in (*FUSED_PROJECTIONS.values(), ("o_proj",), ("down_proj",)):
        modules = [names.projection(layer, part) for part in group]
        magnitude = max(_projection_magnitude(tensors, f"{module}.weight") for module in modules)
        dtype = nvfp4.common_dtype(tensors.spec(f"{module}.weight")[0] for module in modules)
        divisors |= dict.fromkeys(modules, nvfp4.global_scale(magnitude, dtype))
    return divisors


def _projection_magnitude(tensors: TensorSource, name: str) -> float:
    tensors.require(name)
    array = tensors[name]
    if array.ndim != 2 or array.dtype.name not in FLOATS:
        raise CheckpointError(
            f"{tensors.file_of(name)}: {name!r} is {array.dtype.name} {list(array.shape)}, "
            f"expected a matrix of {list(FLOATS)}"
        )
    return max_magnitude(tensors, name, array)


def max_magnitude(tensors: TensorSource, name: str, array: np.ndarray) -> float:
    """Largest |value| of a tensor. Raises CheckpointError naming file and tensor if a value is not finite."""
    try:
        return nvfp4.max_magnitude(array.reshape(array.shape[0], -1))
    except ValueError as error:
        raise CheckpointError(f"{tensors.file_of(name)}: {name!r}: {error}") from error
