"""How checkpoints store quantized projections: one `Layout` for each, in a file for each weight format.

A new one states the tensors of a projection, reads and checks their values, and knows itself by config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from qerl_jax.checkpoint.layout_mxfp4 import MXFP4
from qerl_jax.checkpoint.layout_nf4 import NF4
from qerl_jax.checkpoint.layout_nvfp4 import MODELOPT, NVFP4
from qerl_jax.checkpoint.safetensors import CheckpointError, TensorSource
from qerl_jax.messages import shown
from qerl_jax.models.formats import Weight

Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Shape and possible dtypes of tensors by name."""


@runtime_checkable
class Layout(Protocol):
    """The tensors of a quantized projection X of [n, k].

    Attributes:
      name: of the layout, in messages and as a key of `LAYOUTS`.
      weight_format: one of `WEIGHT_FORMATS`.
      codes: suffix of the tensor with the codes, which takes the place of `X.weight`.
      scales: suffix of the block scales, which no unquantized projection has.
      unused: suffixes of tensors that may be there and are not read.
    """

    name: str
    weight_format: str
    codes: str
    scales: str
    unused: tuple[str, ...]

    def describes(self, section: Mapping[str, Any], where: str) -> bool:
        """Whether `quantization_config` names this layout. Raises CheckpointError where it does, with weights of
        another meaning; `where` names the file.
        """
        ...

    def expected(self, tensors: TensorSource, module: str, shape: tuple[int, int]) -> Expected:
        """The tensors that store a module."""
        ...

    def read(self, tensors: TensorSource, module: str, shape: tuple[int, int]) -> Weight:
        """A module from tensors as `expected`. Raises CheckpointError for values that are no weights."""
        ...


@runtime_checkable
class WrittenLayout(Layout, Protocol):
    """A layout that `quantize` writes."""

    def stored(self, module: str, weight: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
        """The tensors that store a module's weight, given in its canonical form; it was quantized from `dtype`."""
        ...

    def quantization_config(self, dtype: np.dtype) -> dict[str, Any]:
        """That of config.json."""
        ...


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (NVFP4, MODELOPT, MXFP4, NF4)}
WRITTEN: dict[str, WrittenLayout] = {}
"""The layout in which each weight format is written: its first."""
for _layout in LAYOUTS.values():
    if isinstance(_layout, WrittenLayout):
        WRITTEN.setdefault(_layout.weight_format, _layout)


def layout_of(section: Mapping[str, Any], where: str) -> str:
    """The key in `LAYOUTS` that a `quantization_config` describes. Raises CheckpointError for any other scheme."""
    for name, layout in LAYOUTS.items():
        if layout.describes(section, where):
            return name
    found = {key: section[key] for key in ("quant_method", "format", "quant_algo") if key in section}
    raise CheckpointError(f"{where}: quantization is {shown(found)}; supported are {list(LAYOUTS)}")
