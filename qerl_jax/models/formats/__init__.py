"""Weight formats of a frozen projection: `Dense`, `Nvfp4`, `Mxfp4`, `Nf4`, and `PackedNvfp4`, the form of NVFP4 and
MXFP4 weights that the kernels read. Each format has a file with its NumPy quantizer.
"""

from __future__ import annotations

from qerl_kernels.formats import Mxfp4, Nvfp4, PackedNvfp4

from qerl_jax.models.formats.dense import Dense, rounded
from qerl_jax.models.formats.nf4 import Nf4

Weight = Dense | Nvfp4 | Mxfp4 | Nf4 | PackedNvfp4
WEIGHT_FORMATS = ("bf16", "nvfp4", "mxfp4", "nf4")

__all__ = ["WEIGHT_FORMATS", "Dense", "Mxfp4", "Nf4", "Nvfp4", "PackedNvfp4", "Weight", "rounded"]
