"""Quantize a checkpoint to NF4, byte for byte as transformers saves it with bitsandbytes 0.50.2 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.io import bitsandbytes, names
from qerl_jax.io.rewrite import write_checkpoint
from qerl_jax.io.safetensors import DTYPES, CheckpointError, Spec, TensorSource
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import nf4


def write_nf4(
    src: Path,
    directory: Path,
    tensors: TensorSource,
    raw_config: dict[str, Any],
    config: ModelConfig,
    progress: Callable[[str, int, int], None],
) -> None:
    """Quantize the seven projections of every layer into an empty directory, without double quantization.

    Arguments and errors as for `write_mxfp4`.
    """
    layers = range(config.num_layers)
    modules = frozenset(names.projection(layer, part) for layer in layers for part in config.projection_shapes())
    dtype = tensors.spec(f"{min(modules)}.weight")[0].name
    progress("scan", config.num_layers, config.num_layers)
    write_checkpoint(
        src,
        directory,
        tensors,
        lambda members: _ShardWriter(tensors, members, modules),
        {**raw_config, "quantization_config": bitsandbytes.quantization_config(dtype)},
        lambda done: progress("quantize", done, len(tensors)),
    )


class _ShardWriter:
    """Makes the tensors of one output shard on request. In a file all absmax come before the codes, and are computed
    once more with these: keeping them would take memory in proportion to the shard.
    """

    def __init__(self, tensors: TensorSource, members: list[str], modules: Container[str]):
        self._tensors, self._modules = tensors, modules
        self.specs: dict[str, Spec] = {}
        for name in members:
            dtype, shape = tensors.spec(name)
            module = name.removesuffix(".weight")
            if module not in modules:
                self.specs[name] = (dtype, shape)
                continue
            n, k = shape
            nf4.check_input_features(n, k)
            state = bitsandbytes.quant_state(shape, dtype.name)
            self.specs |= {
                f"{module}.{bitsandbytes.WEIGHT}": (DTYPES["U8"], (n * k // 2, 1)),
                f"{module}.{bitsandbytes.ABSMAX}": (DTYPES["F32"], (n * k // nf4.NF4_BLOCK,)),
                f"{module}.{bitsandbytes.QUANT_MAP}": (DTYPES["F32"], (len(nf4.NF4_VALUES),)),
                f"{module}.{bitsandbytes.STATE}": (DTYPES["U8"], state.shape),
            }

    def tensor(self, name: str) -> np.ndarray:
        """A tensor of `specs`."""
        module, suffix = names.split_projection(name)
        if module not in self._modules or suffix == "bias":
            return self._tensors[name]
        source = f"{module}.weight"
        dtype, shape = self._tensors.spec(source)
        if suffix == bitsandbytes.QUANT_MAP:
            return np.asarray(nf4.NF4_VALUES, np.float32)
        if suffix == bitsandbytes.STATE:
            return bitsandbytes.quant_state(shape, dtype.name)
        try:
            weight = self._tensors[source]
            if suffix == bitsandbytes.ABSMAX:
                return nf4.block_absmax(weight).reshape(-1)
            return nf4.quantize(weight).codes.reshape(-1, 1)
        except ValueError as error:
            raise CheckpointError(f"{self._tensors.file_of(source)}: {source!r}: {error}") from error
