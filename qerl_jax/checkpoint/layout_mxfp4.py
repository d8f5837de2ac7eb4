"""MXFP4 as compressed-tensors 0.20.0 stores it (`mxfp4-pack-quantized`)."""

from __future__ import annotations

import dataclasses

import numpy as np
from qerl_kernels.formats import MXFP4_BLOCK, Mxfp4

from qerl_jax.checkpoint.layout_nvfp4 import Fp4Layout
from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors

_E8M0_NAN = 0xFF


@dataclasses.dataclass(frozen=True)
class _Mxfp4Layout(Fp4Layout):
    """A `Layout` of codes and E8M0 exponents."""

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


MXFP4 = _Mxfp4Layout(
    "compressed-tensors, MXFP4",
    "mxfp4",
    MXFP4_BLOCK,
    weights={"scale_dtype": "torch.uint8", "strategy": "group"},
)
"""With the `quantization_config` of the library's preset MXFP4A16, lm_head left out."""
