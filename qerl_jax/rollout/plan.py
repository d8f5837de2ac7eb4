"""How many sequences are decoded together, and what memory that takes.

Axes: B sequences, P prompts, G group, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from qerl_jax.models.qwen2 import ModelConfig
from qerl_jax.types import Engine, Policy

# At the tail survivors move into fewer slots; each number of them costs a compilation. A step of 7B takes 6.1 ms on an
# H200 with 128 slots, 3.0 with 32 and 2.2 with 8: halving pays above 32, below it a quarter will do.
_HALVED_ABOVE = 32
_SMALLEST = 8
_SHARE_OF_FREE = 0.9  # the rest is for activations and logits
_MOST_KEY_BIAS = 3.0  # times the scale of the scores: rounded, it moves one by up to 3/16 of the query's element there
_WHOLE = 8  # caches hold a multiple of so many tokens: the attention kernel copies no less


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes of a rollout.

    Attributes:
      slots: sequences decoded together.
      prompt_slots: prompts whose keys and values are held at one time; the completions of a prompt share one.
      prompt_width: tokens of a prompt's cache, a multiple of 8.
      limit: tokens of a completion's cache, likewise.
      cache_bytes: of both caches together at their largest, when survivors are moved.
      dtypes: of each layer's keys and values.
    """

    slots: int
    prompt_slots: int
    prompt_width: int
    limit: int
    cache_bytes: int
    dtypes: tuple[jnp.dtype, ...]

    def sizes(self) -> list[int]:
        """Numbers of slots of the whole rollout, largest first: all, and what survivors are compacted into."""
        sizes = [self.slots]
        while (fewer := sizes[-1] // (2 if sizes[-1] > _HALVED_ABOVE else 4)) >= _SMALLEST:
            sizes.append(fewer)
        return sizes


def token_bytes(config: ModelConfig, dtypes: Sequence[jnp.dtype]) -> int:
    """Bytes of one token's keys and values in all layers, of which each has its dtype."""
    return 2 * config.num_kv_heads * config.head_dim * sum(dtype.itemsize for dtype in dtypes)


def cache_dtypes(policy: Policy, kv_cache_dtype: str) -> tuple[jnp.dtype, ...]:
    """dtype of each layer's keys and values.

    Under "fp8_e4m3" a layer keeps the compute dtype where an element of its key bias exceeds `most_key_bias`. e4m3 has
    three bits behind the point, so that a key is off by up to 1/16 of itself whatever its scale: where a bias of
    hundreds stands in every key, that is more than what tells keys apart. Qwen2 and Qwen2.5 have such biases in their
    first and last layers, and models that store those keys in e4m3 talk nonsense.

    Args:
      policy: where its biases are abstract, they count as small.
      kv_cache_dtype: as in `Engine`.
    """
    layers = [policy.frozen["layers"][i] for i in range(policy.config.num_layers)]
    if kv_cache_dtype == "auto":
        return (policy.dtype,) * len(layers)
    biases = [layer["self_attn"]["qkv_proj"]["bias"] for layer in layers]
    if any(isinstance(bias, jax.ShapeDtypeStruct) for bias in biases):
        largest = np.zeros(len(layers))
    else:
        first = policy.config.num_heads * policy.config.head_dim
        count = policy.config.num_kv_heads * policy.config.head_dim
        largest = np.asarray(_largest([bias[first : first + count] for bias in biases]))
    fp8 = jnp.dtype(jnp.float8_e4m3fn)
    most = most_key_bias(policy.config.head_dim)
    return tuple(policy.dtype if bias > most else fp8 for bias in largest)


def most_key_bias(head_dim: int) -> float:
    """The largest key bias that e4m3 keys may have: `3 √H`, because scores are divided by `√H`."""
    return _MOST_KEY_BIAS * head_dim**0.5


@jax.jit
def _largest(biases: list[Array]) -> Float32[Array, " L"]:
    return jnp.stack([jnp.abs(bias.astype(jnp.float32)).max() for bias in biases])


def cache_note(policy: Policy, kv_cache_dtype: str) -> str | None:
    """Which layers do not hold what `kv_cache_dtype` asks for, in a sentence for people; None where all do."""
    dtypes = cache_dtypes(policy, kv_cache_dtype)
    kept = [i for i, dtype in enumerate(dtypes) if kv_cache_dtype != "auto" and dtype != jnp.float8_e4m3fn]
    if not kept:
        return None
    return (
        f"kv_cache_dtype {kv_cache_dtype}: of {len(dtypes)} layers these keep their keys and values in "
        f"{dtypes[kept[0]].name}, because their key bias exceeds "
        f"{most_key_bias(policy.config.head_dim):.1f}: {', '.join(map(str, kept))}"
    )


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
    dtypes = cache_dtypes(policy, engine.kv_cache_dtype)
    each = token_bytes(policy.config, dtypes)
    largest = max(token_bytes(policy.config, [dtype]) for dtype in dtypes) // 2
    asked = prompt_width, limit
    prompt_width, limit = (-(-tokens // _WHOLE) * _WHOLE for tokens in asked)

    def plan(count: int) -> Plan:
        held = min(prompts, count, 2 * -(-count // group))
        shapes = Plan(count, held, prompt_width, limit, 0, dtypes)
        # While survivors move into fewer slots, one layer's keys or values lie in both places.
        moved = sum(shapes.sizes()[1:2]) * limit * largest
        return dataclasses.replace(shapes, cache_bytes=each * (count * limit + held * prompt_width) + moved)

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
