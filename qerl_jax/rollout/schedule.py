"""Which completion is decoded in which slot: host-side bookkeeping without arrays of the device.

Row = p · G + g is the g-th completion of prompt p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Load:
    """A prompt to be prefilled into a prompt slot."""

    prompt: int
    prompt_slot: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """A completion to be begun in a slot."""

    slot: int
    row: int
    prompt_slot: int


class Schedule:
    """The queue of completions, the slots and the prompt slots of one rollout.

    Args:
      prompts: P.
      group: completions of each, G.
      slots: sequences decoded together.
      prompt_slots: prompts held at one time.
    """

    def __init__(self, prompts: int, group: int, slots: int, prompt_slots: int) -> None:
        self.group = group
        self.rows: list[int | None] = [None] * slots
        """The row in each slot; None: idle."""
        self._waiting = list(range(prompts))[::-1]  # prompts not begun, next one last
        self._begun = {}  # prompt -> completions of it begun
        self._ended = {}  # prompt -> completions of it ended
        self._places: dict[int, int] = {}  # prompt -> its prompt slot
        self._free_places = list(range(prompt_slots))[::-1]

    @property
    def queued(self) -> int:
        """Completions not begun."""
        return len(self._waiting) * self.group + sum(self.group - begun for begun in self._begun.values())

    @property
    def live(self) -> list[int]:
        """Slots that hold a completion."""
        return [slot for slot, row in enumerate(self.rows) if row is not None]

    def end(self, slots: Sequence[int]) -> None:
        """The completions in these slots have ended; a prompt whose group is complete gives its place back."""
        for slot in slots:
            prompt = self.rows[slot] // self.group
            self.rows[slot] = None
            self._ended[prompt] = self._ended.get(prompt, 0) + 1
            if self._ended[prompt] == self.group:
                self._free_places.append(self._places.pop(prompt))
                del self._begun[prompt]

    def fill(self) -> tuple[list[Load], list[Admission]]:
        """Begin completions in idle slots: first of prompts already held, those with most completions left before
        others, then of new prompts while there is a place for one.
        """
        loads, admissions = [], []
        for slot in [slot for slot, row in enumerate(self.rows) if row is None]:
            held = [prompt for prompt, begun in self._begun.items() if begun < self.group]
            if held:
                prompt = min(held, key=lambda prompt: self._begun[prompt])
            elif self._waiting and self._free_places:
                prompt = self._waiting.pop()
                self._begun[prompt], self._places[prompt] = 0, self._free_places.pop()
                loads.append(Load(prompt, self._places[prompt]))
            else:
                break
            self.rows[slot] = prompt * self.group + self._begun[prompt]
            admissions.append(Admission(slot, self.rows[slot], self._places[prompt]))
            self._begun[prompt] += 1
        return loads, admissions

    def compact(self, slots: int) -> list[int]:
        """Move what is live into the first of only `slots` slots; returns the old slot of each new one (idle ones take
        any).
        """
        live = self.live
        kept = live + [slot for slot in range(len(self.rows)) if slot not in live][: slots - len(live)]
        self.rows = [self.rows[slot] for slot in kept]
        return kept
