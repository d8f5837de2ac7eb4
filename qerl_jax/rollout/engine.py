"""Rollout: prompts to completions with their behaviour log-probabilities.

Fixed slots, each decoding one completion. A prompt is prefilled once and its keys and values are shared by its group.
The device decodes in chunks of steps; meanwhile the host reads which slots had ended one chunk before, refills them
and those whose limit the running chunk reaches from the queue, and at the tail moves the survivors into fewer slots.

Axes: B sequences, P prompts, G group (row = p · G + g), T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from qerl_jax.models.qwen2 import ModelConfig
from qerl_jax.rollout import decode
from qerl_jax.rollout.packing import Pack, pack
from qerl_jax.rollout.plan import Plan, make_plan
from qerl_jax.rollout.schedule import Admission, Load, Schedule
from qerl_jax.rollout.stop import StopWatch, cut_at_stop
from qerl_jax.types import Engine, Policy, Prompts, Rollout, Sampling


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a rollout is: completions ended or sure to end with what has been sent to the device, of how many, and
    tokens drawn so far.
    """

    ended: int
    rows: int
    tokens: int


def generate(
    policy: Policy,
    prompts: Prompts | list[list[int]],
    sampling: Sampling,
    key: Array,
    engine: Engine | None = None,
    limits: Sequence[int] | None = None,
) -> Rollout:
    """Sample `sampling.num_generations` completions of each prompt.

    A row's samples depend on `key`, its prompt's id, its place in the group and its logits, not on the batch it is in.

    Args:
      policy: with the norms (noisy or not) and adapters to sample from; `policy.tokenizer` is needed for `stop`
        strings only.
      prompts: `Prompts`, or token lists.
      sampling: how to draw.
      key: of this rollout; `keys.for_step`.
      engine: how to run.
      limits: tokens that completions may have, at most `sampling.max_new_tokens`: a number for each prompt, or one for
        each of the B rows; None: all of those.

    Returns:
      B = P · G rows of width prompt width + max_new_tokens.

    Raises:
      ValueError: no prompts, an empty one, a token id beyond the vocabulary, prompt + completion beyond the model's
        positions, `stop` without a tokenizer, limits out of range, or too little memory (with the numbers).
    """
    running = stream(policy, prompts, sampling, key, engine, limits)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


def stream(
    policy: Policy,
    prompts: Prompts | list[list[int]],
    sampling: Sampling,
    key: Array,
    engine: Engine | None = None,
    limits: Sequence[int] | None = None,
) -> Generator[Progress, None, Rollout]:
    """`generate` as a generator: yields a `Progress` after every chunk and returns the Rollout."""
    config: ModelConfig = policy.config
    if not isinstance(prompts, Prompts):
        prompts = Prompts.from_lists(prompts, pad=config.pad_token_id)
    _check_prompts(prompts, config.vocab_size)
    check_positions(config, prompts.tokens.shape[1], sampling.max_new_tokens)
    if sampling.stop and policy.tokenizer is None:
        raise ValueError(f"stop strings {list(sampling.stop)} need a tokenizer, and the policy has none")
    run = _Run(policy, prompts, sampling, key, engine or Engine(), _check_limits(limits, prompts, sampling))
    try:
        yield from run.steps()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"the rollout ran out of device memory with {run.plan.slots} slots of {run.plan.limit} tokens, "
            f"{run.plan.cache_bytes / 1e9:.3f} GB of keys and values; lower rollout_memory_gb, "
            "max_completion_length or max_prompt_length"
        ) from error
    rollout = _assemble(prompts, run.slots.outputs, run.sampling, config.pad_token_id)
    return cut_at_stop(rollout, sampling.stop, policy.tokenizer, config.pad_token_id) if sampling.stop else rollout


def check_positions(config: ModelConfig, prompt_length: int, completion_length: int) -> None:
    """Raise ValueError if prompt and completion together have more tokens than the model has positions."""
    if prompt_length + completion_length > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {prompt_length} tokens and {completion_length} new ones exceed the model's "
            f"max_position_embeddings {config.max_position_embeddings}"
        )


def _check_prompts(prompts: Prompts, vocab_size: int) -> None:
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    if len(lengths) == 0:
        raise ValueError("no prompts: need at least one")
    if lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        raise ValueError(f"prompts of {lengths.min()} to {lengths.max()} tokens in an array of width {tokens.shape[1]}")
    real = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
    if real.min() < 0 or real.max() >= vocab_size:
        raise ValueError(
            f"prompts hold token ids from {real.min()} to {real.max()}, the model's vocab_size is {vocab_size}"
        )


def _check_limits(limits: Sequence[int] | None, prompts: Prompts, sampling: Sampling) -> np.ndarray:
    """A limit for each row."""
    count, group, most = prompts.tokens.shape[0], sampling.num_generations, sampling.max_new_tokens
    limits = np.full(count, most) if limits is None else np.asarray(limits)
    if limits.shape not in ((count,), (count * group,)) or limits.min() < 1 or limits.max() > most:
        raise ValueError(
            f"limits must be {count} numbers (one a prompt) or {count * group} (one a row) from 1 to max_new_tokens "
            f"{most}, got {limits.tolist()}"
        )
    return np.repeat(limits, group) if len(limits) == count else limits


class _Run:
    """One rollout: the device's states and the host's schedule."""

    def __init__(
        self, policy: Policy, prompts: Prompts, sampling: Sampling, key: Array, engine: Engine, limits: np.ndarray
    ) -> None:
        count, width = prompts.tokens.shape
        group, most = sampling.num_generations, sampling.max_new_tokens
        self.policy, self.key, self.batch_invariant = policy, key, engine.batch_invariant
        self.sampling = sampling.replace(stop=())
        self.tokens, self.lengths, self.ids = (np.asarray(x) for x in (prompts.tokens, prompts.lengths, prompts.ids))
        self.limits = limits
        self.plan: Plan = make_plan(policy, count, group, width, most, engine)
        self.chunk = -(-most // -(-most // engine.chunk))  # equal chunks up to the longest completion
        self.schedule = Schedule(limits.tolist(), group, self.plan.slots, self.plan.prompt_slots)
        self.budget = np.zeros(self.plan.slots, np.int64)  # tokens each slot's completion may still ask for
        self.stop = StopWatch(sampling.stop, policy.tokenizer)
        self.progress = Progress(0, count * group, 0)

    def steps(self) -> Generator[Progress, None, None]:
        """Decode everything. What has ended in one chunk is looked at while the next one runs."""
        self.policy = self.policy.replace(lora=decode.prepare(self.policy))
        self.held, self.slots = decode.allocate(self.policy, self.plan, self.progress.rows, self.key)
        running, stopped = [], []
        while True:
            self._refill(stopped)
            if self.schedule.live:
                if not self.schedule.queued:
                    self._compact()
                running.append(self._decode())
            if not running:
                return
            if len(running) == 1 and self.schedule.live:
                continue
            stopped = self._look(running.pop(0))
            yield self.progress

    def _decode(self) -> _Chunk:
        """Send a chunk off. Completions that it brings to their limits count as ended at once, so that others begin in
        their slots right behind it.
        """
        self.slots, active, drawn = decode.decode_chunk(
            self.policy, self.held, self.slots, self.sampling, self.chunk, self.batch_invariant
        )
        for array in (active, drawn):
            array.copy_to_host_async()
        chunk = _Chunk(list(self.schedule.rows), active, drawn)
        self.budget -= self.chunk
        self.schedule.end([slot for slot in self.schedule.live if self.budget[slot] <= 0])
        return chunk

    def _look(self, chunk: _Chunk) -> list[int]:
        """Take note of what has ended; returns the slots that a stop string ends."""
        active, drawn = np.asarray(chunk.active), np.asarray(chunk.drawn)
        places = {row: slot for slot, row in enumerate(chunk.rows)}  # then: survivors may have moved since
        ended, stopped = [], []
        for slot in self.schedule.live:
            row = self.schedule.rows[slot]
            if row not in places:
                continue  # begun after this chunk
            then = places[row]
            if not active[then]:
                ended.append(slot)
            elif self.stop.reached(row, drawn[drawn[:, then] >= 0, then].tolist()):
                stopped.append(slot)
        self.schedule.end(ended + stopped)
        self.progress = dataclasses.replace(
            self.progress,
            ended=self.progress.rows - self.schedule.queued - len(self.schedule.live),
            tokens=self.progress.tokens + int((drawn >= 0).sum()),
        )
        return stopped

    def _refill(self, stopped: list[int]) -> None:
        loads, admissions = self.schedule.fill()
        for call in pack([int(self.lengths[load.prompt]) for load in loads], alone=self.batch_invariant):
            self._prefill(call, loads[: call.prompts])
            loads = loads[call.prompts :]
        if admissions or stopped:
            self._admit(admissions, stopped)

    def _prefill(self, call: Pack, loads: list[Load]) -> None:
        """Prefill some prompts, packed into one of few shapes; what fills it up goes nowhere."""
        tokens = np.zeros(call.tokens, np.int32)
        lengths = np.zeros(call.rows, np.int32)
        places = np.full(call.rows, self.plan.prompt_slots, np.int32)
        lengths[: len(loads)] = self.lengths[[load.prompt for load in loads]]
        places[: len(loads)] = [load.prompt_slot for load in loads]
        real = [self.tokens[load.prompt, : self.lengths[load.prompt]] for load in loads]
        tokens[: lengths.sum()] = np.concatenate(real)
        self.held = decode.prefill(self.policy, self.held, tokens, lengths, places, call.width, self.batch_invariant)

    def _admit(self, admissions: list[Admission], stopped: list[int]) -> None:
        slots = len(self.schedule.rows)
        new = {name: np.zeros(slots, np.int32) for name in ("rows", "held", "limits", "ids", "samples")}
        begin, stop = np.zeros(slots, bool), np.zeros(slots, bool)
        stop[stopped] = True
        for admission in admissions:
            slot, (prompt, sample) = admission.slot, divmod(admission.row, self.schedule.group)
            begin[slot] = True
            new["rows"][slot], new["held"][slot] = admission.row, admission.prompt_slot
            new["limits"][slot] = self.budget[slot] = self.limits[admission.row]
            new["ids"][slot], new["samples"][slot] = self.ids[prompt], sample
        self.slots = decode.admit(self.slots, self.held, self.key, {"begin": begin, **new}, stop)

    def _compact(self) -> None:
        """Move the survivors into the fewest slots that hold them."""
        size = min(size for size in self.plan.sizes() if size >= len(self.schedule.live))
        if size < len(self.schedule.rows):
            order = self.schedule.compact(size)
            self.budget = self.budget[order]
            self.slots = decode.compact(self.slots, jax.device_put(np.asarray(order, np.int32)))


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk on its way: the row in each slot, which go on after it, and the tokens drawn (−1: none)."""

    rows: list[int | None]
    active: Array
    drawn: Array


@functools.partial(jax.jit, static_argnames=("sampling", "pad"))
def _assemble(prompts: Prompts, outputs: decode.Outputs, sampling: Sampling, pad: int) -> Rollout:
    """Each row's prompt and completion side by side from column 0."""
    count, width = prompts.tokens.shape
    group, limit = sampling.num_generations, sampling.max_new_tokens
    prompt_lengths = jnp.repeat(prompts.lengths, group)
    columns = jnp.arange(width + limit)
    place = columns - prompt_lengths[:, None]  # within the completion
    inside = (place >= 0) & (place < outputs.counts[:, None])

    def shifted(array: Array) -> Array:
        return jnp.take_along_axis(array, jnp.clip(place, 0, limit - 1), axis=1)

    prompt = jnp.pad(jnp.repeat(prompts.tokens, group, axis=0), ((0, 0), (0, limit)))
    tokens = jnp.where(place < 0, prompt, jnp.where(inside, shifted(outputs.tokens), pad))
    return Rollout(
        tokens,
        jnp.where(inside, shifted(outputs.logprobs), 0.0),
        prompt_lengths=prompt_lengths,
        lengths=prompt_lengths + outputs.counts,
        finish=outputs.finish,
        prompt_index=jnp.repeat(jnp.arange(count, dtype=jnp.int32), group),
    )
