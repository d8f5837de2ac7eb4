"""Quantize a checkpoint to NVFP4, byte for byte as llm-compressor does, one tensor at a time: memory holds one
projection, whatever the model's size.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qerl_jax.io import hf_config, names
from qerl_jax.io.files import atomic_directory, check_writable, write_json
from qerl_jax.io.safetensors import (
    DTYPES,
    FLOATS,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    Spec,
    Tensors,
    open_checkpoint,
    write_file,
)
from qerl_jax.models.config import FUSED_PROJECTIONS
from qerl_jax.models.formats import nvfp4

_PACKED, _SCALE, _GLOBAL, _ = names.QUANTIZED["compressed-tensors"]

QUANTIZATION_CONFIG = {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": nvfp4.NVFP4_BLOCK,
                "num_bits": 4,
                "observer": "memoryless_minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.float8_e4m3fn",
                "strategy": "tensor_group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "nvfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.19.0",
}


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    weight_format: str = "nvfp4",
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> None:
    """Quantize the seven projections of every layer; all other tensors are copied unchanged, shard by shard.

    The bytes and `quantization_config` are those of llm-compressor 0.14.0.1 (`oneshot` with `QuantizationModifier(
    targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])`, compressed-tensors 0.19.0) on the same bf16 or fp32
    checkpoint, stored in the dtype that its config.json names. q, k and v share one global scale, and so do gate and
    up: fused kernels need a single one.

    Args:
      src: Hugging Face directory, bf16, fp16 or fp32, single or sharded.
      dst: directory to write, in one atomic step.
      weight_format: "nvfp4", the only format with an interchange layout here.
      overwrite: replace an existing `dst`.
      progress: called with "scan" and the numbers of layers done and of all layers, then with "quantize" and those of
        tensors.

    Raises:
      FileExistsError: `dst` exists, without `overwrite`; or it is or holds the source, or is no model directory.
      OSError: `dst` cannot be written.
      CheckpointError: the checkpoint is quantized already, incomplete or not finite.
      ValueError: `weight_format` is not "nvfp4", or the input features are not a multiple of 16.
    """
    src, dst = Path(src), Path(dst)
    if weight_format != "nvfp4":
        raise ValueError(
            f"weight_format {weight_format!r} has no checkpoint layout; quantize_checkpoint writes 'nvfp4'"
        )
    if os.path.lexists(dst):
        if not overwrite:
            raise FileExistsError(f"{dst} already exists; --overwrite replaces it")
        _refuse_to_replace(src, dst)
    check_writable(dst.parent, "the directory of the output")
    config = hf_config.model_config(src)
    where = src / "config.json"
    raw_config = hf_config.read_json(where)
    if hf_config.quantization_format(raw_config, str(where)):
        raise CheckpointError(
            f"{where}: the checkpoint is quantized already ({raw_config['quantization_config'].get('quant_method')})"
        )
    tensors = open_checkpoint(src)
    divisors = _global_scales(tensors, config.num_layers, progress)

    shards: dict[str, list[str]] = {}
    for name in tensors:
        shards.setdefault(tensors.file_of(name).name, []).append(name)
    with atomic_directory(dst) as directory:
        weight_map, size, done = {}, 0, 0
        for shard, members in sorted(shards.items()):
            writer = _ShardWriter(tensors, members, divisors)
            write_file(directory / shard, writer.specs, writer.tensor)
            weight_map |= dict.fromkeys(writer.specs, shard)
            size += sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in writer.specs.values())
            done += len(members)
            progress("quantize", done, len(tensors))
        if set(shards) != {SINGLE_FILE}:
            write_json(
                directory / INDEX_FILE,
                {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
            )
        _copy_rest(src, directory)
        write_json(directory / "config.json", {**raw_config, "quantization_config": QUANTIZATION_CONFIG})


def _refuse_to_replace(src: Path, dst: Path) -> None:
    """Raise FileExistsError if replacing `dst` would delete the source, or anything but a model's files."""
    real = dst.resolve()
    sources = [src.resolve(), *(file.resolve() for file in (src.iterdir() if src.is_dir() else ()))]
    inside = [path for path in sources if path.is_relative_to(real)]
    if inside:
        raise FileExistsError(f"{dst} is or holds the source {inside[0]}: name another directory")
    names = {path.name for path in dst.iterdir()} if dst.is_dir() else set()
    if "config.json" not in names or not names & {SINGLE_FILE, INDEX_FILE}:
        raise FileExistsError(
            f"{dst} is no model directory with config.json and {SINGLE_FILE} or {INDEX_FILE}: --overwrite does not "
            "replace it"
        )
    folders = sorted(path.name for path in dst.iterdir() if path.is_dir())
    if folders:
        raise FileExistsError(f"{dst} also holds the directory {folders[0]!r}: --overwrite does not delete it")


def _global_scales(tensors: Tensors, layers: int, progress: Callable) -> dict[str, np.float32]:
    """Global scale of each module, by name; modules that are fused at run time share one."""
    groups = [*FUSED_PROJECTIONS.values(), ("o_proj",), ("down_proj",)]
    divisors = {}
    for layer in range(layers):
        for group in groups:
            modules = [names.projection(layer, part) for part in group]
            magnitude = max(_projection_magnitude(tensors, f"{module}.weight") for module in modules)
            dtype = nvfp4.common_dtype(tensors.spec(f"{module}.weight")[0] for module in modules)
            divisor = nvfp4.global_scale(magnitude, dtype)
            divisors |= dict.fromkeys(modules, divisor)
        progress("scan", layer + 1, layers)
    return divisors


def _projection_magnitude(tensors: Tensors, name: str) -> float:
    tensors.require(name)
    array = tensors[name]
    if array.ndim != 2 or array.dtype.name not in FLOATS:
        raise CheckpointError(
            f"{tensors.file_of(name)}: {name!r} is {array.dtype.name} {list(array.shape)}, "
            f"expected a matrix of {list(FLOATS)}"
        )
    return max_magnitude(tensors, name, array)


def max_magnitude(tensors: Tensors, name: str, array: np.ndarray) -> float:
    """Largest |value| of a tensor. Raises CheckpointError naming file and tensor if a value is not finite."""
    try:
        return nvfp4.max_magnitude(array.reshape(array.shape[0], -1))
    except ValueError as error:
        raise CheckpointError(f"{tensors.file_of(name)}: {name!r}: {error}") from error


class _ShardWriter:
    """Makes the tensors of one output shard on request; keeps only the projection that was quantized last."""

    def __init__(self, tensors: Tensors, members: list[str], divisors: dict[str, np.float32]):
        self._tensors, self._divisors = tensors, divisors
        self._module, self._weight = "", None
        self.specs: dict[str, Spec] = {}
        for name in members:
            dtype, shape = tensors.spec(name)
            module = name.removesuffix(".weight")
            if module not in divisors:
                self.specs[name] = (dtype, shape)
                continue
            n, k = shape
            self.specs[f"{module}.{_PACKED}"] = (DTYPES["U8"], (n, k // 2))
            self.specs[f"{module}.{_SCALE}"] = (DTYPES["F8_E4M3"], (n, k // nvfp4.NVFP4_BLOCK))
            self.specs[f"{module}.{_GLOBAL}"] = (DTYPES["F32"], (1,))

    def tensor(self, name: str) -> np.ndarray:
        if name in self._tensors and name.removesuffix(".weight") not in self._divisors:
            return self._tensors[name]
        module, suffix = name.rsplit(".", 1)
        if suffix == _GLOBAL:
            return self._divisors[module].reshape(1)
        if module != self._module:  # codes and scales follow each other in the file
            self._module, self._weight = (
                module,
                nvfp4.quantize(self._tensors[f"{module}.weight"], self._divisors[module]),
            )
        return self._weight.codes if suffix == _PACKED else self._weight.scales


def _copy_rest(src: Path, directory: Path) -> None:
    """Copy tokenizer, generation config and licence: every file without weights."""
    for file in src.iterdir():
        if (
            file.is_file()
            and file.suffix not in (".safetensors", ".bin", ".npz", ".pt", ".pth")
            and file.name not in ("config.json", INDEX_FILE)
        ):
            shutil.copyfile(file, directory / file.name)
