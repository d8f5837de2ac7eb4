"""Device side of a rollout: jitted admission, decode chunks and compaction over donated state.

Axes: B sequences of the rollout, S slots, P prompt slots, T tokens, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32
from qerl_kernels.batch_invariant import in_blocks

from qerl_jax import keys, partition
from qerl_jax.models import cache as kv
from qerl_jax.models.cache import KVCache
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.distribution import sample
from qerl_jax.models.lora import fuse_lora_a
from qerl_jax.models.qwen2 import Qwen2, merge_model
from qerl_jax.programs import program
from qerl_jax.rollout.shapes import RolloutShapes
from qerl_jax.types import Distribution, FinishReason, Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptCache:
    """Prefilled prompts, each shared by the completions of its group.

    Attributes:
      cache: keys and values of the prompts.
      hidden: final hidden state of each prompt's last token; every completion samples its first token from it.
      lengths: prompt lengths in tokens.
    """

    cache: KVCache
    hidden: Float[Array, "P D"]
    lengths: Int32[Array, " P"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Engine slots; each decodes one sequence.

    Attributes:
      cache: keys and values of the completion tokens.
      hidden: hidden state from which the next token is sampled.
      sequences: index of the sequence in each slot.
      keys: random key of the sequence.
      prompt_slots: index of the sequence's prompt in the prompt cache.
      lengths: completion tokens sampled so far.
      limits: largest completion length.
      active: whether the slot still samples tokens.
      completions: results of the whole rollout.
      mailbox: for sums over devices; None: there are none, or XLA's.
    """

    cache: KVCache
    hidden: Float[Array, "S D"]
    sequences: Int32[Array, " S"]
    keys: Array
    prompt_slots: Int32[Array, " S"]
    lengths: Int32[Array, " S"]
    limits: Int32[Array, " S"]
    active: Bool[Array, " S"]
    completions: Completions
    mailbox: partition.Mailbox | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Completions:
    """Completions of the rollout as far as they are decoded, with room for more (`RolloutShapes.rows`) and longer ones
    (`completion_width`).
    """

    tokens: Int32[Array, "B T"]
    logprobs: Float32[Array, "B T"]
    entropies: Float32[Array, "B T"]
    lengths: Int32[Array, " B"]
    finish: Int8[Array, " B"]


@program(static_argnames=("config", "dtype", "shapes"))
def allocate(key: Array, config: ModelConfig, dtype: jnp.dtype, shapes: RolloutShapes) -> tuple[PromptCache, Slots]:
    """Empty device state: all the memory a rollout holds. Only the kind of `key` matters: the slots' keys have it. A
    prefill comes before the first chunk (`partition.mailbox`).
    """
    layers = (config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    prompts, slots = shapes.prompt_slots, shapes.slots
    prompt_cache = PromptCache(
        kv.init_cache(prompts, shapes.prompt_width, *layers),
        jnp.zeros((prompts, config.hidden_size), dtype),
        jnp.zeros(prompts, jnp.int32),
    )
    completions = Completions(
        jnp.zeros((shapes.rows, shapes.completion_width), jnp.int32),
        jnp.zeros((shapes.rows, shapes.completion_width), jnp.float32),
        jnp.zeros((shapes.rows, shapes.completion_width), jnp.float32),
        jnp.zeros(shapes.rows, jnp.int32),
        jnp.full(shapes.rows, FinishReason.LENGTH, jnp.int8),
    )
    return prompt_cache, Slots(
        cache=kv.init_cache(slots, shapes.completion_width, *layers),
        hidden=jnp.zeros((slots, config.hidden_size), dtype),
        sequences=jnp.zeros(slots, jnp.int32),
        keys=jnp.broadcast_to(key, (slots,)),
        prompt_slots=jnp.zeros(slots, jnp.int32),
        lengths=jnp.zeros(slots, jnp.int32),
        limits=jnp.zeros(slots, jnp.int32),
        active=jnp.zeros(slots, bool),
        completions=completions,
        mailbox=partition.mailbox(slots, config.hidden_size, dtype, config.tensor_parallel),
    )


@program
def cast_lora(policy: Policy) -> Any:
    """LoRA A and B in the compute dtype, cast once a rollout; the adapters of a fused projection lie side by side."""
    return fuse_lora_a(jax.tree.map(lambda leaf: leaf.astype(policy.dtype), policy.lora))


def admit(slots: Slots, prompt_cache: PromptCache, key: Array, new: dict[str, np.ndarray]) -> Slots:
    """Start new sequences in the slots of `new["start"]`. `slots` is consumed.

    Args:
      key: random key of the rollout.
      new: for each slot `start` (bool), `sequences`, `prompt_slots`, `limits`, and the two parts of the random key: the
        prompt's `ids` and the index in the group, `samples`.
    """
    return dataclasses.replace(slots, **admit_jit(_fields(slots), prompt_cache.hidden, key, new))


@program(donate_argnames="fields")
def admit_jit(
    fields: dict[str, Array],
    prompt_hidden: Float[Array, "P D"],
    key: Array,
    new: dict[str, Array],
) -> dict[str, Array]:
    """`admit` without the caches, whose widths are those of other limits."""
    start = new["start"]

    def put(name: str, fresh: Array) -> Array:
        return jnp.where(start.reshape(-1, *[1] * (fresh.ndim - 1)), fresh, fields[name])

    return {
        "hidden": put("hidden", prompt_hidden[new["prompt_slots"]]),
        "sequences": put("sequences", new["sequences"]),
        "keys": put("keys", keys.for_rows(key, new["ids"], new["samples"])),
        "prompt_slots": put("prompt_slots", new["prompt_slots"]),
        "lengths": put("lengths", jnp.zeros_like(fields["lengths"])),
        "limits": put("limits", new["limits"]),
        "active": start | fields["active"],
    }


@program(donate_argnames="slots", static_argnames=("steps", "batch_invariant"))
def decode_chunk(
    policy: Policy,
    prompt_cache: PromptCache,
    slots: Slots,
    distribution: Distribution,
    steps: int,
    batch_invariant: bool,
) -> tuple[Slots, Bool[Array, " S"], Int32[Array, "T S"]]:
    """Decode `steps` tokens in every active slot.

    Returns:
      The slots; a copy of `active` that the host reads while the next chunk runs; the sampled tokens, −1 where a slot
      was not active.
    """
    eos_ids = policy.config.eos_token_ids

    def decode(
        policy: Policy, prompt_cache: PromptCache, slots: Slots, distribution: Distribution
    ) -> tuple[Slots, Int32[Array, "T S"]]:
        model = merge_model(policy)

        def step(slots: Slots, _: None) -> tuple[Slots, Int32[Array, " S"]]:
            return _decode_step(model, eos_ids, distribution, batch_invariant, prompt_cache, slots)

        return jax.lax.scan(step, slots, None, length=steps)

    # Each device samples, from the same logits with the same keys.
    arguments, results = (policy, prompt_cache, slots, distribution), (partition.specs(slots), PartitionSpec())
    slots, sampled = partition.on_devices(policy.config.tensor_parallel, decode, *arguments, results=results)
    return slots, jnp.copy(slots.active), sampled


def _decode_step(
    model: Qwen2,
    eos_ids: tuple[int, ...],
    distribution: Distribution,
    batch_invariant: bool,
    prompt_cache: PromptCache,
    slots: Slots,
) -> tuple[Slots, Int32[Array, " S"]]:
    """Sample each active slot's next token, then run the model on it. In this order the last hidden state of a prompt
    is all that a new sequence needs.
    """

    def draw(hidden: Array, token_keys: Array) -> tuple[Array, Array, Array]:
        return sample(model.logits(hidden), distribution, token_keys, batch_invariant)

    prompt_lengths = prompt_cache.lengths[slots.prompt_slots]
    token_keys = keys.for_positions(slots.keys, prompt_lengths + slots.lengths)
    drawing = functools.partial(in_blocks, draw) if batch_invariant else draw
    token, logprob, entropy = drawing(slots.hidden, token_keys)
    failed = slots.active & ~jnp.isfinite(logprob)
    live = slots.active & ~failed
    ended = live & jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))
    lengths = slots.lengths + live

    done = slots.completions
    dropped = done.lengths.shape[0]  # an index out of range is dropped
    sampled_into = jnp.where(live, slots.sequences, dropped)
    touched = jnp.where(slots.active, slots.sequences, dropped)
    reason = jnp.where(failed, jnp.int8(FinishReason.FAILED), jnp.int8(FinishReason.LENGTH))
    finish = jnp.where(ended, jnp.int8(FinishReason.EOS), reason)
    completions = Completions(
        done.tokens.at[sampled_into, slots.lengths].set(token, mode="drop"),
        done.logprobs.at[sampled_into, slots.lengths].set(logprob, mode="drop"),
        done.entropies.at[sampled_into, slots.lengths].set(entropy, mode="drop"),
        done.lengths.at[sampled_into].set(lengths, mode="drop"),
        done.finish.at[touched].set(finish, mode="drop"),
    )
    active = live & ~ended & (lengths < slots.limits)
    hidden, cache, mailbox = model.decode(
        token,
        prompt_cache.cache,
        slots.prompt_slots,
        prompt_lengths,
        slots.cache,
        jnp.where(active, lengths, 0),
        batch_invariant,
        slots.mailbox,
    )
    slots = dataclasses.replace(
        slots, cache=cache, hidden=hidden, lengths=lengths, active=active, completions=completions, mailbox=mailbox
    )
    return slots, jnp.where(live, token, -1)


@program
def gather(tree: Any, kept: Int32[Array, " S2"]) -> Any:
    """Rows `kept` of every array."""
    return jax.tree.map(lambda leaf: leaf[kept], tree)


def _fields(slots: Slots) -> dict[str, Any]:
    """Everything in the slots but the cache; completions and the mailbox are not in slots."""
    apart = "cache", "completions", "mailbox"
    names = [field.name for field in dataclasses.fields(slots) if field.name not in apart]
    return {name: getattr(slots, name) for name in names}


def compact(slots: Slots, kept: Int32[np.ndarray, " S2"], together: int) -> Slots:
    """The slots `kept`, in that order; `slots` is consumed. So many arrays of the cache move at a time and exist twice
    while they do; their number is a multiple of it.
    """
    arrays, structure = jax.tree.flatten(slots.cache)
    moved: list[Array] = []
    for first in range(0, len(arrays), together):
        some = arrays[first : first + together]
        moved += gather(KVCache(tuple(some), ()), kept).keys
        for array in some:
            if isinstance(array, jax.Array):  # no shape alone, as `programs.record` has it
                array.delete()
    cache = jax.tree.unflatten(structure, moved)
    return dataclasses.replace(slots, cache=cache, **gather(_fields(slots), kept))
