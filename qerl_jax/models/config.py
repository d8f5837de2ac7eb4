"""Shape of a decoder: Qwen2.5, Qwen3 (dense) or Llama 3."""

from __future__ import annotations

import dataclasses

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
FUSED_PROJECTIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


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
      eos_token_ids: every id that ends a completion (config.json and generation_config.json).
      pad_token_id: id of padding tokens, which every mask excludes.
      qkv_bias: whether q, k and v have a bias (Qwen2.5).
      qk_norm: whether every head of q and k passes an RMSNorm of its own before the rotary embedding (Qwen3). These
        norms are frozen, and AQN leaves them alone: it acts on the inputs of projections.
      rope_scaling: how rotary frequencies are stretched; None: not.

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
    qkv_bias: bool = True
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

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
        biases = sum(shapes[name][0] for name in FUSED_PROJECTIONS["qkv_proj"]) if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = sum(n * k for n, k in shapes.values()) + biases + norms
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size
