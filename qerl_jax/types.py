"""The pytrees exchanged between the stages of a run.

Axes: B sequences, P prompts, G group (B = P · G, row = p · G + g), T tokens, L layers, D model.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int8, Int32


class FinishReason(enum.IntEnum):
    """Why a completion ended."""

    LENGTH = 0
    """Truncated at its token limit."""
    EOS = 1
    """Its last token is one of the model's EOS ids."""
    FAILED = 2
    """The largest logit was not finite: the completion is excluded from the update."""


_STATIC = {"static": True}  # of a pytree's field: no array


class _Replace:
    def replace(self, **changes):
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["frozen", "norms", "lora", "base_norms"],
    meta_fields=["config", "lora_config"],
    drop_fields=["tokenizer", "source"],
)
@dataclasses.dataclass(frozen=True)
class Policy(_Replace):
    """A language model split for training: frozen weights, layer norms, adapters. `models.qwen2.merge_model` makes the
    NNX module of them.

    Attributes:
      frozen: weights besides the layer norms, in the compute dtype: projections, biases, embedding, head, final norm.
        No update changes them.
      norms: the 2 L layer norms, fp32: `{"layers": {i: {"input_layernorm": {"weight"}, "post_attention_layernorm":
        {"weight"}}}}`.
      lora: adapters, fp32 master weights.
      config: `qerl_jax.models.config.ModelConfig`.
      lora_config: `qerl_jax.models.lora.LoraConfig`, shape and PEFT metadata of the adapters.
      base_norms: the checkpoint's layer norms where an imported adapter replaced them, else None.
      tokenizer: a transformers tokenizer or None. Not part of the pytree: None inside jit.
      source: directory or hub id of the base model, which an export names; None where the weights came from elsewhere.
        Not part of the pytree.
    """

    frozen: Any
    norms: Any
    lora: Any
    config: Any
    lora_config: Any
    base_norms: Any = None
    tokenizer: Any = None
    source: str | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype, bf16 or fp32: the dtype of the embedding."""
        return self.frozen["embed_tokens"].dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState(_Replace):
    """Everything that an update changes, and its static settings.

    Attributes:
      step: i32[], rollouts completed.
      cursor: i32[], position in the data stream: problems drawn so far.
      norms, lora: the trees being trained (norms only under `train_norms`).
      opt_state: optax state of the trained trees.
      reference_norms: the checkpoint's norms, for the KL term, where `norms` were imported with an adapter or are
        trained; else None.
      model: `qerl_jax.models.config.ModelConfig`.
      config: `qerl_jax.config.Config`.
      optimizer: an optax transformation, or the config's AdamW (`rl.adamw.AdamW`).
    """

    step: Int32[Array, ""]
    cursor: Int32[Array, ""]
    norms: Any
    lora: Any
    opt_state: Any
    reference_norms: Any
    model: Any = dataclasses.field(metadata=_STATIC)
    config: Any = dataclasses.field(metadata=_STATIC)
    optimizer: Any = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts(_Replace):
    """Right-padded prompts, on the host: a rollout packs them there.

    Attributes:
      tokens: token ids, padding after `lengths`.
      lengths: tokens of each prompt.
      ids: id of the problem. Sampling keys depend on it, and on how often it came before.
      occurrences: how often each id came before; None: among these prompts.
    """

    tokens: Int32[np.ndarray, "P T"]
    lengths: Int32[np.ndarray, " P"]
    ids: Int32[np.ndarray, " P"]
    occurrences: Int32[np.ndarray, " P"] | None = None

    def earlier(self) -> Int32[np.ndarray, " P"]:
        """`occurrences`, counted where they are not given."""
        if self.occurrences is not None:
            return np.asarray(self.occurrences, np.int32)
        seen: Counter[int] = Counter()
        found = np.zeros(len(self.ids), np.int32)
        for place, name in enumerate(np.asarray(self.ids).tolist()):
            found[place] = seen[name]
            seen[name] += 1
        return found

    def part(self, places: Int32[np.ndarray, " Q"]) -> Prompts:
        """Some of the prompts, whose samples are those that they have beside the others."""
        arrays = self.tokens, self.lengths, self.ids, self.earlier()
        return Prompts(*(np.asarray(array, np.int32)[places] for array in arrays))

    @classmethod
    def from_lists(cls, prompts: list[list[int]], ids: list[int] | None = None, length: int | None = None) -> Prompts:
        """Pad token lists by zeros on the right to `length` (None: the longest). ids default to 0, 1, 2, …

        Raises ValueError for an empty list, an empty prompt or one longer than `length`, and for more or fewer ids.
        """
        if not prompts:
            raise ValueError("no prompts: need at least one")
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) == 0:
            raise ValueError(f"prompt {lengths.index(0)} is empty: a completion needs at least one token before it")
        width = max(lengths) if length is None else length
        if max(lengths) > width:
            raise ValueError(
                f"prompt {lengths.index(max(lengths))} has {max(lengths)} tokens, more than the {width} allowed"
            )
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        ids = range(len(prompts)) if ids is None else ids
        if len(ids) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts have {len(ids)} ids: each needs one")
        return cls(*(np.asarray(x, np.int32) for x in (tokens, lengths, ids)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Distribution:
    """The distribution over the next token as programs take it: `Sampling` without lengths and counts. Another
    temperature is another array, for which nothing is compiled again; truncation is static.

    Attributes:
      temperature: divides the logits; None: greedy.
      top_k, top_p, min_p: as in `Sampling`.
    """

    temperature: Float32[ArrayLike, ""] | None
    top_k: int = dataclasses.field(metadata=_STATIC)
    top_p: float = dataclasses.field(metadata=_STATIC)
    min_p: float = dataclasses.field(metadata=_STATIC)

    @property
    def truncates(self) -> bool:
        """Whether some tokens have probability 0."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class Sampling(_Replace):
    """Sampling settings. Hashable.

    Attributes:
      max_new_tokens: longest completion in tokens, EOS included.
      temperature: divides the logits; 0 means greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
      min_p: drop tokens less likely than min_p times the most likely; 0 keeps all.
      num_generations: completions per prompt, G.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_generations: int = 1

    def __post_init__(self):
        for name, low in (("max_new_tokens", 1), ("num_generations", 1), ("temperature", 0), ("top_k", 0)):
            if not getattr(self, name) >= low:  # so that NaN is refused, too
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")

    @property
    def distribution(self) -> Distribution:
        """The distribution that tokens are drawn from."""
        temperature = np.float32(self.temperature) if self.temperature else None
        return Distribution(temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class Engine(_Replace):
    """How a rollout is executed. It changes a completion at most through the rounding of its logits, and under
    `batch_invariant` not at all.

    Attributes:
      slots: most sequences decoded together; None: all.
      memory_gb: limit of the KV cache, in 1e9 bytes; where it does not hold all sequences, fewer are decoded together.
        None: no limit but `free_bytes`.
      chunk: decode steps between two checks for ended sequences. While others wait, a slot idles for half a chunk
        after a completion that reached its limit, and for one and a half after one that ended by itself.
      batch_invariant: the bits of a completion do not depend on slots, chunk, refill or neighbours (among rollouts of
        one prompt width and one `max_new_tokens`).
      prompts: a rollout of fewer prompts runs in the programs of one of so many; None: in its own.
      free_bytes: memory that weights and state leave on the device, for the KV cache and what a step takes besides;
        where it does not hold all sequences, an error. Looked at without a `memory_gb`; None: enough.
    """

    slots: int | None = None
    memory_gb: float | None = None
    chunk: int = 8
    batch_invariant: bool = False
    prompts: int | None = None
    free_bytes: float | None = None

    def __post_init__(self):
        for name in ("slots", "memory_gb", "chunk", "prompts"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout(_Replace):
    """Prompts and their completions, each row contiguous from column 0.

    Attributes:
      tokens: prompt, then completion, then padding.
      logprobs: behaviour log-probability of each completion token, in nats, under the distribution sampled from; 0
        elsewhere.
      prompt_lengths: tokens of the prompt.
      lengths: tokens of prompt and completion together.
      finish: `FinishReason`.
      prompt_index: p, index of the prompt.
      entropies: entropy of the policy (the noisy one in training) at each completion token, in nats: of the softmax of
        its logits over the temperature, before truncation; 0 elsewhere. None where it was not recorded.
    """

    tokens: Int32[Array, "B T"]
    logprobs: Float32[Array, "B T"]
    prompt_lengths: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    finish: Int8[Array, " B"]
    prompt_index: Int32[Array, " B"]
    entropies: Float32[Array, "B T"] | None = dataclasses.field(default=None, kw_only=True)

    @property
    def attention_mask(self) -> Bool[Array, "B T"]:
        """True on prompt and completion tokens."""
        return jnp.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def completion_mask(self) -> Bool[Array, "B T"]:
        """True on completion tokens, EOS included."""
        return self.attention_mask & (jnp.arange(self.tokens.shape[1]) >= self.prompt_lengths[:, None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch(Rollout):
    """A scored rollout: the fields of `Rollout` (no `entropies`, which no update reads) and two more.

    Attributes:
      advantages: one per sequence.
      loss_mask: True on the tokens that enter the loss (column t: the token at t is predicted from those before it).
    """

    advantages: Float32[Array, " B"]
    loss_mask: Bool[Array, "B T"]


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Token ids of every completion, EOS included, as host lists."""
    tokens, starts, ends = (np.asarray(x) for x in (rollout.tokens, rollout.prompt_lengths, rollout.lengths))
    return [row[start:end].tolist() for row, start, end in zip(tokens, starts, ends, strict=True)]
