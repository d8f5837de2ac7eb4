"""How checkpoints store quantized projections: one `Layout` for each, in a file for each weight format.

A new one states the tensors of a projection, reads and checks their values, and knows itself by config.json, which also
names the projections that are left unquantized.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from qerl_jax.checkpoint.layout_mxfp4 import MXFP4
from qerl_jax.checkpoint.layout_nf4 import NF4
from qerl_jax.checkpoint.layout_nvfp4 import MODELOPT, NVFP4
from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors
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

    def expected(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> Expected:
        """The tensors that store a module."""
        ...

    def read(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> Weight:
        """A module from tensors as `expected`. Raises CheckpointError for values that are no weights."""
        ...

    def stored(self, module: str, weight: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
        """The tensors that store a module's weight, given in its canonical form; it was quantized from `dtype`."""
        ...

    def quantization_config(self, dtype: np.dtype, ignored: Sequence[str]) -> dict[str, Any]:
        """That of config.json, where the projections `ignored` are left unquantized."""
        ...


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (NVFP4, MODELOPT, MXFP4, NF4)}
WRITTEN: dict[str, Layout] = {layout.weight_format: layout for layout in (NVFP4, MXFP4, NF4)}
"""The layout in which `quantize` writes each weight format."""


# Of compressed-tensors and ModelOpt, of ModelOpt's own file, and of bitsandbytes.
_IGNORED = ("ignore", "exclude_modules", "llm_int8_skip_modules", "modules_to_not_convert")


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What a `quantization_config` says.

    Attributes:
      layout: of the quantized projections.
      ignored: names of the modules left unquantized: a module or the end of its name, one that holds it, a pattern with
        asterisks (ModelOpt) or "re:" and a regular expression that its beginning matches (compressed-tensors).
    """

    layout: Layout
    ignored: tuple[str, ...] = ()

    def layout_of(self, module: str) -> Layout | None:
        """That of a projection; None: it is not quantized."""
        return None if any(_matches(name, module) for name in self.ignored) else self.layout


def _matches(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    if "*" in name:
        return fnmatch.fnmatchcase(module, name)
    return f".{module}".endswith(f".{name}") or module.startswith(f"{name}.")


def quantization_of(section: Mapping[str, Any], where: str) -> Quantization:
    """What a `quantization_config` describes. Raises CheckpointError for any other scheme, and for names of unquantized
    modules that are none; `where` names the file.
    """
    for layout in LAYOUTS.values():
        if layout.describes(section, where):
            return Quantization(layout, _ignored(section, where))
    found = {key: section[key] for key in ("quant_method", "format", "quant_algo") if key in section}
    raise CheckpointError(f"{where}: quantization is {shown(found)}; supported are {list(LAYOUTS)}")


def _ignored(section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    nested = section.get("quantization")
    names = []
    for part in (section, nested if isinstance(nested, dict) else {}):
        for key in _IGNORED:
            value = part.get(key) or []
            if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
                raise CheckpointError(f"{where}: {key} is {shown(value)}, must be a list of modules")
            names += value
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(f"{where}: {shown(name)} is no regular expression: {error}") from error
    return tuple(names)
