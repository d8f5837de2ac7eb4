"""MXFP4 as compressed-tensors 0.20.0 stores it (`mxfp4-pack-quantized`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from qerl_kernels.formats import MXFP4_BLOCK, Mxfp4

from qerl_jax.checkpoint.layout_nvfp4 import describes_compressed
from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors

_E8M0_NAN = 0xFF

MXFP4_CONFIG = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": MXFP4_BLOCK,
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


@dataclasses.dataclass(frozen=True)
class _Mxfp4Layout:
    """A `Layout` of codes and E8M0 exponents."""

    name: str = "compressed-tensors, MXFP4"
    weight_format: str = "mxfp4"
    codes: str = "weight_packed"
    scales: str = "weight_scale"
    unused: tuple[str, ...] = ("input_global_scale",)

    def describes(self, section: Mapping[str, Any], where: str) -> bool:
        return describes_compressed(section, where, "mxfp4-pack-quantized", MXFP4_BLOCK)

    def expected(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> dict:
        n, k = shape
        return {
            f"{module}.{self.codes}": ((n, k // 2), ("uint8",)),
            f"{module}.{self.scales}": ((n, k // MXFP4_BLOCK), ("uint8", "float8_e8m0fnu")),
        }

    def read(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> Mxfp4:
        name = f"{module}.{self.scales}"
        exponents = tensors[name].view(np.uint8)
        if exponents.max() == _E8M0_NAN:
            row, column = np.argwhere(exponents == _E8M0_NAN)[0]
            raise CheckpointError(f"{tensors.file_of(name)}: {name!r}[{row}, {column}] is 255, which is no number")
        return Mxfp4(tensors[f"{module}.{self.codes}"], exponents)

    def stored(self, module: str, weight: Mxfp4, dtype: np.dtype) -> dict[str, np.ndarray]:
        return {f"{module}.{self.codes}": weight.codes, f"{module}.{self.scales}": weight.exponents}

    def quantization_config(self, dtype: np.dtype, ignored: Sequence[str]) -> dict[str, Any]:
        return {**MXFP4_CONFIG, "ignore": [*ignored, *MXFP4_CONFIG["ignore"]]}


MXFP4 = _Mxfp4Layout()
