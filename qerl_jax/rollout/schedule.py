"""Which completion is decoded in which slot: host-side bookkeeping without arrays of the device.

Row = p · G + g is the g-th completion of prompt p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


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

    Completions that may become longest are begun first, so that the slots come to their last ones at about one time.
    How long they do become nobody knows: where all limits are equal, prompts come in their order.

    Args:
      limits: tokens that each row may have, P · G of them.
      group: completions of each prompt, G.
      slots: sequences decoded together.
      prompt_slots: prompts held at one time.
    """

    def __init__(self, limits: Sequence[int], group: int, slots: int, prompt_slots: int) -> None:
        self.group = group
        self.rows: list[int | None] = [None] * slots
        """The row in each slot; None: idle."""
        self._limits = limits

        def longest_last(rows: Iterable[int]) -> list[int]:
            return sorted(rows, key=lambda row: (limits[row], -row))

        prompts = range(len(limits) // group)
        self._unbegun = [longest_last(range(prompt * group, (prompt + 1) * group)) for prompt in prompts]
        self._waiting = [row // group for row in longest_last(rows[-1] for rows in self._unbegun)]  # next one last
        self._ended = {}  # prompt -> completions of it ended
        self._places: dict[int, int] = {}  # prompt -> its prompt slot
        self._free_places = list(range(prompt_slots))[::-1]

    @property
    def queued(self) -> int:
        """Completions not begun."""
        return sum(map(len, self._unbegun))

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

    def fill(self) -> tuple[list[Load], list[Admission]]:
        """Begin completions in idle slots, those with the highest limits first; among equal ones those of prompts
        already held, with most completions left, before those of new prompts, for which there must be a place.
        """
        loads, admissions = [], []
        for slot in [slot for slot, row in enumerate(self.rows) if row is None]:
            prompts = [prompt for prompt in self._places if self._unbegun[prompt]]
            if self._waiting and self._free_places:
                prompts.append(self._waiting[-1])
            if not prompts:
                break
            prompt = max(prompts, key=self._urgency)
            if prompt not in self._places:
                self._places[self._waiting.pop()] = self._free_places.pop()
                loads.append(Load(prompt, self._places[prompt]))
            self.rows[slot] = self._unbegun[prompt].pop()
            admissions.append(Admission(slot, self.rows[slot], self._places[prompt]))
        return loads, admissions

    def _urgency(self, prompt: int) -> tuple[int, bool, int]:
        rows = self._unbegun[prompt]
        return self._limits[rows[-1]], prompt in self._places, len(rows)

    def compact(self, slots: int) -> list[int]:
        """Move what is live into the first of only `slots` slots; returns the old slot of each new one (idle ones take
        any).
        """
        live = self.live
        kept = live + [slot for slot in range(len(self.rows)) if slot not in live][: slots - len(live)]
        self.rows = [self.rows[slot] for slot in kept]
        return kept
