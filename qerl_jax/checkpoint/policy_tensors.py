"""Checkpoints computed from others, tensor by tensor: a base without quantization, with an adapter merged into it, or
with some tensors replaced. Memory holds the tensor that is asked for, not the model.

Axes: N output features, K input features, R rank.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32
from qerl_kernels.ops import fp32_matmul

from qerl_jax.checkpoint import hf_config, names
from qerl_jax.checkpoint.adapter_reader import AdapterReader
from qerl_jax.checkpoint.reader import WeightReader
from qerl_jax.checkpoint.safetensors import Spec, TensorSource, open_checkpoint
from qerl_jax.models.config import FUSED_PROJECTIONS
from qerl_jax.models.formats import Weight, format_of

_FUSED_WITH = {part: parts for parts in FUSED_PROJECTIONS.values() for part in parts}


class DenseTensors(TensorSource):
    """A policy as an unquantized checkpoint without an adapter: each projection is W, or `W + scale · B A` under an
    adapter, computed in fp32 and rounded once to `dtype`. The norms are the base's.

    Args:
      base: model directory.
      weight_format: format into which an unquantized base was quantized while loading; W is then the quantized value.
      adapter: None: the base alone.
      dtype: dtype of every tensor, bfloat16 or float32.

    Raises CheckpointError for a base whose tensors are not those of its config (`check_names`).
    """

    def __init__(
        self,
        base: Path,
        weight_format: str | None = None,
        adapter: AdapterReader | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ):
        self.config, self.dtype, self._adapter = hf_config.model_config(base), np.dtype(dtype), adapter
        self.quantization = hf_config.stored_quantization(base)
        self._stored = open_checkpoint(base)
        self._quantizes = self.quantization is None and weight_format not in (None, "bf16")
        self._reader = WeightReader(
            self._stored, self.config, self.quantization, weight_format or "bf16", jnp.float32, "xla"
        )
        layers = range(self.config.num_layers)
        self._modules = {
            names.projection(layer, part): (layer, part) for layer in layers for part in self.config.projection_shapes()
        }
        self.names = {dense: name for name in self._stored if (dense := self._dense_name(name)) is not None}
        self._weight = functools.lru_cache(maxsize=2)(self._read_weight)  # o_proj comes between k_proj and q_proj

    def __getitem__(self, name: str) -> np.ndarray:
        if (place := self._modules.get(name.removesuffix(".weight"))) is not None:
            return self._projection(*place)
        return self._stored[self.names[name]].astype(self.dtype)

    def where(self) -> str:
        """The files of the base."""
        return self._stored.where()

    def file_of(self, name: str) -> Path:
        """The base's file from which the tensor is computed."""
        return self._stored.file_of(self.names[name])

    def spec(self, name: str) -> Spec:
        """dtype and shape."""
        place = self._modules.get(name.removesuffix(".weight"))
        shape = self._stored.spec(self.names[name])[1]
        return self.dtype, shape if place is None else self.config.projection_shapes()[place[1]]

    def _dense_name(self, stored: str) -> str | None:
        """Name of a stored tensor here; None for scales, and for buffers that every library computes itself."""
        module, suffix = names.split_projection(stored)
        if module in self._modules and suffix != "bias" and self.quantization is not None:
            layout = self.quantization.layout_of(module)
            if layout is not None:
                return f"{module}.weight" if suffix == layout.codes else None
        return None if names.is_unused(stored) else stored

    def _projection(self, layer: int, part: str) -> np.ndarray:
        # Quantizing takes the parts of a fused projection together, because they share a global scale.
        parts = _FUSED_WITH.get(part, (part,)) if self._quantizes else (part,)
        shapes = self.config.projection_shapes()
        start = sum(shapes[other][0] for other in parts[: parts.index(part)])
        weight = jax.tree.map(lambda rows: rows[start : start + shapes[part][0]], self._weight(layer, parts))
        lora = None if self._adapter is None else self._adapter.lora(layer, part)
        if lora is None:
            return np.asarray(dense_values(weight)).astype(self.dtype)
        return np.asarray(_merged(weight, *lora, self._adapter.config.scale)).astype(self.dtype)

    def _read_weight(self, layer: int, parts: tuple[str, ...]) -> Weight:
        shapes = self.config.projection_shapes()
        return self._reader.projection([(names.projection(layer, part), shapes[part]) for part in parts])


@functools.partial(jax.jit, static_argnums=3)
def _merged(
    weight: Weight, a: Float[ArrayLike, "R K"], b: Float[ArrayLike, "N R"], scale: float
) -> Float32[Array, "N K"]:
    """`W + scale · B A` in fp32."""
    return dense_values(weight) + scale * fp32_matmul(jnp.asarray(b), jnp.asarray(a))


@jax.jit
def dense_values(weight: Weight) -> Float32[Array, "N K"]:
    """The values of a projection on the host, dense or 4-bit in its canonical form."""
    return format_of(weight).values(weight)


class Replaced(TensorSource):
    """A checkpoint with fp32 values in the place of some tensors, in `dtype`."""

    def __init__(self, tensors: TensorSource, values: Mapping[str, np.ndarray], dtype: DTypeLike = np.float32):
        self.names = self._tensors = tensors
        self._values, self._dtype = values, np.dtype(dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._values[name].astype(self._dtype) if name in self._values else self._tensors[name]

    def where(self) -> str:
        """The files of the checkpoint."""
        return self._tensors.where()

    def file_of(self, name: str) -> Path:
        """The file of the checkpoint's own tensor."""
        return self._tensors.file_of(name)

    def spec(self, name: str) -> Spec:
        """dtype and shape."""
        dtype, shape = self._tensors.spec(name)
        return (self._dtype if name in self._values else dtype), shape
