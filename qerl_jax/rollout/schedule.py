"""Continuous batching: which sequence is decoded in which slot. Host-side bookkeeping without device arrays.

Sequence p · G + g is the g-th completion of prompt p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class PromptLoad:
    """A prompt to prefill into a prompt slot."""

    prompt: int
    prompt_slot: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """A sequence to start in a slot."""

    slot: int
    sequence: int
    prompt_slot: int


class Schedule:
    """Queue, slots and prompt slots of one rollout.

    Longest limit first, so that the slots reach their last sequences at about the same time (`fill`).

    Args:
      limits: largest completion length of each sequence, P · G of them.
      group: completions of each prompt, G.
      slots: sequences decoded together.
      prompt_slots: prompts in the prompt cache.
    """

    def __init__(self, limits: Sequence[int], group: int, slots: int, prompt_slots: int) -> None:
        self.group = group
        self.sequences: list[int | None] = [None] * slots
        """The sequence in each slot; None: idle."""
        self._limits = limits

        def longest_last(sequences: Iterable[int]) -> list[int]:
            return sorted(sequences, key=lambda sequence: (limits[sequence], -sequence))

        prompts = range(len(limits) // group)
        self._pending = [longest_last(range(prompt * group, (prompt + 1) * group)) for prompt in prompts]
        next_last = longest_last(sequences[-1] for sequences in self._pending)
        self._waiting_prompts = [sequence // group for sequence in next_last]
        self._ended = {}  # prompt -> number of its sequences that have ended
        self._prompt_slots: dict[int, int] = {}  # prompt -> its prompt slot
        self._free_prompt_slots = list(range(prompt_slots))[::-1]

    @property
    def queued(self) -> int:
        """Sequences not started."""
        return sum(map(len, self._pending))

    @property
    def live(self) -> list[int]:
        """Slots that hold a sequence."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]

    def end(self, slots: Sequence[int]) -> None:
        """Free these slots, whose sequences have ended. The prompt slot of a finished group is freed, too."""
        for slot in slots:
            prompt = self.sequences[slot] // self.group
            self.sequences[slot] = None
            self._ended[prompt] = self._ended.get(prompt, 0) + 1
            if self._ended[prompt] == self.group:
                self._free_prompt_slots.append(self._prompt_slots.pop(prompt))

    def fill(self) -> tuple[list[PromptLoad], list[Admission]]:
        """Start sequences in the idle slots: highest limit first. Among equal limits, cached prompts come before new
        ones (which need a free prompt slot), and prompts with more pending sequences before those with fewer.
        """
        loads, admissions = [], []
        for slot in [slot for slot, sequence in enumerate(self.sequences) if sequence is None]:
            prompts = [prompt for prompt in self._prompt_slots if self._pending[prompt]]
            if self._waiting_prompts and self._free_prompt_slots:
                prompts.append(self._waiting_prompts[-1])
            if not prompts:
                break
            prompt = max(prompts, key=self._priority)
            if prompt not in self._prompt_slots:
                self._prompt_slots[self._waiting_prompts.pop()] = self._free_prompt_slots.pop()
                loads.append(PromptLoad(prompt, self._prompt_slots[prompt]))
            self.sequences[slot] = self._pending[prompt].pop()
            admissions.append(Admission(slot, self.sequences[slot], self._prompt_slots[prompt]))
        return loads, admissions

    def _priority(self, prompt: int) -> tuple[int, bool, int]:
        pending = self._pending[prompt]
        return self._limits[pending[-1]], prompt in self._prompt_slots, len(pending)

    def compact(self, slots: int) -> list[int]:
        """Move the live sequences into the first of only `slots` slots. Returns the old slot of each new one (any idle
        slot for those left over).
        """
        live = self.live
        kept = live + [slot for slot in range(len(self.sequences)) if slot not in live][: slots - len(live)]
        self.sequences = [self.sequences[slot] for slot in kept]
        return kept
