"""Shape of a decoder, Qwen2.5, Qwen3 (dense) or Llama 3, and the table of its tensors."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
PROJECTION_MODULES = {
    **{part: f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{part: f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")},
}
"""Module of each projection in a decoder layer of Hugging Face."""

PROJECTIONS = tuple(PROJECTION_MODULES)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched for longer sequences, by wavelength (Llama 3.1, `rope_type` "llama3").

    Attributes:
      factor: by which the lowest frequencies are divided.
      low_freq_factor, high_freq_factor: wavelengths above `original_max_position_embeddings / low_freq_factor` are
        stretched by the whole factor, those below `… / high_freq_factor` not at all; in between it is interpolated.
      original_max_position_embeddings: longest sequence before the stretching, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder; hashable, so that it can be static under jit.

    Attributes:
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, D.
      intermediate_size: features of gate and of up, F.
      num_layers: decoder layers, L.
      num_heads: query heads, N.
      num_kv_heads: key/value heads, K; divides N.
      head_dim: features of a head, H.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: True where the head is the embedding.
      max_position_embeddings: longest sequence the model was trained for, in tokens.
      eos_token_ids: every id that ends a completion (config.json, generation_config.json, the tokenizer's eos_token).
      pad_token_id: id of padding tokens, which every mask excludes.
      qkv_bias: whether q, k and v have a bias (Qwen2.5).
      qk_norm: whether every head of q and k passes an RMSNorm of its own before the rotary embedding (Qwen3). AQN
        and `train_norms` leave these norms alone: they act on the inputs of projections.
      rope_scaling: how rotary frequencies are stretched; None: not.
      tensor_parallel: devices over which the layers are divided, T (`partition`).
      is_part: whether this is what one of T devices computes of the layers (`part`); heads, key/value heads and F are
        then its own.

    Raises ValueError if `num_heads` is no multiple of `num_kv_heads`, or if heads, key/value heads or F are no multiple
    of T.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    qkv_bias: bool = True
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    tensor_parallel: int = 1
    is_part: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {self.tensor_parallel}")
        sizes = {"num_key_value_heads": self.num_kv_heads, "intermediate_size": self.intermediate_size}
        for name, size in sizes.items():
            if size % self.tensor_parallel and not self.is_part:
                raise ValueError(f"tensor_parallel_size {self.tensor_parallel} does not divide {name} {size}")

    @property
    def part(self) -> ModelConfig:
        """What one device computes of the layers: the model itself where they are not divided."""
        if self.tensor_parallel == 1 or self.is_part:
            return self
        sizes = {
            name: getattr(self, name) // self.tensor_parallel
            for name in ("num_heads", "num_kv_heads", "intermediate_size")
        }
        return dataclasses.replace(self, **sizes, is_part=True)

    def projections(self) -> tuple[TensorSpec, ...]:
        """The four (fused) projections of a layer, in the order of their use."""
        return tuple(spec for spec in tensors_of(self) if spec.kind == "projection")

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """(output, input) features of each of the seven projections of a layer."""
        return {part: (n, spec.columns) for spec in self.projections() for part, n in spec.part_rows().items()}

    def parameter_count(self) -> int:
        """Parameters of the model without adapters, a tied head counted once."""
        return sum(math.prod(spec.shape) * (self.num_layers if spec.in_layer else 1) for spec in tensors_of(self))


def hf_module(module: str, layer: int | None = None) -> str:
    """Hugging Face's path of a module, of a decoder layer where one is given."""
    return module if layer is None else f"model.layers.{layer}.{module}"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model: its place in the policy and in a checkpoint of Hugging Face, and its shape.

    Attributes:
      path: of the variable in `Qwen2`; of a layer's tensor in `DecoderLayer`.
      kind: "projection", "bias" (of a projection), "norm", or "table" (embedding and head).
      parts: (module of Hugging Face, rows) of each part; their rows follow each other. In a layer without its prefix.
      columns: input features; None for a vector.
      in_layer: whether every decoder layer has one.
    """

    path: tuple[str, ...]
    kind: Literal["projection", "bias", "norm", "table"]
    parts: tuple[tuple[str, int], ...]
    columns: int | None = None
    in_layer: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all parts together."""
        return self._shape(sum(rows for _, rows in self.parts))

    def places(self, num_layers: int) -> tuple[int | None, ...]:
        """The layers that have one; (None,) for a tensor outside the layers."""
        return tuple(range(num_layers)) if self.in_layer else (None,)

    def part_rows(self) -> dict[str, int]:
        """Rows of each part, by the last name of its module ("q_proj")."""
        return {module.rpartition(".")[2]: rows for module, rows in self.parts}

    def modules(self, layer: int | None = None) -> tuple[str, ...]:
        """Hugging Face's modules of the parts."""
        return tuple(hf_module(module, layer) for module, _ in self.parts)

    def stored(self, layer: int | None = None) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part in an unquantized checkpoint."""
        suffix = "bias" if self.kind == "bias" else "weight"
        return {f"{hf_module(module, layer)}.{suffix}": self._shape(rows) for module, rows in self.parts}

    def _shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.columns is None else (rows, self.columns)


def tensors_of(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the model: those of a decoder layer in the order of their use, then those outside the layers. The
    table behind loading, checking, abstract policies, exports, quantization and parameter counts.
    """
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def projection(block: str, fused: str, rows: dict[str, int], columns: int) -> TensorSpec:
        parts = tuple((PROJECTION_MODULES[part], n) for part, n in rows.items())
        return TensorSpec((block, fused, "weight"), "projection", parts, columns)

    qkv = projection("self_attn", "qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv}, d)
    biases = [TensorSpec(("self_attn", "qkv_proj", "bias"), "bias", qkv.parts)] if config.qkv_bias else []
    head_norms = [
        TensorSpec(("self_attn", name, "weight"), "norm", ((f"self_attn.{name}", config.head_dim),))
        for name in (HEAD_NORMS if config.qk_norm else ())
    ]
    heads = [] if config.tie_word_embeddings else [("lm_head", "lm_head")]
    return (
        TensorSpec(("input_layernorm", "weight"), "norm", (("input_layernorm", d),)),
        qkv,
        *biases,
        *head_norms,
        projection("self_attn", "o_proj", {"o_proj": d}, q),
        TensorSpec(("post_attention_layernorm", "weight"), "norm", (("post_attention_layernorm", d),)),
        projection("mlp", "gate_up_proj", {"gate_proj": f, "up_proj": f}, d),
        projection("mlp", "down_proj", {"down_proj": d}, f),
        TensorSpec(("norm", "weight"), "norm", (("model.norm", d),), in_layer=False),
        *(
            TensorSpec((name,), "table", ((module, config.vocab_size),), d, in_layer=False)
            for name, module in (("embed_tokens", "model.embed_tokens"), *heads)
        ),
    )
