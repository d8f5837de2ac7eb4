"""Quantize a checkpoint to MXFP4, byte for byte as compressed-tensors 0.20.0 stores it (`mxfp4-pack-quantized`)."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.io import names
from qerl_jax.io.rewrite import write_checkpoint
from qerl_jax.io.safetensors import DTYPES, CheckpointError, Spec, TensorSource
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import mxfp4

_PACKED, _SCALE = names.QUANTIZED["compressed-tensors, MXFP4"][:2]

MXFP4_CONFIG = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": mxfp4.MXFP4_BLOCK,
                "num_bits": 4,
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""`quantization_config` of the library's preset MXFP4A16, lm_head left out."""


def write_mxfp4(
    src: Path,
    directory: Path,
    tensors: TensorSource,
    raw_config: dict[str, Any],
    config: ModelConfig,
    progress: Callable[[str, int, int], None],
) -> None:
    """Quantize the seven projections of every layer into an empty directory.

    Args:
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
    progress("scan", config.num_layers, config.num_layers)
    write_checkpoint(
        src,
        directory,
        tensors,
        lambda members: _ShardWriter(tensors, members, modules),
        {**raw_config, "quantization_config": MXFP4_CONFIG},
        lambda done: progress("quantize", done, len(tensors)),
    )


class _ShardWriter:
    """Makes the tensors of one output shard on request; keeps the projection that was quantized last, because codes and
    scales, all of them bytes, follow each other in a file.
    """

    def __init__(self, tensors: TensorSource, members: list[str], modules: Container[str]):
        self._tensors, self._modules = tensors, modules
        self._module, self._weight = "", None
        self.specs: dict[str, Spec] = {}
        for name in members:
            dtype, shape = tensors.spec(name)
            module = name.removesuffix(".weight")
            if module not in modules:
                self.specs[name] = (dtype, shape)
                continue
            n, k = shape
            mxfp4.check_input_features(n, k)
            self.specs[f"{module}.{_PACKED}"] = (DTYPES["U8"], (n, k // 2))
            self.specs[f"{module}.{_SCALE}"] = (DTYPES["U8"], (n, k // mxfp4.MXFP4_BLOCK))

    def tensor(self, name: str) -> np.ndarray:
        """A tensor of `specs`."""
        module, _, suffix = name.rpartition(".")
        if module not in self._modules or suffix not in (_PACKED, _SCALE):
            return self._tensors[name]
        if module != self._module:
            source = f"{module}.weight"
            try:
                self._module, self._weight = module, mxfp4.quantize(self._tensors[source])
            except ValueError as error:
                raise CheckpointError(f"{self._tensors.file_of(source)}: {source!r}: {error}") from error
        return self._weight.codes if suffix == _PACKED else self._weight.exponents
