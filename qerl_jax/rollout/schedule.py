"""Continuous batching: which sequence is decoded in which slot. Host-side bookkeeping without device arrays.

Sequence p · G + g is the g-th completion of prompt p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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

    Args:
      prompts: P.
      group: completions of each prompt, G.
      slots: sequences decoded together.
      prompt_slots: prompts in the prompt cache.
    """

    def __init__(self, prompts: int, group: int, slots: int, prompt_slots: int) -> None:
        self.group = group
        self.sequences: list[int | None] = [None] * slots
        """The sequence in each slot; None: idle."""
        self._started, self._ended = [0] * prompts, [0] * prompts  # sequences of each prompt
        self._waiting_prompts = list(range(prompts))[::-1]
        self._prompt_slots: dict[int, int] = {}  # prompt -> its prompt slot
        self._free_prompt_slots = list(range(prompt_slots))[::-1]

    @property
    def queued(self) -> int:
        """Sequences not started."""
        return self.group * len(self._started) - sum(self._started)

    @property
    def live(self) -> list[int]:
        """Slots that hold a sequence."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]

    def end(self, slots: Sequence[int]) -> None:
        """Free these slots, whose sequences have ended. The prompt slot of a finished group is freed, too."""
        for slot in slots:
            prompt = self.sequences[slot] // self.group
            self.sequences[slot] = None
            self._ended[prompt] += 1
            if self._ended[prompt] == self.group:
                self._free_prompt_slots.append(self._prompt_slots.pop(prompt))

    def fill(self) -> tuple[list[PromptLoad], list[Admission]]:
        """Start sequences in the idle slots, in their order: those that wait of a cached prompt, of which there is at
        most one, before those of new ones, which need a free prompt slot.
        """
        loads, admissions = [], []
        for slot in [slot for slot, sequence in enumerate(self.sequences) if sequence is None]:
            prompt = next((prompt for prompt in self._prompt_slots if self._started[prompt] < self.group), None)
            if prompt is None:
                if not (self._waiting_prompts and self._free_prompt_slots):
                    break
                prompt = self._waiting_prompts.pop()
                self._prompt_slots[prompt] = self._free_prompt_slots.pop()
                loads.append(PromptLoad(prompt, self._prompt_slots[prompt]))
            self.sequences[slot] = prompt * self.group + self._started[prompt]
            self._started[prompt] += 1
            admissions.append(Admission(slot, self.sequences[slot], self._prompt_slots[prompt]))
        return loads, admissions

    def compact(self, slots: int) -> list[int]:
        """Move the live sequences into the first of only `slots` slots. Returns the old slot of each new one (any idle
        slot for those left over).
        """
        live = self.live
        kept = live + [slot for slot in range(len(self.sequences)) if slot not in live][: slots - len(live)]
        self.sequences = [self.sequences[slot] for slot in kept]
        return kept
