"""A Qwen2.5 model for pretraining: parameters as stacked arrays, the training forward, and the checkpoint.

Written for this purpose alone: all weights are trained and nothing is cached. That it is the same function as the
policy's is tested (`tests/test_pretrain.py`). Axes: B rows, T tokens, L layers, D width, N and K heads, H head
dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32
from pretraining.tokenizer import END_OF_TEXT, IM_END, SPECIAL

from qerl_jax.io import names, safetensors
from qerl_jax.io.files import write_json
from qerl_jax.io.safetensors import SINGLE_FILE

Params = dict[str, Any]
ROPE_THETA = 10_000.0  # documents have a few hundred tokens
EPSILON = 1e-6
LONGEST = 1024
"""`max_position_embeddings`."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of a model. Widths divide by 64, so that the blocks of every weight format and the kernels' tiles fit."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 640
    head_dim: int = 64

    def projections(self) -> dict[str, tuple[int, int]]:
        """Output and input features of the projections."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (key, self.hidden),
            "v_proj": (key, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }

    def parameters(self, embedding: bool = True) -> int:
        """Number of parameters; without the (tied) embedding those of layers and final norm."""
        shapes = self.projections()
        layer = sum(n * k for n, k in shapes.values()) + sum(shapes[name][0] for name in names.BIASED) + 2 * self.hidden
        return self.layers * layer + self.hidden + (self.vocabulary * self.hidden if embedding else 0)


SIZES = {
    "smoke": Size(64, 128, 2, 2, 1, head_dim=32),
    "2M": Size(192, 512, 4, 3, 1),
    "30M": Size(512, 2048, 8, 8, 2),
    "100M": Size(768, 3072, 12, 12, 2),
}


def init_params(size: Size, key: jax.Array) -> Params:
    """Normal weights of fan-in variance; what is added to the residual stream is smaller by √(2 L)."""
    keys = iter(jax.random.split(key, 8))
    layers: Params = {}
    for name, (n, k) in size.projections().items():
        deviation = k**-0.5 / (math.sqrt(2 * size.layers) if name in ("o_proj", "down_proj") else 1)
        layers[name] = deviation * jax.random.normal(next(keys), (size.layers, n, k))
        if name in names.BIASED:
            layers[f"{name}.bias"] = jnp.zeros((size.layers, n))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layers[norm] = jnp.ones((size.layers, size.hidden))
    embed = size.hidden**-0.5 * jax.random.normal(next(keys), (size.vocabulary, size.hidden))
    return {"embed": embed, "norm": jnp.ones(size.hidden), "layers": layers}


def forward(
    params: Params, tokens: Int32[Array, "B T"], segments: Int32[Array, "B T"], size: Size, dtype: jnp.dtype
) -> Float32[Array, "B T V"]:
    """Logits of packed documents: a token attends to those before it in its own segment, whose positions begin at 0."""
    columns = jnp.arange(tokens.shape[1])
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1]), segments[:, 1:] != segments[:, :-1]], 1)
    positions = columns - jax.lax.cummax(jnp.where(begins, columns, 0), axis=1)
    frequencies = ROPE_THETA ** (-jnp.arange(0, size.head_dim, 2) / size.head_dim)
    angles = positions[..., None, None] * jnp.concatenate([frequencies, frequencies])
    rotary = (jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))
    mask = (segments[:, :, None] == segments[:, None, :]) & (columns[:, None] >= columns)
    embed = params["embed"].astype(dtype)

    def block(x: Array, layer: Params) -> tuple[Array, None]:
        layer = {name: value if name.endswith("norm") else value.astype(dtype) for name, value in layer.items()}
        x = x + _attention(_norm(x, layer["input_layernorm"]), layer, size, rotary, mask)
        return x + _mlp(_norm(x, layer["post_attention_layernorm"]), layer), None

    x, _ = jax.lax.scan(block, embed[tokens], params["layers"])
    x = _norm(x, params["norm"])
    return jnp.einsum("btd,vd->btv", x, embed, preferred_element_type=jnp.float32)


def _norm(x: Float[Array, "B T D"], weight: Float32[Array, " D"]) -> Float[Array, "B T D"]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPSILON)
    return (wide * scale * weight).astype(x.dtype)


def _attention(x: Array, layer: Params, size: Size, rotary: tuple[Array, Array], mask: Bool[Array, "B T T"]) -> Array:
    b, t, _ = x.shape

    def heads(name: str, count: int) -> Array:
        y = jnp.einsum("btk,nk->btn", x, layer[name]) + layer[f"{name}.bias"]
        return y.reshape(b, t, count, size.head_dim)

    q, k = (_rotate(heads(name, n), *rotary) for name, n in (("q_proj", size.heads), ("k_proj", size.kv_heads)))
    q = q.reshape(b, t, size.kv_heads, size.heads // size.kv_heads, size.head_dim) * size.head_dim**-0.5
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, heads("v_proj", size.kv_heads)).reshape(b, t, -1)
    return jnp.einsum("btk,nk->btn", mixed, layer["o_proj"])


def _rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotary embedding, halves paired as in transformers."""
    left, right = jnp.split(x, 2, -1)
    return x * cosine + jnp.concatenate([-right, left], -1) * sine


def _mlp(x: Array, layer: Params) -> Array:
    gate, up = (jnp.einsum("btk,nk->btn", x, layer[name]) for name in ("gate_proj", "up_proj"))
    return jnp.einsum("btk,nk->btn", jax.nn.silu(gate) * up, layer["down_proj"])


def hf_config(size: Size) -> dict:
    """config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index(IM_END),
        "pad_token_id": SPECIAL.index(END_OF_TEXT),
        "torch_dtype": "bfloat16",
    }


def save(params: Params, size: Size, out: Path) -> str:
    """Write config.json, generation_config.json and bf16 weights into a directory; returns the weights' SHA-256."""
    tensors = {names.EMBED: params["embed"], names.FINAL_NORM: params["norm"]}
    for layer in range(size.layers):
        for name, stacked in params["layers"].items():
            if name.endswith("layernorm"):
                tensors[names.layer_norm(layer, name)] = stacked[layer]
            else:
                module, _, bias = name.partition(".")
                tensors[f"{names.projection(layer, module)}.{bias or 'weight'}"] = stacked[layer]
    half = {name: np.asarray(tensor.astype(jnp.bfloat16)) for name, tensor in tensors.items()}
    safetensors.save(out / SINGLE_FILE, half)
    write_json(out / "config.json", hf_config(size))
    ids = {"eos_token_id": [SPECIAL.index(IM_END), SPECIAL.index(END_OF_TEXT)]}
    write_json(out / "generation_config.json", ids | {"pad_token_id": SPECIAL.index(END_OF_TEXT)})
    return hashlib.sha256((out / SINGLE_FILE).read_bytes()).hexdigest()
