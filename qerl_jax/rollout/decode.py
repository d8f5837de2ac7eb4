"""The device's side of a rollout: jitted prefill, admission, chunks of decoding and compaction over donated states.

Axes: B completions of the rollout, S slots, P prompt slots, N prompts of one prefill, T tokens (in a
prefill those of all its prompts), D model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32
from qerl_kernels.batch_invariant import in_blocks

from qerl_jax import keys
from qerl_jax.models import cache as kv
from qerl_jax.models import ragged
from qerl_jax.models.cache import KVCache
from qerl_jax.models.lora import side_by_side
from qerl_jax.models.qwen2 import ModelConfig, Qwen2
from qerl_jax.rollout.plan import Plan
from qerl_jax.rollout.sampling import sample
from qerl_jax.types import FinishReason, Policy, Sampling


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "hidden", "lengths"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class HeldPrompts:
    """Prompts whose completions are being decoded.

    Attributes:
      cache: their keys and values.
      hidden: final hidden state of each one's last token, from which all its completions draw their first.
      lengths: tokens of each.
    """

    cache: KVCache
    hidden: Float[Array, "P D"]
    lengths: Int32[Array, " P"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "hidden", "rows", "keys", "held", "counts", "limits", "active", "outputs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Slots:
    """Completions being decoded.

    Attributes:
      cache: keys and values of what follows the prompts.
      hidden: state from which the next token is drawn.
      rows: the completion in each slot.
      keys: its random key.
      held: its prompt's place in `HeldPrompts`.
      counts: tokens drawn so far.
      limits: tokens it may have.
      active: False: nothing more to draw here.
      outputs: of the whole rollout.
    """

    cache: KVCache
    hidden: Float[Array, "S D"]
    rows: Int32[Array, " S"]
    keys: Array
    held: Int32[Array, " S"]
    counts: Int32[Array, " S"]
    limits: Int32[Array, " S"]
    active: Bool[Array, " S"]
    outputs: Outputs


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "logprobs", "counts", "finish"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the rollout's completions have come to; T is the longest completion allowed."""

    tokens: Int32[Array, "B T"]
    logprobs: Float32[Array, "B T"]
    counts: Int32[Array, " B"]
    finish: Int8[Array, " B"]


def allocate(policy: Policy, plan: Plan, rows: int, key: Array) -> tuple[HeldPrompts, Slots]:
    """Empty states of a plan's shapes; all memory a rollout keeps. `key`: any, its kind is that of the slots' keys."""
    return _empty(key, policy.config, policy.dtype, plan, rows)


@functools.partial(jax.jit, static_argnames=("config", "dtype", "plan", "rows"))
def _empty(key: Array, config: ModelConfig, dtype: jnp.dtype, plan: Plan, rows: int) -> tuple[HeldPrompts, Slots]:
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, plan.dtypes)
    prompts, slots = plan.prompt_slots, plan.slots
    held = HeldPrompts(
        kv.init_cache(prompts, plan.prompt_width, *shape),
        jnp.zeros((prompts, config.hidden_size), dtype),
        jnp.zeros(prompts, jnp.int32),
    )
    outputs = Outputs(
        jnp.full((rows, plan.limit), config.pad_token_id, jnp.int32),
        jnp.zeros((rows, plan.limit), jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.full(rows, FinishReason.LENGTH, jnp.int8),
    )
    return held, Slots(
        cache=kv.init_cache(slots, plan.limit, *shape),
        hidden=jnp.zeros((slots, config.hidden_size), dtype),
        rows=jnp.zeros(slots, jnp.int32),
        keys=jnp.broadcast_to(key, (slots,)),
        held=jnp.zeros(slots, jnp.int32),
        counts=jnp.zeros(slots, jnp.int32),
        limits=jnp.zeros(slots, jnp.int32),
        active=jnp.zeros(slots, bool),
        outputs=outputs,
    )


@jax.jit
def prepare(policy: Policy) -> Any:
    """The adapters as a whole rollout reads them: one copy in the compute dtype, those of a projection side by side."""
    return side_by_side(jax.tree.map(lambda leaf: leaf.astype(policy.dtype), policy.lora))


# Its products are this project's kernels or large ones for cuBLAS: XLA's own are not tried, which takes seconds of
# compiling (a first rollout of 7B on an H200, one run each: 27 s with them, 23 without).
@functools.partial(
    jax.jit,
    donate_argnames="held",
    static_argnames=("width", "batch_invariant"),
    compiler_options={"xla_gpu_enable_triton_gemm": False},
)
def prefill(
    policy: Policy,
    held: HeldPrompts,
    tokens: Int32[Array, " T"],
    lengths: Int32[Array, " N"],
    places: Int32[Array, " N"],
    width: int,
    batch_invariant: bool,
) -> HeldPrompts:
    """Run the model over prompts that lie end to end and keep what decoding needs in their places.

    Args:
      tokens: of all prompts, and any filler behind them.
      lengths: tokens of each prompt; 0: there is none.
      places: of each prompt in `held`; those beyond the last are dropped.
      width: at least the longest.
    """
    prompts = ragged.lay_out(lengths, tokens.shape[0], width)
    hidden, entries = policy.model().prefill(tokens, prompts, batch_invariant)
    nowhere = held.lengths.shape[0]
    rows = jnp.append(places, nowhere)[prompts.owner]
    return HeldPrompts(
        kv.write_prompts(held.cache, rows, prompts.positions, entries),
        held.hidden.at[places].set(hidden[prompts.last], mode="drop"),
        held.lengths.at[places].set(lengths, mode="drop"),
    )


@functools.partial(jax.jit, donate_argnames="slots")
def admit(slots: Slots, held: HeldPrompts, key: Array, new: dict[str, Array], stop: Bool[Array, " S"]) -> Slots:
    """Begin completions in the slots of `new["begin"]` and stop those of `stop`.

    Args:
      key: of the rollout.
      new: for each slot: `begin` (bool), `rows`, `held`, `limits`, and for the key the prompt's `ids` and the place in
        the group, `samples`.
    """
    begin = new["begin"]

    def put(fresh: Array, old: Array) -> Array:
        return jnp.where(begin.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

    return dataclasses.replace(
        slots,
        hidden=put(held.hidden[new["held"]], slots.hidden),
        rows=put(new["rows"], slots.rows),
        keys=put(keys.for_rows(key, new["ids"], new["samples"]), slots.keys),
        held=put(new["held"], slots.held),
        counts=put(jnp.zeros_like(slots.counts), slots.counts),
        limits=put(new["limits"], slots.limits),
        active=begin | (slots.active & ~stop),
    )


@functools.partial(jax.jit, donate_argnames="slots", static_argnames=("sampling", "steps", "batch_invariant"))
def decode_chunk(
    policy: Policy, held: HeldPrompts, slots: Slots, sampling: Sampling, steps: int, batch_invariant: bool
) -> tuple[Slots, Bool[Array, " S"], Int32[Array, "T S"]]:
    """Draw `steps` tokens in every active slot.

    Returns:
      The slots; a copy of `active` to be read while the next chunk runs; and the tokens drawn, −1 where a slot drew
      none.
    """
    model = policy.model()

    def step(slots: Slots, _: None) -> tuple[Slots, Int32[Array, " S"]]:
        return _step(model, policy.config.eos_token_ids, sampling, batch_invariant, held, slots)

    slots, drawn = jax.lax.scan(step, slots, None, length=steps)
    return slots, jnp.copy(slots.active), drawn


def _step(
    model: Qwen2,
    eos_ids: tuple[int, ...],
    sampling: Sampling,
    batch_invariant: bool,
    held: HeldPrompts,
    slots: Slots,
) -> tuple[Slots, Int32[Array, " S"]]:
    """Draw each active slot's next token, then run the model on it. The order makes a prompt's last hidden state all
    that a completion needs to begin.
    """

    def draw(hidden: Array, token_keys: Array) -> tuple[Array, Array, Array]:
        logits = model.logits(hidden)
        return ~jnp.isfinite(jnp.max(logits, axis=-1)), *sample(logits, sampling, token_keys, batch_invariant)

    prompt_lengths = held.lengths[slots.held]
    token_keys = keys.for_positions(slots.keys, prompt_lengths + slots.counts)
    drawing = functools.partial(in_blocks, draw) if batch_invariant else draw
    broken, new, logprob = drawing(slots.hidden, token_keys)
    failed = slots.active & broken
    live = slots.active & ~failed
    ended = live & jnp.isin(new, jnp.asarray(eos_ids, jnp.int32))
    counts = slots.counts + live

    out = slots.outputs
    here = jnp.where(live, slots.rows, out.counts.shape[0])  # out of range: dropped
    over = jnp.where(slots.active, slots.rows, out.counts.shape[0])
    finish = jnp.where(
        ended,
        jnp.int8(FinishReason.EOS),
        jnp.where(failed, jnp.int8(FinishReason.FAILED), jnp.int8(FinishReason.LENGTH)),
    )
    outputs = Outputs(
        out.tokens.at[here, slots.counts].set(new, mode="drop"),
        out.logprobs.at[here, slots.counts].set(logprob, mode="drop"),
        out.counts.at[here].set(counts, mode="drop"),
        out.finish.at[over].set(finish, mode="drop"),
    )
    active = live & ~ended & (counts < slots.limits)
    hidden, cache = model.decode(
        new, held.cache, slots.held, prompt_lengths, slots.cache, jnp.where(active, counts, 0), batch_invariant
    )
    drawn = jnp.where(live, new, -1)
    return dataclasses.replace(slots, cache=cache, hidden=hidden, counts=counts, active=active, outputs=outputs), drawn


@jax.jit
def _take(rows: Any, kept: Int32[Array, " S2"]) -> Any:
    return jax.tree.map(lambda leaf: leaf[kept], rows)


def compact(slots: Slots, kept: Int32[Array, " S2"]) -> Slots:
    """Only the slots `kept`, in that order; `slots` is gone. The caches move array by array, so that no more than one
    of them exists twice.
    """

    def move(array: Array) -> Array:
        moved = _take(array, kept)
        array.delete()
        return moved

    fields = {field.name: getattr(slots, field.name) for field in dataclasses.fields(slots)}
    cache, outputs = fields.pop("cache"), fields.pop("outputs")
    return Slots(cache=jax.tree.map(move, cache), outputs=outputs, **_take(fields, kept))
