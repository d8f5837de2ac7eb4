"""Weight formats of a frozen projection, a file and a line of `FORMATS` for each; how checkpoints store them is in
`checkpoint.layouts`. `PackedNvfp4` is the form of NVFP4 and MXFP4 weights that the kernels read.
"""

from __future__ import annotations

import functools
import operator

from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4, Nvfp4, PackedNvfp4

from qerl_jax.models.formats import dense, mxfp4, nf4, nvfp4
from qerl_jax.models.formats.dense import Dense
from qerl_jax.models.formats.format import Format
from qerl_jax.models.formats.nf4 import Nf4

FORMATS: dict[str, Format] = {"bf16": dense.FORMAT, "nvfp4": nvfp4.FORMAT, "mxfp4": mxfp4.FORMAT, "nf4": nf4.FORMAT}
"""By the names of `weight_format`; "bf16" is the compute dtype, fp32 in an fp32 model."""

WEIGHT_FORMATS = tuple(FORMATS)
Weight = functools.reduce(operator.or_, (own.weight for own in FORMATS.values())) | PackedNvfp4
_OF = {own.weight: own for own in FORMATS.values()}

__all__ = [
    "FORMATS",
    "WEIGHT_FORMATS",
    "Dense",
    "Format",
    "Mxfp4",
    "Nf4",
    "Nvfp4",
    "PackedNvfp4",
    "Weight",
    "format_name",
    "format_of",
]


def format_of(weight: Weight) -> Format:
    """The format of a weight that is not packed."""
    return _OF[type(weight)]


def format_name(weight: Weight) -> str:
    """The name of a weight's format, one of `WEIGHT_FORMATS`."""
    kind = {NVFP4_BLOCK: Nvfp4, MXFP4_BLOCK: Mxfp4}[weight.block] if isinstance(weight, PackedNvfp4) else type(weight)
    return next(name for name, own in FORMATS.items() if own.weight is kind)
