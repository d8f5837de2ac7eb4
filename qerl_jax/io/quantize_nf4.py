"""Quantize a checkpoint to NF4, byte for byte as transformers saves it with bitsandbytes 0.50.2 on a CPU.

Without double quantization.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qerl_jax.io import bitsandbytes
from qerl_jax.io.quantize_blocks import BlockWriter
from qerl_jax.io.safetensors import DTYPES, Spec
from qerl_jax.models.formats import nf4


class Nf4Writer(BlockWriter):
    """In a file all absmax come before the codes, and are computed once more with these: keeping them would take memory
    in proportion to the shard.
    """

    @staticmethod
    def quantization_config(dtype: str) -> dict[str, Any]:
        """That of transformers."""
        return bitsandbytes.quantization_config(dtype)

    def parts(self, dtype: np.dtype, shape: tuple[int, ...]) -> dict[str, Spec]:
        """Codes, absmax, and the two tensors by which bitsandbytes knows the format."""
        n, k = shape
        nf4.check_input_features(n, k)
        return {
            bitsandbytes.WEIGHT: (DTYPES["U8"], (n * k // 2, 1)),
            bitsandbytes.ABSMAX: (DTYPES["F32"], (n * k // nf4.NF4_BLOCK,)),
            bitsandbytes.QUANT_MAP: (DTYPES["F32"], (len(nf4.NF4_VALUES),)),
            bitsandbytes.STATE: (DTYPES["U8"], bitsandbytes.quant_state(shape, dtype.name).shape),
        }

    def part(self, source: str, suffix: str) -> np.ndarray:
        """One of the four."""
        if suffix == bitsandbytes.QUANT_MAP:
            return np.asarray(nf4.NF4_VALUES, np.float32)
        if suffix == bitsandbytes.STATE:
            dtype, shape = self.tensors.spec(source)
            return bitsandbytes.quant_state(shape, dtype.name)
        weight = self.tensors[source]
        if suffix == bitsandbytes.ABSMAX:
            return nf4.block_absmax(weight).reshape(-1)
        return nf4.quantize(weight).codes.reshape(-1, 1)
