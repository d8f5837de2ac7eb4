"""Qwen2.5, Qwen3 (dense) and Llama 3 in Flax NNX: modules hold the weights, and one forward runs them for training,
prefill and decode. The three differ in biases, norms of heads and rotary frequencies (`ModelConfig`).

Source: technical reports (arXiv 2412.15115, 2505.09388, 2407.21783); numerics as in transformers' `modeling_qwen2.py`
and its siblings, in fp32 where precision is decided (norms, rotary angles, softmax, residual stream).

Axes: B sequences, P prompts, T tokens, S cache slots, L layers, D model, F ffn, N query heads, K key/value heads,
H head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int
from qerl_kernels.ops import fp32_matmul

from qerl_jax.models import fused_decode
from qerl_jax.models.attention import (
    AttentionFn,
    cached_attention,
    padded_attention,
    rotary_angles,
    split_heads,
)
from qerl_jax.models.cache import KVCache
from qerl_jax.models.config import HEAD_NORMS, LAYER_NORMS, ModelConfig
from qerl_jax.models.executor import PLAIN_EXECUTOR, PlainExecutor, Residual
from qerl_jax.models.modules import Frozen, Norm, Projection, RMSNorm, final_norm
from qerl_jax.partition import DIVISIONS, Mailbox
from qerl_jax.types import Policy


class Attention(nnx.Module):
    """The projections of grouped-query attention, q, k and v in one GEMM, and the norms of their heads."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, frozen: Mapping[str, Any], lora: Mapping[str, Any]):
        self.qkv_proj, self.o_proj = _projections(config, frozen, lora, "qkv_proj", "o_proj")
        self.q_norm, self.k_norm = (
            RMSNorm(Frozen(frozen[name]["weight"]), config.rms_norm_eps, dtype) if config.qk_norm else None
            for name in HEAD_NORMS
        )
        self.config = config

    def normalized(self, qkv: Float[Array, "*B M"], executor: PlainExecutor = PLAIN_EXECUTOR) -> Float[Array, "*B M"]:
        """q, k and v side by side, M = (N + 2 K)·H, with the norms of the heads of q and k where the model has them."""
        if self.q_norm is None:
            return qkv
        q, k, v = split_heads(self.config, qkv)
        q, k = (executor.normalize(norm, x) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return jnp.concatenate([q, k, v], axis=-2).reshape(qkv.shape)


class Mlp(nnx.Module):
    """The projections of `down(silu(gate(x)) · up(x))`; gate and up in one GEMM."""

    def __init__(self, config: ModelConfig, frozen: Mapping[str, Any], lora: Mapping[str, Any]):
        self.gate_up_proj, self.down_proj = _projections(config, frozen, lora, "gate_up_proj", "down_proj")


def _projections(
    config: ModelConfig, frozen: Mapping[str, Any], lora: Mapping[str, Any], *names: str
) -> list[Projection]:
    return [Projection(frozen[name], lora.get(name, {}), DIVISIONS[name] if config.is_part else None) for name in names]


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer. A pytree: it can be an argument of `jax.jit`, and equal layers can be stacked.

    A call is the four methods `qkv`, `attention_out`, `gate_up` and `down` with attention between the first two, and
    the residual stream's two additions; the update pulls gradients through the methods one by one.

    Args:
      config: shape of the model.
      dtype: compute dtype.
      frozen: `Policy.frozen["layers"][i]`.
      norms: `Policy.norms["layers"][i]`.
      lora: `Policy.lora["layers"][i]`, {} without adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        frozen: Mapping[str, Any],
        norms: Mapping[str, Any],
        lora: Mapping[str, Any],
    ):
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(Norm(norms[name]["weight"]), config.rms_norm_eps, dtype) for name in LAYER_NORMS
        )
        self.self_attn = Attention(config, dtype, frozen["self_attn"], lora.get("self_attn", {}))
        self.mlp = Mlp(config, frozen["mlp"], lora.get("mlp", {}))

    def projections(self) -> tuple[Projection, ...]:
        """The four (fused) projections, in the order of their use."""
        return self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj

    def __call__(
        self,
        residual: Residual,
        angles: Float32[Array, "*B A"],
        attention: AttentionFn,
        cache: Any = None,
        executor: PlainExecutor = PLAIN_EXECUTOR,
    ) -> tuple[Residual, Any]:
        """`x + o(attention(qkv(norm(x))))`, then `x + down(swiglu(gate_up(norm(x))))`.

        Args:
          residual: the residual stream in the executor's form; of `PlainExecutor` x itself, f32[*B, D].
          angles: rotary angles of the tokens (`attention.rotary_angles`), A = H / 2.
          attention: how the tokens attend to each other.
          cache: the layer's cache, passed to `attention`.
          executor: how the operations run.

        Returns:
          The residual stream behind the layer, and the cache that `attention` returns.
        """
        residual, qkv = self.qkv(residual, executor)
        attended, cache = attention(qkv, angles, cache)
        residual = executor.add(residual, self.attention_out(attended, executor))
        residual, gate_up = self.gate_up(residual, executor)
        return executor.add(residual, self.down(gate_up, executor)), cache

    def qkv(
        self, residual: Residual, executor: PlainExecutor = PLAIN_EXECUTOR
    ) -> tuple[Residual, Float[Array, "*B M"]]:
        """The residual stream, in the form that the next operation reads, and q, k and v side by side, M = (N + 2 K)·H;
        the heads of q and k normalized where the model has such norms.
        """
        residual, qkv = executor.norm_project(self.input_layernorm, self.self_attn.qkv_proj, residual)
        return residual, self.self_attn.normalized(qkv, executor)

    def attention_out(
        self, attended: Float[Array, "*B N H"], executor: PlainExecutor = PLAIN_EXECUTOR
    ) -> Float[Array, "*B D"]:
        """What attention adds to the residual stream."""
        return executor.project(self.self_attn.o_proj, attended.reshape(*attended.shape[:-2], -1))

    def gate_up(
        self, residual: Residual, executor: PlainExecutor = PLAIN_EXECUTOR
    ) -> tuple[Residual, Float[Array, "*B E"]]:
        """The residual stream, in the form that the next operation reads, and gate and up side by side, E = 2 F."""
        return executor.norm_project(self.post_attention_layernorm, self.mlp.gate_up_proj, residual)

    def down(self, gate_up: Float[Array, "*B E"], executor: PlainExecutor = PLAIN_EXECUTOR) -> Float[Array, "*B D"]:
        """What the MLP adds to the residual stream."""
        return executor.swiglu_project(self.mlp.down_proj, gate_up)


def merge_layer(config: ModelConfig, dtype: jnp.dtype, frozen: Any, norms: Any, lora: Any) -> DecoderLayer:
    """`DecoderLayer` with its fp32 adapters as one copy in the compute dtype; of one device's part (`ModelConfig.part`)
    where the layers are divided.
    """
    return DecoderLayer(config.part, dtype, frozen, norms, jax.tree.map(lambda leaf: leaf.astype(dtype), lora))


def merge_model(policy: Policy) -> Qwen2:
    """The NNX module of a policy's trees, its fp32 adapters as one copy in the compute dtype. Cheap; call it inside
    jit; of one device's part where the layers are divided.
    """
    lora = jax.tree.map(lambda leaf: leaf.astype(policy.dtype), policy.lora)
    return Qwen2(policy.config.part, policy.frozen, policy.norms, lora)


class Qwen2(nnx.Module):
    """Decoder: tokens in, final hidden states out. `logits` is separate, so that callers choose the positions
    that need it.

    Args:
      config: the shape.
      frozen, norms, lora: the trees of a `Policy`.
    """

    def __init__(
        self, config: ModelConfig, frozen: Mapping[str, Any], norms: Mapping[str, Any], lora: Mapping[str, Any]
    ):
        self.config = config
        self.embed_tokens = Frozen(frozen["embed_tokens"])
        self.lm_head = None if config.tie_word_embeddings else Frozen(frozen["lm_head"])
        dtype = frozen["embed_tokens"].dtype
        self.norm = final_norm(config, frozen["norm"]["weight"], dtype)
        adapters = lora.get("layers", {})
        self.layers = nnx.List(
            DecoderLayer(config, dtype, frozen["layers"][i], norms["layers"][i], adapters.get(i, {}))
            for i in range(config.num_layers)
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        attention_mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states of whole sequences, in the compute dtype.

        Args:
          tokens: ids; padding may be on either side.
          attention_mask: True on real tokens. Positions are its running count.
        """
        positions = jnp.maximum(jnp.cumsum(attention_mask, axis=-1) - 1, 0)
        return self._run(tokens, positions, padded_attention(self.config, attention_mask))[0]

    def residuals(self, tokens: Int[Array, "B T"], attention_mask: Bool[Array, "B T"]) -> list[Float32[Array, "B T D"]]:
        """The residual stream in front of each layer and behind the last; arguments as in a call."""
        positions = jnp.maximum(jnp.cumsum(attention_mask, axis=-1) - 1, 0)
        return self._run(tokens, positions, padded_attention(self.config, attention_mask))[2]

    def decode(
        self,
        tokens: Int[Array, " B"],
        prompts: KVCache,
        prompt_index: Int[Array, " B"],
        prompt_lengths: Int[Array, " B"],
        own: KVCache,
        lengths: Int[Array, " B"],
        batch_invariant: bool = False,
        mailbox: Mailbox | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache, Mailbox | None]:
        """Hidden states of one new token a sequence, the sequences' own cache with that token, and the mailbox for the
        next step.

        Args:
          tokens: the newest token of each sequence.
          prompts: cache of the prompts, [P, K, S, H] a layer; the completions of a group share one.
          prompt_index: the prompt of each sequence.
          prompt_lengths: tokens of that prompt.
          own: cache of the completions.
          lengths: tokens of the completion, the new one included, which goes to slot `lengths - 1`. 0: the sequence is
            idle, and its hidden state is arbitrary.
          batch_invariant: a sequence's bits do not depend on the number of sequences or on the others; slower.
          mailbox: for sums over devices by a kernel, where they run one; None: XLA's.
        """
        slots = jnp.where(lengths > 0, lengths - 1, own.keys[0].shape[2])  # an idle sequence writes nothing
        prompt_lengths = jnp.where(lengths > 0, prompt_lengths, 0)
        attention = cached_attention(prompt_index, prompt_lengths, lengths, slots, batch_invariant)
        caches = list(zip(prompts.keys, prompts.values, own.keys, own.values, strict=True))
        positions = jnp.maximum(prompt_lengths + lengths - 1, 0)
        executor = self._decode_executor(tokens.shape[0], batch_invariant, mailbox)
        hidden, caches, residuals = self._run(tokens, positions, attention, caches, executor)
        if isinstance(residuals[-1], fused_decode.DeferredResidual):
            mailbox = residuals[-1].mailbox
        return hidden, KVCache(*(tuple(arrays) for arrays in zip(*caches, strict=True))), mailbox

    def projections(self) -> Iterator[Projection]:
        """The (fused) projections of all layers, in the order of their use."""
        return (projection for layer in self.layers for projection in layer.projections())

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output embedding: the embedding itself where the head is tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).get_value()

    def logits(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """fp32 logits of hidden states."""
        return fp32_matmul(hidden, self.head.T)

    def _decode_executor(self, batch: int, batch_invariant: bool, mailbox: Mailbox | None = None) -> PlainExecutor:
        # Batch-invariant decode is always plain: a larger batch may not fit the fused kernels, and the plain operations
        # sum in another order.
        if not batch_invariant and fused_decode.can_fuse_decode(self.projections(), batch):
            return fused_decode.FusedDecodeExecutor(mailbox=mailbox)
        return PlainExecutor(batch_invariant)

    def _run(
        self,
        tokens: Int[Array, "*B"],
        positions: Int[Array, "*B"],
        attention: AttentionFn,
        caches: Sequence[Any] | None = None,
        executor: PlainExecutor = PLAIN_EXECUTOR,
    ) -> tuple[Float[Array, "*B D"], list[Any], list[Residual]]:
        """Final hidden states of tokens at their positions, the cache that `attention` returns for each layer, and the
        residual stream before each layer and behind the last.
        """
        angles = rotary_angles(positions, self.config)

        def run_layer(layer: DecoderLayer, residual: Residual, cache: Any) -> tuple[Residual, Any]:
            return layer(residual, angles, attention, cache, executor)

        # One jitted function for all layers: layers of one shape are traced and lowered once. XLA inlines the calls.
        run_layer = jax.jit(run_layer)
        residual = executor.start(self.embed_tokens.get_value()[tokens].astype(jnp.float32))
        new_caches, residuals = [], [residual]
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            residual, new_cache = run_layer(layer, residual, cache)
            new_caches.append(new_cache)
            residuals.append(residual)
        return executor.finish(self.norm, residual), new_caches, residuals
