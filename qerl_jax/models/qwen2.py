"""Qwen2.5 in Flax NNX: the module describes the model, plain functions run it.

Source: Qwen2.5 technical report (arXiv 2412.15115); numerics as in transformers' `modeling_qwen2.py`, in fp32 where
precision is decided (norms, rotary angles, softmax).

Axes: B sequences, P prompts, T tokens, S cache slots, L layers, D model, F ffn, N query heads, K key/value heads,
G query heads a key/value head, H head dim, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int
from qerl_kernels.batch_invariant import in_blocks
from qerl_kernels.decode_attention.api import decode_attention
from qerl_kernels.nvfp4_matmul.lora_input import LoraX
from qerl_kernels.ops import fp32_matmul, rms_norm, rotate, silu_mul
from qerl_kernels.rope_cache.api import rope_and_cache

from qerl_jax.models import fused
from qerl_jax.models.cache import KVCache
from qerl_jax.models.formats import Weight
from qerl_jax.models.linear import FP32_PRECISION, linear
from qerl_jax.models.lora import Lora
from qerl_jax.models.ragged import Ragged

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MASKED = -1e30  # finite, so that a row with nothing to attend to stays a number


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen2-architecture model; hashable, so that it can be static under jit.

    Attributes:
      eos_token_ids: every id that ends a completion (config.json and generation_config.json).
      pad_token_id: fills a batch; never read through a mask.
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
        """Parameters of the unadapted model, a tied head counted once."""
        shapes = self.projection_shapes()
        layer = (
            sum(n * k for n, k in shapes.values()) + sum(shapes[p][0] for p in FUSED["qkv_proj"]) + 2 * self.hidden_size
        )
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size


Mix = Callable[[Array, Array, Any], tuple[Array, Any]]
"""How a layer's tokens see each other: (q, k and v side by side [B T (N + 2 K)·H], rotary angles [B T H/2], what the
caller holds for this layer) -> (attended [B T N H], what the caller keeps). Training, prefill and decode differ in
nothing else.
"""


class Frozen(nnx.Variable):
    """A weight that no optimizer ever sees. Not an `nnx.Param`."""


class Norm(nnx.Variable):
    """The weight of a layer norm: what AQN perturbs and `train_norms` trains. Always fp32."""


class Adapter(nnx.Variable):
    """The `Lora` of one of the seven projections."""


class Projection(nnx.Module):
    """One (possibly fused) projection: a frozen weight, a bias or None, and its adapters."""

    def __init__(self, weight: Weight, bias: Array | None, adapters: Mapping[str, Lora]):
        self.weight = Frozen(weight)
        self.bias = None if bias is None else Frozen(bias)
        self.lora = nnx.Dict({part: Adapter(lora) for part, lora in adapters.items()})

    def adapters(self) -> list[Lora]:
        """In the order of their rows: a split module comes back with its parts in the order of their names."""
        return sorted((adapter.get_value() for adapter in self.lora.values()), key=lambda part: part.offset)

    def __call__(
        self, x: Float[Array, "*B K"], batch_invariant: bool = False, shrunk: LoraX | None = None
    ) -> Float[Array, "*B N"]:
        bias = None if self.bias is None else self.bias.get_value()
        weight = self.weight.get_value()
        return linear(x, weight, bias, self.adapters(), batch_invariant=batch_invariant, shrunk=shrunk)


class RMSNorm(nnx.Module):
    """`w ⊙ x / sqrt(mean(x²) + eps)` in fp32, rounded once to the compute dtype."""

    def __init__(self, variable: nnx.Variable, eps: float, dtype: jnp.dtype):
        self.weight = variable
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float32[Array, "B T D"], batch_invariant: bool = False) -> Float[Array, "B T D"]:
        def norm(rows: Array) -> Array:
            return rms_norm(rows, self.weight.get_value(), self.eps, self.dtype)

        if not batch_invariant:
            return norm(x)
        return in_blocks(norm, x.reshape(-1, x.shape[-1])).reshape(x.shape)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; q, k and v in one matmul."""

    def __init__(self, weights: Mapping[str, Any], adapters: Mapping[str, Mapping[str, Lora]]):
        self.qkv_proj = Projection(weights["qkv_proj"], weights["qkv_bias"], adapters["qkv_proj"])
        self.o_proj = Projection(weights["o_proj"], None, adapters["o_proj"])

    def __call__(self, x, angles, mix: Mix, held: Any, batch_invariant: bool):
        mixed, kept = mix(self.qkv_proj(x, batch_invariant), angles, held)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1), batch_invariant), kept


class Mlp(nnx.Module):
    """`down(silu(gate(x)) · up(x))`, gate and up in one matmul."""

    def __init__(self, weights: Mapping[str, Any], adapters: Mapping[str, Mapping[str, Lora]]):
        self.gate_up_proj = Projection(weights["gate_up_proj"], None, adapters["gate_up_proj"])
        self.down_proj = Projection(weights["down_proj"], None, adapters["down_proj"])

    def __call__(self, x: Float[Array, "B T D"], batch_invariant: bool) -> Float[Array, "B T D"]:
        return self.down_proj(silu_mul(self.gate_up_proj(x, batch_invariant)), batch_invariant)


class DecoderLayer(nnx.Module):
    """Pre-norm residual block.

    The residual stream is fp32 also where all else is bf16: rounding it twice a layer is half of what makes rollout and
    trainer disagree (a last bit that differs in a product becomes a whole bf16 step of the stream, and stays).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        adapters: Mapping[str, Mapping[str, Lora]],
        dtype: jnp.dtype,
    ):
        self.input_layernorm = RMSNorm(Norm(weights["input_layernorm"]), config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(Norm(weights["post_attention_layernorm"]), config.rms_norm_eps, dtype)
        self.self_attn = Attention(weights, adapters)
        self.mlp = Mlp(weights, adapters)

    def __call__(self, x, angles, mix: Mix, held: Any, batch_invariant: bool):
        attended, kept = self.self_attn(self.input_layernorm(x, batch_invariant), angles, mix, held, batch_invariant)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x, batch_invariant), batch_invariant), kept


class Qwen2(nnx.Module):
    """Qwen2.5 decoder: tokens in, final hidden states out; `logits` is a step of its own, so that callers choose which
    positions need it.

    Args:
      config: the shape.
      weights: `{"embed_tokens": [V, D], "norm": f32[D], "lm_head": [V, D] or None when tied, "layers": [{"qkv_proj":
        Weight, "qkv_bias": [N], "o_proj": Weight, "gate_up_proj": Weight, "down_proj": Weight, "input_layernorm":
        f32[D], "post_attention_layernorm": f32[D]}, ...]}`.
      adapters: for each layer, `{fused projection: {part: Lora}}`.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Any], adapters: list[Mapping[str, Mapping[str, Lora]]]
    ):
        self.config = config
        self.embed_tokens = Frozen(weights["embed_tokens"])
        self.lm_head = None if config.tie_word_embeddings else Frozen(weights["lm_head"])
        dtype = weights["embed_tokens"].dtype
        self.norm = RMSNorm(Frozen(weights["norm"]), config.rms_norm_eps, dtype)
        self.layers = nnx.List(
            DecoderLayer(config, layer, layer_adapters, dtype)
            for layer, layer_adapters in zip(weights["layers"], adapters, strict=True)
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        attention_mask: Bool[Array, "B T"],
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        """Hidden states of whole sequences. Padding may stand on either side; positions are the mask's running
        count.
        """
        positions = jnp.maximum(jnp.cumsum(attention_mask, axis=-1) - 1, 0)
        order = jnp.arange(tokens.shape[1])
        mask = (order[:, None] >= order[None, :]) & attention_mask[:, None, :]
        mix = self._rotated(lambda q, k, v, _: (attend(q, k, v, mask), None))
        return self._run(tokens, positions, mix, remat=remat)[0]

    def prefill(
        self, tokens: Int[Array, " T"], prompts: Ragged, batch_invariant: bool = False
    ) -> tuple[Float[Array, "T D"], list[tuple[Float[Array, "T K H"], Float[Array, "T K H"]]]]:
        """Hidden states of whole prompts that lie end to end, and the keys and values of every layer. What stands at
        the filler behind them is no token's.
        """

        def mix(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
            attended = prompts.together(causal(*(prompts.apart(x[0]) for x in (q, k, v))))
            return attended[None], (k[0], v[0])

        hidden, kept = self._run(
            tokens[None], prompts.positions[None], self._rotated(mix), batch_invariant=batch_invariant
        )
        return hidden[0], kept

    def decode(
        self,
        tokens: Int[Array, " B"],
        prompts: KVCache,
        prompt_index: Int[Array, " B"],
        prompt_lengths: Int[Array, " B"],
        own: KVCache,
        lengths: Int[Array, " B"],
        batch_invariant: bool = False,
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Hidden states of one more token a sequence, and the sequences' own cache with it.

        Args:
          tokens: each row's newest token.
          prompts: cache of the prompts, [P, K, S, H] a layer; rows of a group share one.
          prompt_index: each row's prompt.
          prompt_lengths: tokens of that prompt.
          own: cache of what follows the prompt.
          lengths: tokens after the prompt, the new one included; it stands at slot `lengths - 1`. 0: the row is idle,
            and what comes out of it means nothing.
        """
        slots = jnp.where(lengths > 0, lengths - 1, own.keys[0].shape[2])  # an idle row writes nothing
        prompt_lengths = jnp.where(lengths > 0, prompt_lengths, 0)

        def mix(qkv: Array, angles: Array, held: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            prompt_keys, prompt_values, keys, values = held
            q, keys, values = rope_and_cache(qkv[:, 0], angles[:, 0], slots, keys, values)
            shared = prompt_keys, prompt_values, prompt_index, prompt_lengths
            attended = decode_attention(q, *shared, keys, values, lengths, batch_invariant=batch_invariant)
            return attended[:, None], (keys, values)

        held = list(zip(prompts.keys, prompts.values, own.keys, own.values, strict=True))
        positions = jnp.maximum(prompt_lengths + lengths - 1, 0)[:, None]
        # Not batch-invariant: at another number of rows the plain way may be taken, which sums in another order.
        if fused.fits(self.layers, tokens.shape[0]) and not batch_invariant:
            hidden, kept = self._run_fused(tokens, positions, mix, held)
        else:
            hidden, kept = self._run(tokens[:, None], positions, mix, held, batch_invariant=batch_invariant)
        return hidden[:, 0], KVCache(*(tuple(arrays) for arrays in zip(*kept, strict=True)))

    def _rotated(self, mix: Callable[[Array, Array, Array, Any], tuple[Array, Any]]) -> Mix:
        """What `_run` takes of `mix(q, k, v, held)` with q [B T N H] and k [B T K H] rotated, v [B T K H]."""
        c = self.config

        def whole(qkv: Array, angles: Array, held: Any) -> tuple[Array, Any]:
            heads = qkv.reshape(*qkv.shape[:2], -1, c.head_dim)
            q, k, v = jnp.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=2)
            return mix(rotate(q, angles), rotate(k, angles), v, held)

        return whole

    def _run(self, tokens, positions, mix, held=None, remat=False, batch_invariant=False):
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)

        def run(layer: DecoderLayer, x: Array, held: Any) -> tuple[Array, Any]:
            return layer(x, angles, mix, held, batch_invariant)

        # One jitted function for all layers: those of one shape are traced and lowered once. XLA inlines its calls.
        step = jax.jit(jax.checkpoint(run) if remat else run)
        x = self.embed_tokens.get_value()[tokens].astype(jnp.float32)
        kept = []
        for layer, of_layer in zip(self.layers, held or [None] * len(self.layers), strict=True):
            x, keep = step(layer, x, of_layer)
            kept.append(keep)
        return self.norm(x, batch_invariant), kept

    def _run_fused(self, tokens, positions, mix, held):
        """`_run` of one token a sequence, in fewer and longer kernels."""
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)

        def run(layer: DecoderLayer, x: Array, delta: Array | None, held: Any) -> tuple[Array, Array, Any]:
            return fused.layer_step(layer, x, delta, angles, mix, held)

        step = jax.jit(run)  # as in `_run`; the first layer is one of its own
        x, delta = self.embed_tokens.get_value()[tokens].astype(jnp.float32), None
        kept = []
        for layer, of_layer in zip(self.layers, held, strict=True):
            x, delta, keep = step(layer, x, delta, of_layer)
            kept.append(keep)
        return self.norm((x + delta)[:, None]), kept

    def logits(self, hidden: Float[Array, "... D"]) -> Float32[Array, "... V"]:
        """fp32 logits of hidden states, through the embedding where the head is tied."""
        head = (self.embed_tokens if self.lm_head is None else self.lm_head).get_value()
        return fp32_matmul(hidden, head.T)


def rotary_angles(positions: Int[Array, "B T"], head_dim: int, theta: float) -> Float32[Array, "B T {head_dim//2}"]:
    """`position · theta^(−2i / H)` in fp32."""
    frequencies = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return positions[..., None].astype(jnp.float32) * frequencies


def causal(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]) -> Array:
    """Causal attention of whole sequences. On a GPU in bf16 by cuDNN, which never holds the scores."""
    if q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    order = jnp.arange(q.shape[1])
    return attend(q, k, v, jnp.broadcast_to(order[:, None] >= order, (q.shape[0], *order.shape, *order.shape)))


def attend(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """Softmax attention, `softmax(q kᵀ / sqrt(H)) v`; scores and softmax in fp32, each group of N/K query heads reads
    one k/v head.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    precision = FP32_PRECISION if q.dtype == jnp.float32 else None
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32, precision=precision)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, preferred_element_type=jnp.float32, precision=precision)
    return out.reshape(batch, length, heads, head_dim).astype(q.dtype)
