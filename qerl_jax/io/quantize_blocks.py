"""Quantize a checkpoint to a format whose blocks share nothing (MXFP4, NF4), so that each weight is quantized alone."""

from __future__ import annotations

import abc
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.io import names
from qerl_jax.io.rewrite import write_checkpoint
from qerl_jax.io.safetensors import CheckpointError, Spec, TensorSource
from qerl_jax.models.config import ModelConfig


class BlockWriter(abc.ABC):
    """Makes the tensors of one output shard on request.

    Args:
      tensors: the unquantized checkpoint.
      members: its tensors in this shard.
      modules: the projections to be quantized.
    """

    def __init__(self, tensors: TensorSource, members: list[str], modules: Container[str]):
        self.tensors, self._modules = tensors, modules
        self.specs: dict[str, Spec] = {}
        for name in members:
            spec, module = tensors.spec(name), name.removesuffix(".weight")
            if module in modules:
                self.specs |= {f"{module}.{suffix}": part for suffix, part in self.parts(*spec).items()}
            else:
                self.specs[name] = spec

    @staticmethod
    @abc.abstractmethod
    def quantization_config(dtype: str) -> dict[str, Any]:
        """That of config.json, for weights that were stored in `dtype`."""

    @abc.abstractmethod
    def parts(self, dtype: np.dtype, shape: tuple[int, ...]) -> dict[str, Spec]:
        """Suffix -> tensor that stores a weight. Raises ValueError for input features that are no whole blocks."""

    @abc.abstractmethod
    def part(self, source: str, suffix: str) -> np.ndarray:
        """One of them, of the weight named `source`. Raises ValueError for a value that is not finite."""

    def tensor(self, name: str) -> np.ndarray:
        """A tensor of `specs`."""
        module, suffix = names.split_projection(name)
        if module not in self._modules or suffix == "bias":
            return self.tensors[name]
        source = f"{module}.weight"
        try:
            return self.part(source, suffix)
        except ValueError as error:
            raise CheckpointError(f"{self.tensors.file_of(source)}: {source!r}: {error}") from error


def write_blocks(
    writer: type[BlockWriter],
    src: Path,
    directory: Path,
    tensors: TensorSource,
    raw_config: dict[str, Any],
    config: ModelConfig,
    progress: Callable[[str, int, int], None],
) -> None:
    """Quantize the seven projections of every layer into an empty directory.

    Args:
      writer: the format.
      src: directory of the other files.
      directory: where to write.
      tensors: an unquantized checkpoint, whose names and shapes are those of `config`.
      raw_config: its config.json.
      config: its shape.
      progress: called with "scan" and the number of layers, of which none needs to be scanned because blocks share
        nothing; then with "quantize" and the numbers of tensors done and of all.

    Raises CheckpointError for a value that is not finite, ValueError for input features that are no whole blocks.
    """
    layers = range(config.num_layers)
    modules = frozenset(names.projection(layer, part) for layer in layers for part in config.projection_shapes())
    dtype = tensors.spec(f"{min(modules)}.weight")[0].name
    progress("scan", config.num_layers, config.num_layers)
    write_checkpoint(
        src,
        directory,
        tensors,
        lambda members: writer(tensors, members, modules),
        {**raw_config, "quantization_config": writer.quantization_config(dtype)},
        lambda done: progress("quantize", done, len(tensors)),
    )
