"""Quantize a checkpoint to MXFP4, byte for byte as compressed-tensors 0.20.0 stores it (`mxfp4-pack-quantized`)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from qerl_jax.io import names
from qerl_jax.io.quantize_blocks import BlockWriter
from qerl_jax.io.safetensors import DTYPES, Spec, TensorSource
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


class Mxfp4Writer(BlockWriter):
    """Keeps the projection that was quantized last: codes and scales, all of them bytes, follow each other."""

    def __init__(self, tensors: TensorSource, members: list[str], modules: Container[str]):
        super().__init__(tensors, members, modules)
        self._source, self._weight = "", None

    @staticmethod
    def quantization_config(dtype: str) -> dict[str, Any]:
        """That of compressed-tensors, whatever the dtype."""
        del dtype
        return MXFP4_CONFIG

    def parts(self, dtype: np.dtype, shape: tuple[int, ...]) -> dict[str, Spec]:
        """Codes and exponents."""
        n, k = shape
        mxfp4.check_input_features(n, k)
        return {_PACKED: (DTYPES["U8"], (n, k // 2)), _SCALE: (DTYPES["U8"], (n, k // mxfp4.MXFP4_BLOCK))}

    def part(self, source: str, suffix: str) -> np.ndarray:
        """One of the two."""
        if source != self._source:
            self._source, self._weight = source, mxfp4.quantize(self.tensors[source])
        return self._weight.codes if suffix == _PACKED else self._weight.exponents
