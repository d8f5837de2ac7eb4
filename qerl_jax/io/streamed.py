"""Logits of a model directory computed while it is read, layer by layer: memory holds one layer.

Axes: B sequences, T tokens, V vocab.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32
from qerl_kernels.ops import fp32_matmul, rms_norm

from qerl_jax.io.adapter_reader import AdapterReader
from qerl_jax.io.load import read_layer
from qerl_jax.io.safetensors import TensorSource
from qerl_jax.io.weights import WeightReader
from qerl_jax.models.attention import padded_attention, rotary_angles
from qerl_jax.models.config import FUSED_PROJECTIONS, LAYER_NORMS, ModelConfig, tensors_of
from qerl_jax.models.lora import Lora
from qerl_jax.models.qwen2 import DecoderLayer

_ROWS = 8192  # rows of the head multiplied together


def streamed_logits(
    tensors: TensorSource,
    model: ModelConfig,
    tokens: Int32[np.ndarray, "B T"],
    scheme: str | None = None,
    weight_format: str | None = None,
    adapter: AdapterReader | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float32[np.ndarray, "B T V"]:
    """fp32 logits of whole sequences in fp32 arithmetic, as `policy_logits` of `load_policy(…, dtype=jnp.float32)`.

    Args:
      tensors: the checkpoint.
      model: its shape.
      tokens: ids without padding.
      scheme: layout of its quantized weights (`hf_config.stored_format`).
      weight_format, adapter: as for `load_policy`.
      progress: called with the number of layers done and of all layers.

    Raises CheckpointError as `load_policy` does.
    """
    reader = WeightReader(tensors, model, scheme, weight_format or "bf16", jnp.float32, "xla")
    x = jnp.asarray(_outside(reader, model, "embed_tokens")[tokens], jnp.float32)
    for layer in range(model.num_layers):
        weights = {name: reader.to_device(value) for name, value in read_layer(reader, model, layer).items()}
        adapters = _adapters(adapter, model, layer)
        if adapter is not None:
            norms = {name: adapter.norm(layer, name) for name in LAYER_NORMS}
            weights |= {name: jnp.asarray(value) for name, value in norms.items() if value is not None}
        x = _run_layer(model, DecoderLayer(model, weights, adapters, jnp.dtype(jnp.float32)), x)
        progress(layer + 1, model.num_layers)
    logits = _head_logits(reader, model, x)
    reader.refuse_other_head()
    return logits


def _outside(reader: WeightReader, model: ModelConfig, name: str) -> np.ndarray:
    """A tensor outside the layers, on the host."""
    return next(reader.read(spec) for spec in tensors_of(model) if spec.name == name)


def _head_logits(reader: WeightReader, model: ModelConfig, x: Float32[Array, "B T D"]) -> Float32[np.ndarray, "B T V"]:
    """Logits of the residual stream behind the last layer; the head is read in slices of rows."""
    head = _outside(reader, model, "embed_tokens" if model.tie_word_embeddings else "lm_head")
    hidden = rms_norm(x, jnp.asarray(_outside(reader, model, "norm")), model.rms_norm_eps, jnp.float32)
    logits = np.empty((*x.shape[:-1], model.vocab_size), np.float32)
    for start in range(0, model.vocab_size, _ROWS):
        rows = jnp.asarray(head[start : start + _ROWS], jnp.float32)
        logits[..., start : start + _ROWS] = fp32_matmul(hidden, rows.T)
    return logits


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(model: ModelConfig, layer: DecoderLayer, x: Float32[Array, "B T D"]) -> Float32[Array, "B T D"]:
    """The residual stream behind a layer, for sequences of one length."""
    batch, length = x.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    attention = padded_attention(model, jnp.ones((batch, length), bool))
    return layer(x, rotary_angles(positions, model), attention)[0]


def _adapters(adapter: AdapterReader | None, model: ModelConfig, layer: int) -> dict[str, dict[str, Lora]]:
    """A layer's adapters as `Qwen2` describes them."""
    shapes = model.projection_shapes()
    found: dict[str, dict[str, Lora]] = {}
    for fused, parts in {**FUSED_PROJECTIONS, "o_proj": ("o_proj",), "down_proj": ("down_proj",)}.items():
        offset, found[fused] = 0, {}
        for part in parts:
            lora = None if adapter is None else adapter.lora(layer, part)
            if lora is not None:
                a, b = (jnp.asarray(value).T for value in lora)
                found[fused][part] = Lora(a, b, adapter.config.scale, offset)
            offset += shapes[part][0]
    return found
