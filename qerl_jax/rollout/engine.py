"""Rollout engine: prompts to completions with their behaviour log-probabilities, by continuous batching.

A fixed number of slots decode one sequence each. A prompt is prefilled once and its keys and values are shared by its
group (prefix sharing). The device decodes in chunks of steps. While a chunk runs, the host reads which sequences ended
in the chunk before and refills their slots from the queue, together with those that reach their limit in the running
chunk. Once the queue is empty, survivors move into fewer slots.

Axes: B sequences, P prompts, G group (row = p · G + g), T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int32

from qerl_jax import keys
from qerl_jax.compilation import as_committed
from qerl_jax.models.config import ModelConfig
from qerl_jax.rollout import decode, prefill
from qerl_jax.rollout.prefill_packing import PrefillBatch, pack_prompts, prefill_shapes
from qerl_jax.rollout.schedule import Admission, PromptLoad, Schedule
from qerl_jax.rollout.shapes import RolloutShapes, choose_shapes
from qerl_jax.types import Engine, Policy, Prompts, Rollout, Sampling

_ADMISSION_FIELDS = ("sequences", "prompt_slots", "limits", "ids", "samples")
"""What `decode.admit` needs of each new sequence, besides the slot where it starts."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a rollout.

    Attributes:
      ended: completions that have ended, or will have with the chunks already sent to the device.
      rows: completions of the rollout, B.
      tokens: completion tokens sampled so far.
      completions: token ids, EOS included, of the completions that have ended since the `Progress` before, by row
        p · G + g.
    """

    ended: int
    rows: int
    tokens: int
    completions: Mapping[int, list[int]]


def generate(
    policy: Policy,
    prompts: Prompts | list[list[int]],
    sampling: Sampling,
    key: Array,
    engine: Engine | None = None,
    limits: Sequence[int] | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Rollout:
    """Sample `sampling.num_generations` completions of each prompt.

    The samples of a row depend on `key`, its prompt's id, its index in the group, how often that id came before
    (`Prompts.occurrences`), and its logits; on nothing else of the batch.

    Args:
      policy: policy with the (noisy or clean) norms and adapters to sample from.
      prompts: `Prompts`, or token lists.
      sampling: sampling parameters.
      key: random key of this rollout (`keys.for_step`); one of `jax.random.PRNGKey` samples as `jax.random.key` does.
      engine: how the rollout runs; None: `Engine()`.
      limits: largest completion lengths in tokens, at most `sampling.max_new_tokens`: one for each prompt or one for
        each of the B rows. None: `sampling.max_new_tokens` for all.
      on_progress: called with a `Progress` after every chunk, while the device decodes the next one: time it takes
        beyond that of a chunk delays the rollout.

    Returns:
      B = P · G rows of width prompt width + max_new_tokens.

    Raises:
      ValueError: no prompts, an empty prompt, a token id beyond the vocabulary, prompt + completion beyond the model's
        positions, limits out of range, or too little memory (with the numbers).
    """
    config, key = policy.config, keys.typed(key)
    if not isinstance(prompts, Prompts):
        prompts = Prompts.from_lists(prompts)
    _check_prompts(prompts, config.vocab_size)
    check_positions(config, prompts.tokens.shape[1], sampling.max_new_tokens)
    decoder = _Decoder(policy, prompts, sampling, key, engine or Engine(), _check_limits(limits, prompts, sampling))
    try:
        for progress in decoder.steps():
            on_progress(progress)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"the rollout ran out of device memory with {decoder.shapes.slots} slots of "
            f"{decoder.shapes.completion_width} tokens, {decoder.shapes.cache_bytes / 1e9:.3f} GB of keys and values; "
            "lower rollout_memory_gb, "
            "with which a run can be resumed, or start a new run with a smaller max_completion_length or "
            "max_prompt_length"
        ) from error
    return decoder.result()


def rehearse(
    policy: Policy, prompts: int, prompt_length: int, sampling: Sampling, key: Array, engine: Engine | None = None
) -> None:
    """Make every call of a program that `generate` may make, once, for `programs.record`.

    Args:
      policy, sampling, key, engine: as for `generate`; arrays may be shapes.
      prompts: prompts of a rollout, P.
      prompt_length: width of the prompts' array, tokens.
    """
    numbers = np.ones(prompts, np.int32)
    blank = Prompts(np.zeros((prompts, prompt_length), np.int32), numbers, numbers)
    limits = np.full(prompts * sampling.num_generations, sampling.max_new_tokens)
    _Decoder(policy, blank, sampling, key, engine or Engine(), limits).rehearse()


def check_positions(config: ModelConfig, prompt_length: int, completion_length: int) -> None:
    """Raise ValueError if prompt and completion together have more tokens than the model has positions."""
    if prompt_length + completion_length > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {prompt_length} tokens and {completion_length} new ones exceed the model's "
            f"max_position_embeddings {config.max_position_embeddings}: lower max_completion_length"
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
    """The limit of each row."""
    count, group, most = prompts.tokens.shape[0], sampling.num_generations, sampling.max_new_tokens
    limits = np.full(count, most) if limits is None else np.asarray(limits)
    if limits.shape not in ((count,), (count * group,)) or limits.min() < 1 or limits.max() > most:
        raise ValueError(
            f"limits must be {count} numbers (one a prompt) or {count * group} (one a row) from 1 to max_new_tokens "
            f"{most}, got {limits.tolist()}"
        )
    return np.repeat(limits, group) if len(limits) == count else limits


class _Decoder:
    """One rollout: device state and host schedule."""

    def __init__(
        self, policy: Policy, prompts: Prompts, sampling: Sampling, key: Array, engine: Engine, limits: np.ndarray
    ) -> None:
        width, group, most = prompts.tokens.shape[1], sampling.num_generations, sampling.max_new_tokens
        self.count = max(prompts.tokens.shape[0], engine.prompts or 0)  # of the programs
        self.policy, self.key, self.batch_invariant = policy, key, engine.batch_invariant
        self.distribution = sampling.distribution
        self.tokens, self.lengths, self.ids = (np.asarray(x) for x in (prompts.tokens, prompts.lengths, prompts.ids))
        self.first_samples = group * prompts.earlier()  # a prompt that comes again continues its samples
        self.limits = limits
        self.shapes: RolloutShapes = choose_shapes(policy, self.count, group, width, most, engine)
        at_once = self.shapes.holds(self.count * group)
        self.prefill_shapes = prefill_shapes(self.count, width, engine.batch_invariant, at_once)
        self.most, self.chunk = most, engine.chunk
        self.schedule = Schedule(len(self.lengths), group, self.shapes.slots, self.shapes.prompt_slots)
        self.budget = np.zeros(self.shapes.slots, np.int64)  # tokens that the sequence of each slot may still request
        # Tokens of each sequence whose last one has not been read.
        self.sampled: dict[int, list[int]] = {sequence: [] for sequence in range(len(limits))}
        self.progress = Progress(0, len(limits), 0, {})

    def steps(self) -> Iterator[Progress]:
        """Decode all sequences. The results of a chunk are read while the next one runs."""
        self._begin()
        running, seen = [], self.progress
        while True:
            self._refill()
            if self.schedule.live:
                if not self.schedule.queued:
                    self._compact()
                running.append(self._decode())
            if seen is not self.progress:  # behind the dispatch, so that the device does not wait for who looks at it
                seen = self.progress
                yield seen
            if not running:
                return
            if len(running) == 1 and self.schedule.live:
                continue
            self._read(*running.pop(0))

    def rehearse(self) -> None:
        """Make every call of a program that `steps` may make, once; those that compile longest come first."""
        self._begin()
        self._decode_chunk()
        for shape in self.prefill_shapes:
            self._prefill(PrefillBatch(0, shape), [])
        self._admit([])
        for count in self.shapes.slot_counts()[1:]:
            self._move(count)
            self._decode_chunk()

    def result(self) -> Rollout:
        """The rollout, once all sequences have ended."""
        return assemble(
            self.tokens,
            self.lengths,
            jax.device_get(self.slots.completions),
            self.schedule.group,
            self.most,
            self.policy.config.pad_token_id,
        )

    def _begin(self) -> None:
        self.policy = self.policy.replace(lora=decode.cast_lora(self.policy))
        self.key = as_committed(self.key, self.policy)
        self.prompt_cache, self.slots = decode.allocate(self.key, self.policy.config, self.policy.dtype, self.shapes)

    def _decode_chunk(self) -> tuple[Array, Array]:
        self.slots, active, sampled = decode.decode_chunk(
            self.policy, self.prompt_cache, self.slots, self.distribution, self.chunk, self.batch_invariant
        )
        return active, sampled

    def _decode(self) -> tuple[list[int | None], Array, Array]:
        """Send a chunk to the device. Sequences that reach their limit in it count as ended at once, so that others
        start in their slots right after it. Returns the sequence in each slot, whether the slot continues after the
        chunk, and the sampled tokens, −1 where it was not active.
        """
        active, sampled = self._decode_chunk()
        for array in (active, sampled):
            array.copy_to_host_async()
        sequences = list(self.schedule.sequences)
        self.budget -= self.chunk
        self.schedule.end([slot for slot in self.schedule.live if self.budget[slot] <= 0])
        return sequences, active, sampled

    def _read(self, sequences: list[int | None], active: Array, sampled: Array) -> None:
        """Wait for a chunk and end the sequences that ended in it."""
        active, sampled = np.asarray(active), np.asarray(sampled).T.tolist()
        # Compaction may have moved it since.
        slot_then = {sequence: slot for slot, sequence in enumerate(sequences) if sequence in self.sampled}
        new = {sequence: [token for token in sampled[slot] if token >= 0] for sequence, slot in slot_then.items()}
        for sequence, tokens in new.items():
            self.sampled[sequence] += tokens
        ended = {sequence for sequence, slot in slot_then.items() if not active[slot]}
        self.schedule.end([slot for slot in self.schedule.live if self.schedule.sequences[slot] in ended])
        self.progress = dataclasses.replace(
            self.progress,
            ended=self.progress.rows - self.schedule.queued - len(self.schedule.live),
            tokens=self.progress.tokens + sum(map(len, new.values())),
            completions={sequence: self.sampled.pop(sequence) for sequence in sorted(ended)},
        )

    def _refill(self) -> None:
        loads, admissions = self.schedule.fill()
        lengths = [int(self.lengths[load.prompt]) for load in loads]
        for batch in pack_prompts(lengths, self.prefill_shapes):
            self._prefill(batch, loads[: batch.prompts])
            loads = loads[batch.prompts :]
        if admissions:
            self._admit(admissions)

    def _prefill(self, batch: PrefillBatch, loads: list[PromptLoad]) -> None:
        """Prefill prompts packed into one batch; its padding is dropped."""
        lengths = np.zeros(batch.shape.capacity, np.int32)
        prompt_slots = np.full(batch.shape.capacity, self.shapes.prompt_slots, np.int32)
        lengths[: len(loads)] = self.lengths[[load.prompt for load in loads]]
        prompt_slots[: len(loads)] = [load.prompt_slot for load in loads]
        real = [self.tokens[load.prompt, : self.lengths[load.prompt]] for load in loads]
        tokens = np.concatenate([*real, np.zeros(batch.shape.tokens, np.int32)])[: batch.shape.tokens]
        self.prompt_cache = prefill.prefill(
            self.policy, self.prompt_cache, tokens, lengths, prompt_slots, batch.shape.width, self.batch_invariant
        )

    def _admit(self, admissions: list[Admission]) -> None:
        slots = len(self.schedule.sequences)
        new = {name: np.zeros(slots, np.int32) for name in _ADMISSION_FIELDS}
        start = np.zeros(slots, bool)
        for admission in admissions:
            slot, (prompt, sample) = admission.slot, divmod(admission.sequence, self.schedule.group)
            start[slot] = True
            new["sequences"][slot], new["prompt_slots"][slot] = admission.sequence, admission.prompt_slot
            new["limits"][slot] = self.budget[slot] = self.limits[admission.sequence]
            new["ids"][slot], new["samples"][slot] = self.ids[prompt], self.first_samples[prompt] + sample
        self.slots = decode.admit(self.slots, self.prompt_cache, self.key, {"start": start, **new})

    def _compact(self) -> None:
        """Move the survivors into the smallest number of slots that holds them, one slot count after another (few moves
        are compiled).
        """
        for count in self.shapes.slot_counts():
            if len(self.schedule.live) <= count < len(self.schedule.sequences):
                self._move(count)

    def _move(self, count: int) -> None:
        order = self.schedule.compact(count)
        self.budget = self.budget[order]
        self.slots = decode.compact(self.slots, np.asarray(order, np.int32), self.shapes.moved_together)


def assemble(
    prompts: Int32[np.ndarray, "P L"],
    lengths: Int32[np.ndarray, " P"],
    completions: decode.Completions,
    group: int,
    limit: int,
    pad: int,
) -> Rollout:
    """Prompt and completion of each row, contiguous from column 0, from the tokens and lengths of the prompts, for
    completions of up to `limit` tokens. On the host: on the device each number of rows and each width would be a
    program of its own.
    """
    count, width = prompts.shape
    prompt_lengths, rows = np.repeat(lengths, group), count * group
    own_lengths = completions.lengths[:rows]
    tokens = np.full((rows, width + limit), pad, np.int32)
    logprobs, entropies = np.zeros((2, *tokens.shape), np.float32)
    for row, (start, own) in enumerate(zip(prompt_lengths, own_lengths, strict=True)):
        tokens[row, :start] = prompts[row // group, :start]
        tokens[row, start : start + own] = completions.tokens[row, :own]
        logprobs[row, start : start + own] = completions.logprobs[row, :own]
        entropies[row, start : start + own] = completions.entropies[row, :own]
    index = np.repeat(np.arange(count, dtype=np.int32), group)
    arrays = tokens, logprobs, prompt_lengths, prompt_lengths + own_lengths, completions.finish[:rows], index
    return Rollout(*map(jax.device_put, arrays), entropies=jax.device_put(entropies))
