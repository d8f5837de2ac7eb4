"""Quantize a checkpoint, to NVFP4 byte for byte as llm-compressor does. Memory holds a shard's quantized tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.atomic import atomic_directory
from qerl_jax.checkpoint import hf_config
from qerl_jax.checkpoint.layouts import WRITTEN
from qerl_jax.checkpoint.reader import WeightReader
from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors, open_checkpoint
from qerl_jax.checkpoint.write import check_output, write_checkpoint
from qerl_jax.models.config import PROJECTIONS, ModelConfig


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    weight_format: str = "nvfp4",
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ignore: Collection[str] = (),
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
      progress: called with the numbers of tensors done and of all.
      ignore: projections that are copied unquantized in every layer, such as ("q_proj", "k_proj", "v_proj"); those that
        are fused here together.

    Raises:
      FileExistsError: `dst` exists, without `overwrite`; or it is or holds the source, or is no model directory.
      OSError: `dst` cannot be written.
      CheckpointError: the checkpoint is quantized already, incomplete or not finite; or input features are no whole
        blocks of the format (16, MXFP4 32, NF4 64).
      ValueError: another `weight_format`, or `ignore` with another name or a part of a fused projection.
    """
    src, dst = Path(src), Path(dst)
    if weight_format not in WRITTEN:
        raise ValueError(f"weight_format {weight_format!r} is not one of {list(WRITTEN)}, which can be written")
    config = hf_config.model_config(src)
    _refuse_parts(ignore, config)
    check_output([src], dst, overwrite)
    if (quantization := hf_config.stored_quantization(src)) is not None:
        raise CheckpointError(f"{src}: the checkpoint is quantized already ({quantization.layout.name})")
    tensors = open_checkpoint(src)
    with atomic_directory(dst) as directory:
        raw_config = hf_config.read_json(src / "config.json")
        write_quantized(src, directory, tensors, raw_config, config, weight_format, progress, ignore=ignore)


def _refuse_parts(ignore: Collection[str], config: ModelConfig) -> None:
    unknown = sorted(set(ignore) - set(PROJECTIONS))
    if unknown:
        raise ValueError(f"ignore names {unknown[0]!r}, which is not one of {list(PROJECTIONS)}")
    if set(ignore) == set(PROJECTIONS):
        raise ValueError("ignore names all projections, so that nothing would be quantized")
    for parts in (list(spec.part_rows()) for spec in config.projections()):
        named = [part for part in parts if part in ignore]
        if named and len(named) < len(parts):
            raise ValueError(f"ignore names {named} of {parts}, which are one matrix here: name all of them or none")


def write_quantized(
    src: Path,
    directory: Path,
    tensors: Tensors,
    raw_config: dict[str, Any],
    config: ModelConfig,
    weight_format: str = "nvfp4",
    progress: Callable[[int, int], None] = lambda done, total: None,
    leave_out: Container[str] = (),
    ignore: Collection[str] = (),
) -> None:
    """Quantize into an empty directory.

    Args:
      src: directory of the other files.
      directory: where to write.
      tensors: an unquantized checkpoint.
      raw_config: its config.json.
      config: its shape; tensors of other names or shapes are refused (`check_names`).
      weight_format, progress, ignore: as for `quantize_checkpoint`.
      leave_out: names of files of `src` that are not copied.
    """
    layout = WRITTEN[weight_format]
    reader = WeightReader(tensors, config, None, weight_format, np.float32, "xla")
    parts = functools.lru_cache(maxsize=2)(reader.parts)  # o_proj comes between k_proj and q_proj
    projections = [(spec, layer) for layer in range(config.num_layers) for spec in config.projections()]
    kept = [place for place in projections if set(ignore) & place[0].part_rows().keys()]
    places = {name: place for place in projections if place not in kept for name in place[0].stored(place[1])}

    def convert(name: str) -> dict[str, np.ndarray]:
        if name not in places:
            return {name: tensors[name]}
        module = name.removesuffix(".weight")
        return layout.stored(module, parts(*places[name])[module], tensors.entries[name].dtype)

    ignored = [module for spec, layer in kept for module in spec.modules(layer)]
    section = layout.quantization_config(tensors.entries[min(places)].dtype, ignored)
    write_checkpoint(
        src,
        directory,
        tensors,
        {**raw_config, "quantization_config": section},
        convert,
        progress,
        leave_out,
    )
