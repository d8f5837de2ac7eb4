"""How an update is divided into micro-batches: tokens of a micro-batch, and how many layers keep their activations
or recompute them.

Settled from the limits of a run and the memory of the device, not from what a rollout produced, so that a run has one
set of shapes; and from the buckets of the limits, so that most runs of a model have the same.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
from qerl_kernels.gpu import Gpu

from qerl_jax import partition
from qerl_jax.buckets import bucket, round_up
from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.linear import XlaMatmuls, xla_matmuls
from qerl_jax.rl import flash_attention
from qerl_jax.rl.activations import Keeps, layer_bytes, peak_bytes
from qerl_jax.rl.micro_batches import PackShape, assign
from qerl_jax.rl.state import trained_trees
from qerl_jax.types import Engine, TrainState

_ALIGNMENT = 128  # tokens; rows of a GEMM's tile
_FULL_RATE = 5120 * 3584  # tokens x hidden size beyond which a micro-batch gains nothing on an H200
_LAYER_FLOP = 3e11  # of a layer's forward pass: below, its programs end before the host has launched the next ones
_MOST_TOKENS = 8192, 20480  # of a micro-batch; the second where 8192 tokens of a layer are below `_LAYER_FLOP`
_HALF_FLOP = 1e11  # of a layer's forward pass: below, half a micro-batch waits for the host as long as a whole one
_SHORT = 1024  # tokens, about: a longer segment is long (`PackShape`)
# Large batches have micro-batches of a whole number of these tokens, a prompt of 256 beside 4096 of its completions,
# whatever their limits. Where all completions reach their limit, that may cost 15 %; shorter ones fill any size alike.
_COMMON_TOKENS, _COMMON_COST = 4352, 1.15
_LARGE_BATCH = 7  # micro-batches, at least, of sequences at their limits: the last one may be half empty
_LATENCY = 200  # tokens that would take as long as what a micro-batch costs besides its tokens
_SHARING_COST = 1.05  # of an update, at most, whose programs those of other limits are
_SHARE = 0.94  # usable share of device memory; allocator and libraries take the rest


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """Shape of an update. Hashable.

    Attributes:
      pack: pack of a micro-batch.
      recomputed: layers, the first ones, that keep only their input and run their forward pass again.
      recomputed_gate_up: layers that keep all but gate and up and run that projection again.
      kept_bytes: activations kept on the device for the backward pass.
      working_bytes: most that is needed besides at one time: for a layer's backward pass or the head.
      lacking_bytes: missing even so; above 0 the update cannot run.
      device_bytes: memory of the device, of which these are a part; None: no limit was given.
      rollout_bytes: of it, what the weights that a rollout reads and the state leave; None as `device_bytes`.
    """

    pack: PackShape
    recomputed: int
    recomputed_gate_up: int
    kept_bytes: int
    working_bytes: int
    lacking_bytes: int = 0
    device_bytes: float | None = dataclasses.field(default=None, compare=False)
    rollout_bytes: float | None = dataclasses.field(default=None, compare=False)

    def layers(self, count: int) -> list[Keeps]:
        """What each layer of a model of `count` layers keeps.

        Those that recompute are the first ones: in the backward pass they come when most activations are freed.
        """
        whole = count - self.recomputed - self.recomputed_gate_up
        some = [Keeps.INPUT] * self.recomputed + [Keeps.ALL_BUT_GATE_UP] * self.recomputed_gate_up
        return some + [Keeps.ALL] * whole


def within(plan: UpdatePlan | None, engine: Engine) -> Engine:
    """The engine of rollouts in the memory that a plan leaves them; None: that of a device without limit."""
    return engine.replace(free_bytes=plan.rollout_bytes) if plan else engine


def make_update_plan(
    state: TrainState,
    frozen: Any,
    device_bytes: float | None = None,
    longest: int | None = None,
    replicas: int = 1,
    gpu: Gpu | None = None,
) -> UpdatePlan:
    """The plan of all updates of a run, made once.

    Args:
      state, frozen: as for `grpo_step`; shapes will do.
      device_bytes: memory that the process may use on the device, or on each of those over which the layers are
        divided; weights, state and gradient take a part of it. None: no limit, so that nothing is recomputed.
      longest: tokens of a batch's rows; None: `max_prompt_length + max_completion_length`.
      replicas: processes that share the micro-batches.
      gpu: on which it is; None: the default device.
    """
    config: Config = state.config
    free = rollout_bytes = None
    if device_bytes is not None:
        bytes_of = functools.partial(partition.bytes_on_device, count=state.model.tensor_parallel)
        held, trained = bytes_of((frozen, state)), trained_trees(state.lora, state.norms, config)
        free = max(0.0, _SHARE * device_bytes - held - bytes_of(trained))
        rollout_bytes = device_bytes - held
    longest = config.max_prompt_length + config.max_completion_length if longest is None else longest
    itemsize = frozen["embed_tokens"].dtype.itemsize
    xla = xla_matmuls(frozen["layers"], itemsize, gpu)
    plan = choose_plan(state.model.part, itemsize, config, config.batch_size, longest, free, xla, replicas)
    return dataclasses.replace(plan, device_bytes=device_bytes, rollout_bytes=rollout_bytes)


def choose_plan(
    model: ModelConfig,
    itemsize: int,
    config: Config,
    rows: int,
    longest: int,
    free_bytes: float | None,
    xla: XlaMatmuls = XlaMatmuls(),  # noqa: B008  # a constant
    replicas: int = 1,
) -> UpdatePlan:
    """The micro-batch that is computed fastest in the memory there is, up to the size from which more gains nothing.

    A larger one shares more prompts and runs nearer to the full rate; where its activations do not fit, layers
    recompute some of them, which may cost more than it gains (`_cost`). Several replicas are busy together with as many
    micro-batches as a multiple of theirs.

    It is chosen for the buckets of the limits, so that runs with others have the same programs (`buckets`), unless that
    costs more than 5 %. Large batches of other limits and groups have one size, too, unless it costs more than 15 %.

    Args:
      model: its shape, or that of one device's part.
      itemsize: bytes of the compute dtype.
      config: `tokens_per_micro_batch` and `update_memory_gb` take the place of what is chosen and of `free_bytes`.
      rows: sequences of a batch.
      longest: tokens of a batch's rows, prompt and completion.
      free_bytes: for activations; None: no limit.
      xla: memory that the frozen layers need where XLA multiplies.
      replicas: as in `make_update_plan`.
    """
    if config.update_memory_gb is not None:
        free_bytes = config.update_memory_gb * 1e9
    prompt = max(config.max_prompt_length, longest - config.max_completion_length)
    prefix, suffix = min(prompt, longest), min(config.max_completion_length, longest)
    budget, target = config.tokens_per_micro_batch, _target_tokens(model)

    def fastest(limits: _Limits) -> UpdatePlan:
        most = max((n for n in range(1, rows + 1) if limits.tokens(n) <= target), default=1)
        sizes = [max(limits.longest, limits.tokens(n)) for n in range(most, 0, -1)]
        if budget is not None:
            sizes = [max(limits.longest, min(budget, limits.tokens(rows)))]
        plans = [_plan(model, itemsize, config, _pack(limits, tokens, rows), free_bytes, xla) for tokens in sizes]
        fitting = [plan for plan in plans if not plan.lacking_bytes]
        return min(fitting, key=lambda plan: _cost(model, limits, rows, plan, replicas)) if fitting else plans[-1]

    limits = _Limits(longest, prefix, suffix, config.num_generations)
    shared, own = fastest(limits.in_buckets()), fastest(limits)
    tokens = round(target) // _COMMON_TOKENS * _COMMON_TOKENS
    if budget is None and limits.longest <= tokens and limits.tokens(rows) >= _LARGE_BATCH * tokens:
        common = _plan(model, itemsize, config, _pack(limits.in_rows(tokens), tokens, rows), free_bytes, xla)
        costs = [
            _cost(model, limits, rows, plan, replicas, _at_limits(limits, rows, plan.pack)) for plan in (common, own)
        ]
        if not common.lacking_bytes and costs[0] <= _COMMON_COST * costs[1]:
            return common
    costs = [_cost(model, limits, rows, plan, replicas) for plan in (shared, own)]
    return own if shared.lacking_bytes or costs[0] > _SHARING_COST * costs[1] else shared


class _Limits(NamedTuple):
    """Most tokens of a sequence, of its prefix and of its suffix; sequences of a prefix."""

    longest: int
    prefix: int
    suffix: int
    group: int

    def tokens(self, sequences: int) -> int:
        """Tokens of so many sequences, whole groups but for the last, at their longest."""
        prompts = -(-sequences // self.group)
        return min(sequences * self.longest, prompts * self.prefix + sequences * self.suffix)

    def in_buckets(self) -> _Limits:
        """Their buckets."""
        prefix, suffix = bucket(self.prefix), bucket(self.suffix)
        is_sum = self.longest == self.prefix + self.suffix
        return _Limits(prefix + suffix if is_sum else bucket(self.longest), prefix, suffix, self.group)

    def in_rows(self, tokens: int) -> _Limits:
        """Their buckets, the larger part as long as a row of attention over so many tokens."""
        prefix, suffix = bucket(self.prefix), bucket(self.suffix)
        row = tokens // flash_attention.rows_of(tokens, max(prefix, suffix))
        prefix, suffix = (prefix, row) if suffix >= prefix else (row, suffix)
        return _Limits(min(tokens, prefix + suffix), prefix, suffix, self.group)


def _target_tokens(model: ModelConfig) -> float:
    """Tokens of a micro-batch from which more gains nothing: the device runs at its full rate, ahead of it the host."""
    most, more = _MOST_TOKENS
    return min(_FULL_RATE / model.hidden_size, most if _layer_flop(model, most) >= _LAYER_FLOP else more)


def _has_half(model: ModelConfig, pack: PackShape) -> bool:
    tokens = pack.tokens // 2
    is_one = pack.tokens % (2 * _ALIGNMENT) == 0 and tokens >= pack.holding(1).longest
    return is_one and _layer_flop(model, tokens) >= _HALF_FLOP


def _layer_flop(model: ModelConfig, tokens: int) -> int:
    """Of a layer's forward pass, without attention's products."""
    return 2 * tokens * sum(n * k for n, k in model.projection_shapes().values())


def _plan(
    model: ModelConfig,
    itemsize: int,
    config: Config,
    pack: PackShape,
    free_bytes: float | None,
    xla: XlaMatmuls,
) -> UpdatePlan:
    """The plan of a pack that recomputes least."""
    pack, layers = dataclasses.replace(pack, has_half=_has_half(model, pack)), model.num_layers
    # Of wholes, and of the half, which keeps half as much: its larger share for attention takes no memory from wholes.
    needs = [layer_bytes(model, itemsize, some, config, xla) for some in (pack.wholes(), pack.half()) if some]
    need = needs[0]
    limit = float("inf") if free_bytes is None else free_bytes
    # Gate and up go first: running their projection again is some 0.6 of a forward pass for 0.7 of the bytes.
    divisions = [(0, n) for n in range(layers)] + [(n, layers - n) for n in range(layers + 1)]
    for recomputed, recomputed_gate_up in divisions:
        whole = layers - recomputed - recomputed_gate_up
        kept = layers * need.input + (layers - recomputed) * need.rest + whole * need.gate_up
        if kept + need.head > limit and recomputed < layers:
            continue  # the peak is at least that
        plan = UpdatePlan(pack, recomputed, recomputed_gate_up, kept, 0)
        peak = max(peak_bytes(plan.layers(layers), each) for each in needs)
        plan = dataclasses.replace(plan, working_bytes=peak - kept)
        if peak <= limit:
            return plan
    lacking = 0 if config.update_memory_gb is not None else max(0, round(peak - limit))
    return dataclasses.replace(plan, lacking_bytes=lacking)


def _cost(
    model: ModelConfig,
    limits: _Limits,
    rows: int,
    plan: UpdatePlan,
    replicas: int = 1,
    micro_batches: int | None = None,
) -> float:
    """Relative time of an update whose completions are all as long as they may be. `micro_batches`: how many there are,
    None: `_micro_batches`.
    """
    micro_batches = _micro_batches(limits, rows, plan.pack) if micro_batches is None else micro_batches
    shapes = {name: n * k for name, (n, k) in model.projection_shapes().items()}
    share = (shapes["gate_proj"] + shapes["up_proj"]) / sum(shapes.values())
    passes = 4 + 2 * (plan.recomputed + share * plan.recomputed_gate_up) / model.num_layers
    busiest = -(-micro_batches // replicas)
    return busiest * (plan.pack.tokens + _LATENCY) * passes


def _micro_batches(limits: _Limits, rows: int, pack: PackShape) -> int:
    """Micro-batches of groups whose sequences are all as long as they may be; `assign` may need fewer."""
    _, prefix, suffix, group = limits
    groups = -(-rows // group)
    suffixes = pack.most_suffixes(pack.longest_segment)
    whole = min(pack.tokens // (prefix + group * suffix), pack.prefixes, suffixes // group)
    if whole:
        return -(-groups // whole)
    together = max(1, min((pack.tokens - prefix) // suffix, suffixes))
    rest = group % together
    if not rest:
        return groups * (group // together)
    rests = max(1, min(pack.tokens // (prefix + rest * suffix), pack.prefixes, suffixes // rest))
    return groups * (group // together) - (-groups // rests)


def _at_limits(limits: _Limits, rows: int, pack: PackShape) -> int:
    """Micro-batches that `assign` makes of such groups."""
    lengths, prompts = np.full(rows, limits.longest), np.arange(rows) // limits.group
    return len(assign(lengths, lengths - min(limits.suffix, limits.longest), prompts, pack).rows)


def _pack(limits: _Limits, tokens: int, rows: int) -> PackShape:
    tokens = round_up(tokens, _ALIGNMENT)
    # Completions are rarely as long as their limit. More segments cost time in attention, empty ones too.
    suffixes = min(bucket(rows), -(-2 * tokens // min(limits.suffix, 512)))
    prefixes = min(suffixes, -(-suffixes // limits.group) + 1)
    pack = PackShape(tokens, prefixes, suffixes, *limits[:3])
    short = tokens // flash_attention.rows_of(tokens, min(_SHORT, pack.longest_segment))
    if pack.longest_segment <= short:
        return pack
    beside_long = min(suffixes, -(-tokens // min(limits.suffix, short)))
    return dataclasses.replace(pack, short=short, suffixes_beside_long=beside_long)


def recomputation(plan: UpdatePlan) -> str:
    """What of a plan's forward pass runs again, in words."""
    some = [f"{plan.recomputed} layers"] if plan.recomputed else []
    some += [f"gate and up of {plan.recomputed_gate_up} layers"] if plan.recomputed_gate_up else []
    return f"{' and '.join(some) or 'nothing'} recomputed"


def out_of_memory(plan: UpdatePlan) -> str:
    """The error of an update that did not fit: what was planned, and what to lower."""
    limit = plan.device_bytes
    unknown = ", for no device (make_update_plan(state, frozen, device_bytes()) makes a plan for this one)"
    of_device = unknown if limit is None else f", of the device's {limit / 1e9:.1f} GB"
    kept, working = plan.kept_bytes / 1e9, plan.working_bytes / 1e9
    return (
        f"the update ran out of memory: micro-batches of {plan.pack.tokens} tokens were planned with {kept:.1f} GB of "
        f"activations and {working:.1f} GB for one program{of_device}; lower update_memory_gb below {kept:.1f} (layers "
        "are then recomputed), tokens_per_micro_batch or logprob_chunk_size"
    )
