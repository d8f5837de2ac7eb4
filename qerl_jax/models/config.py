"""Shape of a Qwen2-architecture model."""

from __future__ import annotations

import dataclasses

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
FUSED_PROJECTIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen2-architecture model; hashable, so that it can be static under jit.

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
      eos_token_ids: every id that ends a completion (config.json and generation_config.json).
      pad_token_id: id of padding tokens, which every mask excludes.

    Raises ValueError if `num_heads` is no multiple of `num_kv_heads`.
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

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """(output, input) features of each of the seven projections of a layer."""
        q, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d, f = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (q, d),
            "k_proj": (kv_dim, d),
            "v_proj": (kv_dim, d),
            "o_proj": (d, q),
            "gate_proj": (f, d),
            "up_proj": (f, d),
            "down_proj": (d, f),
        }

    def parameter_count(self) -> int:
        """Parameters of the model without adapters, a tied head counted once."""
        shapes = self.projection_shapes()
        biases = sum(shapes[name][0] for name in FUSED_PROJECTIONS["qkv_proj"])
        layer = sum(n * k for n, k in shapes.values()) + biases + 2 * self.hidden_size
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size
