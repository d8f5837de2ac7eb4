"""Prefill of packed prompts, layer by layer: three small programs for each shape, whose number and size do not depend
on the depth of the model.

Axes: P prompt slots, N prompts of one prefill, T packed tokens, K key/value heads, S cache slots, H head dim, D model,
A rotary angles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from qerl_jax import partition
from qerl_jax.compilation import as_committed
from qerl_jax.models import cache as kv
from qerl_jax.models.attention import packed_attention, rotary_angles
from qerl_jax.models.cache import KVCache
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.executor import PlainExecutor
from qerl_jax.models.modules import final_norm
from qerl_jax.models.packed_sequences import PackedLayout, last_tokens, packed_layout
from qerl_jax.models.qwen2 import merge_layer
from qerl_jax.programs import program
from qerl_jax.rollout.decode import PromptCache
from qerl_jax.types import Policy

# Every GEMM here is a kernel of this project or large enough for cuBLAS. XLA's Triton GEMMs are not tried: that takes
# seconds of compile time.
_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def prefill(
    policy: Policy,
    prompt_cache: PromptCache,
    tokens: Int32[np.ndarray, " T"],
    lengths: Int32[np.ndarray, " N"],
    prompt_slots: Int32[np.ndarray, " N"],
    width: int,
    batch_invariant: bool,
) -> PromptCache:
    """Run the model over packed prompts and write their keys, values and last hidden states into the prompt cache.

    Args:
      policy: its adapters in the compute dtype (`decode.cast_lora`).
      prompt_cache: consumed.
      tokens: all prompts end to end, then padding.
      lengths: tokens of each prompt; 0 marks an unused entry.
      prompt_slots: where each prompt goes in the prompt cache; an index past the end drops it.
      width: at least the longest prompt.
      batch_invariant: as in `Engine`.
    """
    embedding, dropped = policy.frozen["embed_tokens"], prompt_cache.lengths.shape[0]
    x, places = embed_prompts(embedding, tokens, lengths, prompt_slots, policy.config, width, dropped)
    x, places = as_committed((x, places), policy)
    keys, values = list(prompt_cache.cache.keys), list(prompt_cache.cache.values)
    for i in range(policy.config.num_layers):
        cache = KVCache((keys[i],), (values[i],))
        x, cache = prefill_layer(
            layer_weights(policy, i), x, cache, places, policy.config, policy.dtype, batch_invariant
        )
        [keys[i]], [values[i]] = cache.keys, cache.values
    hidden, prompt_lengths = store_hidden(
        policy.frozen["norm"]["weight"],
        x,
        prompt_cache.hidden,
        prompt_cache.lengths,
        lengths,
        prompt_slots,
        policy.config,
        batch_invariant,
    )
    return PromptCache(KVCache(tuple(keys), tuple(values)), hidden, prompt_lengths)


def layer_weights(policy: Policy, layer: int) -> dict[str, Any]:
    """The trees of one layer."""
    return {
        "frozen": policy.frozen["layers"][layer],
        "norms": policy.norms["layers"][layer],
        "lora": policy.lora.get("layers", {}).get(layer, {}),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where the tokens of a prefill lie, the same for all layers.

    Attributes:
      layout: in the packed prompts.
      angles: rotary angles.
      rows: row of the prompt cache; one past the end drops a token.
    """

    layout: PackedLayout
    angles: Float32[Array, "T A"]
    rows: Int32[Array, " T"]


@program(static_argnames=("config", "width", "dropped"))
def embed_prompts(
    embedding: Float[Array, "V D"],
    tokens: Int32[Array, " T"],
    lengths: Int32[Array, " N"],
    prompt_slots: Int32[Array, " N"],
    config: ModelConfig,
    width: int,
    dropped: int,
) -> tuple[Float32[Array, "T D"], Places]:
    """The residual stream before the first layer, and where its tokens lie. `dropped`: the row of padding."""
    layout = packed_layout(lengths, tokens.shape[0], width)
    rows = jnp.append(prompt_slots, dropped)[layout.segment_ids]
    return embedding[tokens].astype(jnp.float32), Places(layout, rotary_angles(layout.positions, config), rows)


@program(
    donate_argnames=("x", "cache"),
    static_argnames=("config", "dtype", "batch_invariant"),
    compiler_options=_OPTIONS,
)
def prefill_layer(
    weights: dict[str, Any],
    x: Float32[Array, "T D"],
    cache: KVCache,
    places: Places,
    config: ModelConfig,
    dtype: jnp.dtype,
    batch_invariant: bool,
) -> tuple[Float32[Array, "T D"], KVCache]:
    """One layer over packed prompts. Returns the residual stream behind it, and the layer's cache with the keys and
    values of the prompts.
    """

    def run(weights: dict[str, Any], x: Array, cache: KVCache, places: Places) -> tuple[Array, KVCache]:
        layer = merge_layer(config, dtype, **weights)
        attention = packed_attention(config.part, places.layout)
        x, entry = layer(x, places.angles, attention, executor=PlainExecutor(batch_invariant))
        return x, kv.write_prompts(cache, places.rows, places.layout.positions, [entry])

    arguments, results = (weights, x, cache, places), (PartitionSpec(), cache.partition_specs())
    return partition.on_devices(config.tensor_parallel, run, *arguments, results=results)


@program(donate_argnames=("hidden", "prompt_lengths"), static_argnames=("config", "batch_invariant"))
def store_hidden(
    norm: Float32[Array, " D"],
    x: Float32[Array, "T D"],
    hidden: Float[Array, "P D"],
    prompt_lengths: Int32[Array, " P"],
    lengths: Int32[Array, " N"],
    prompt_slots: Int32[Array, " N"],
    config: ModelConfig,
    batch_invariant: bool,
) -> tuple[Float[Array, "P D"], Int32[Array, " P"]]:
    """The prompt cache's hidden states and lengths, with those of the prompts."""
    last = last_tokens(jnp.cumsum(lengths), x.shape[0])
    final = PlainExecutor(batch_invariant).finish(final_norm(config, norm, hidden.dtype), x[last])
    return (
        hidden.at[prompt_slots].set(final, mode="drop"),
        prompt_lengths.at[prompt_slots].set(lengths, mode="drop"),
    )
