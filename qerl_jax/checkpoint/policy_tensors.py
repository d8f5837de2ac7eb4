"""Checkpoints computed from others, tensor by tensor: a base without quantization, with an adapter merged into it, or
with some tensors replaced. Memory holds the tensor that is asked for, not the model.

Axes: N output features, K input features, R rank.
"""

from __future__ import annotations

import functools
import itertools
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
from qerl_jax.checkpoint.safetensors import Entry, Tensors, open_checkpoint
from qerl_jax.models.config import TensorSpec
from qerl_jax.models.formats import Weight, format_of


def dense_tensors(
    base: Path,
    weight_format: str | None = None,
    adapter: AdapterReader | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> Tensors:
    """A policy as an unquantized checkpoint without an adapter: each projection is W, or `W + scale · B A` under an
    adapter, computed in fp32 and rounded once to `dtype`. The norms are the base's.

    Args:
      base: model directory.
      weight_format: format into which an unquantized base was quantized while loading; W is then the quantized value.
      adapter: None: the base alone.
      dtype: dtype of every tensor, bfloat16 or float32.

    Raises CheckpointError for a base whose tensors are not those of its config (`check_names`).
    """
    config, quantization = hf_config.model_config(base), hf_config.stored_quantization(base)
    stored, dtype = open_checkpoint(base), np.dtype(dtype)
    reader = WeightReader(stored, config, quantization, weight_format or "bf16", jnp.float32, "xla")
    parts = functools.lru_cache(maxsize=1)(reader.parts)  # once for all of a fused projection

    def projection(spec: TensorSpec, layer: int, module: str) -> np.ndarray:
        weight = parts(spec, layer)[module]
        lora = None if adapter is None else adapter.lora(layer, module.rpartition(".")[2])
        values = dense_values(weight) if lora is None else _merged(weight, *lora, adapter.config.scale)
        return np.asarray(values).astype(dtype)

    def cast(entry: Entry) -> Entry:
        return entry._replace(dtype=dtype, read=lambda: entry.read().astype(dtype))

    entries = {name: cast(entry) for name, entry in stored.entries.items() if not names.is_unused(name)}
    for layer, spec in itertools.product(range(config.num_layers), config.projections()):
        for module, shape in zip(spec.modules(layer), spec.stored(layer).values(), strict=True):
            layout = quantization and quantization.layout_of(module)
            file = stored.file_of(f"{module}.{layout.codes if layout else 'weight'}")
            if layout:
                scales = (f"{module}.{suffix}" for suffix in layout.unused)
                for name in (*layout.expected(stored, module, shape), *scales):
                    entries.pop(name, None)
            entries[f"{module}.weight"] = Entry(file, dtype, shape, functools.partial(projection, spec, layer, module))
    return Tensors(entries, stored.where)


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


def replaced(tensors: Tensors, values: Mapping[str, np.ndarray], dtype: DTypeLike = np.float32) -> Tensors:
    """A checkpoint with fp32 values in the place of some tensors, in `dtype`."""

    def entry(name: str, value: np.ndarray) -> Entry:
        return tensors.entries[name]._replace(dtype=np.dtype(dtype), read=lambda: value.astype(dtype))

    own = {name: entry(name, value) for name, value in values.items()}
    return Tensors({**tensors.entries, **own}, tensors.where)
