"""Quantize a checkpoint to MXFP4, byte for byte as compressed-tensors 0.20.0 stores it (`mxfp4-pack-quantized`)."""

from __future__ import annotations

import numpy as np

from qerl_jax.io import names
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


def quantized_mxfp4(module: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that store a module's weight [n, k]. Raises ValueError as `mxfp4.quantize` does."""
    found = mxfp4.quantize(weight)
    return {f"{module}.{_PACKED}": found.codes, f"{module}.{_SCALE}": found.exponents}
