"""How many sequences are decoded together, and what memory that takes.

Axes: B sequences, P prompts, G group, T tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.models.qwen2 import ModelConfig
from qerl_jax.types import Policy

_SHRINK = 4  # at the tail, survivors move into a quarter of the slots: each size costs a compilation
_SMALLEST = 8
_SHARE_OF_FREE = 0.9  # the rest is for activations and logits
_WHOLE = 8  # caches hold a multiple of so many tokens: the attention kernel copies no less


@dataclasses.dataclass(frozen=True)
class Engine:
    """How a rollout runs. Nothing here changes what is drawn, but for the rounding of the logits: under
    `batch_invariant` not even that.

    Attributes:
      slots: most sequences decoded together; None: all.
      memory_gb: what their keys and values may take, in 1e9 bytes: fewer are decoded together where not all fit. None:
        all that `slots` asks for, or an error where the device has less than that free.
      chunk: decode steps between two looks at which have ended.
      batch_invariant: a completion's bits do not depend on slots, chunk, refill or neighbours (among rollouts with
        arrays of one prompt width and one `max_new_tokens`).
    """

    slots: int | None = None
    memory_gb: float | None = None
    chunk: int = 16
    batch_invariant: bool = False

    def __post_init__(self):
        for name in ("slots", "memory_gb", "chunk"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes of a rollout.

    Attributes:
      slots: sequences decoded together.
      prompt_slots: prompts whose keys and values are held at one time; the completions of a prompt share one.
      prompt_width: tokens of a prompt's cache, a multiple of 8.
      limit: tokens of a completion's cache, likewise.
      cache_bytes: of both caches together at their largest, when survivors are moved.
    """

    slots: int
    prompt_slots: int
    prompt_width: int
    limit: int
    cache_bytes: int

    def sizes(self) -> list[int]:
        """Numbers of slots of the whole rollout, largest first: all, and what survivors are compacted into."""
        sizes = [self.slots]
        while sizes[-1] // _SHRINK >= _SMALLEST:
            sizes.append(sizes[-1] // _SHRINK)
        return sizes


def token_bytes(config: ModelConfig, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def make_plan(
    policy: Policy,
    prompts: int,
    group: int,
    prompt_width: int,
    limit: int,
    engine: Engine,
) -> Plan:
    """As many slots as are wanted and fit `engine.memory_gb`.

    A slot takes `limit` tokens of cache; a prompt `prompt_width`. Of prompts twice as many are held as fill the slots,
    so that a new group can begin while the last completions of an old one are still being decoded.

    Args:
      prompts: P of the rollout.
      group: completions of each.
      prompt_width: longest prompt, tokens.
      limit: longest completion, tokens.
      engine: its limits on slots and memory.

    Raises:
      ValueError: not even one completion fits, or without a `memory_gb` not all that are wanted; with the numbers and
        what to lower.
    """
    each = token_bytes(policy.config, policy.dtype)
    asked = prompt_width, limit
    prompt_width, limit = (-(-tokens // _WHOLE) * _WHOLE for tokens in asked)

    def plan(count: int) -> Plan:
        held = min(prompts, count, 2 * -(-count // group))
        shapes = Plan(count, held, prompt_width, limit, 0)
        moved = sum(shapes.sizes()[1:2])  # survivors lie in both places while they move into fewer slots
        return dataclasses.replace(shapes, cache_bytes=each * ((count + moved) * limit + held * prompt_width))

    wanted = min(prompts * group, engine.slots or prompts * group)
    memory_gb = engine.memory_gb
    available, source = _available(memory_gb)
    if available is None or plan(wanted).cache_bytes <= available:
        return plan(wanted)
    if memory_gb is None or plan(1).cache_bytes > available:
        need = plan(wanted if memory_gb is None else 1)
        advice = "set rollout_memory_gb so that fewer are decoded at a time" if memory_gb is None else "raise it"
        raise ValueError(
            f"{source} {available / 1e9:.3g} cannot hold {need.slots} completions of {asked[1]} tokens and "
            f"{need.prompt_slots} prompts of {asked[0]}: they need {need.cache_bytes / 1e9:.3g} GB; lower "
            f"max_completion_length, or {advice}"
        )
    low, high = 1, wanted  # the largest count that fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle).cache_bytes <= available else (low, middle)
    return plan(low - low % _SMALLEST if low > _SMALLEST else low)


def _available(memory_gb: float | None) -> tuple[float | None, str]:
    if memory_gb is not None:
        return round(memory_gb * 1e9), "rollout_memory_gb"
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None, ""
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return _SHARE_OF_FREE * free, f"{_SHARE_OF_FREE:.0%} of the free device memory, in GB,"
