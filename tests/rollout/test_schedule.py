"""The host's bookkeeping: every completion is begun once, in an idle slot, beside its own prompt."""

from __future__ import annotations

import numpy as np
import pytest

from qerl_jax.rollout.schedule import Schedule


@pytest.mark.parametrize(
    ("prompts", "group", "slots", "prompt_slots"),
    [(1, 1, 1, 1), (5, 3, 4, 4), (4, 8, 32, 4), (9, 1, 4, 4), (6, 4, 3, 2)],
)
def test_random_ends_leave_nothing_out(prompts, group, slots, prompt_slots):
    """Property: whatever order completions end in, all are decoded, no two prompts share a place while in use, and
    compaction keeps every live completion.
    """
    rng = np.random.default_rng(prompts * slots)
    limits = rng.integers(1, 5, prompts * group).tolist()
    schedule = Schedule(limits, group, slots, prompt_slots)
    place, begun, done = {}, [], [0] * prompts
    while True:
        loads, admissions = schedule.fill()
        live = [row for row in schedule.rows if row is not None]
        for load in loads:
            in_use = {place[row // group] for row in live if row // group in place and row // group != load.prompt}
            assert load.prompt_slot < prompt_slots and load.prompt_slot not in in_use
            place[load.prompt] = load.prompt_slot
        for admission in admissions:
            assert schedule.rows[admission.slot] == admission.row
            assert place[admission.row // group] == admission.prompt_slot
            begun.append(admission.row)
        assert len(live) == len(set(live)) <= len(schedule.rows)
        if not live:
            break
        held = {row // group for row in begun} - {p for p in range(prompts) if done[p] == group}
        assert len(live) == len(schedule.rows) or not schedule.queued or len(held) == prompt_slots, "an idle slot waits"
        ended = [slot for slot in schedule.live if rng.random() < 0.4]
        for slot in ended:
            done[schedule.rows[slot] // group] += 1
        schedule.end(ended)
        left = [schedule.rows[slot] for slot in schedule.live]
        if not schedule.queued and len(schedule.rows) > len(left) > 0:
            kept = schedule.compact(len(left))
            assert [schedule.rows[slot] for slot in schedule.live] == left and len(kept) == len(left)
    assert sorted(begun) == list(range(prompts * group)) and schedule.queued == 0


def test_a_held_prompts_completions_come_before_a_new_prompt():
    """Two groups of three in four slots: the second begins only with what is left, and goes on as slots come free."""
    schedule = Schedule([7] * 9, 3, 4, 2)
    loads, admissions = schedule.fill()
    assert [load.prompt for load in loads] == [0, 1]
    assert [admission.row for admission in admissions] == [0, 1, 2, 3]
    schedule.end([1])
    loads, admissions = schedule.fill()
    assert not loads and [(a.slot, a.row) for a in admissions] == [(1, 4)]
    schedule.end([0, 2])  # group 0 is complete: its place goes to prompt 2
    loads, admissions = schedule.fill()
    assert [(load.prompt, load.prompt_slot) for load in loads] == [(2, 0)]
    assert [admission.row for admission in admissions] == [5, 6]


def test_what_may_become_longest_begins_first():
    """Groups of two with limits 3, 9; 8, 2; 9, 4; 5, 6 in two slots, by hand: while there is a place for another
    prompt, its 9 comes before the 3 of one that is held.
    """
    schedule = Schedule([3, 9, 8, 2, 9, 4, 5, 6], 2, 2, 2)
    begun = []
    while True:
        loads, admissions = schedule.fill()
        begun.append(([load.prompt for load in loads], [admission.row for admission in admissions]))
        if not schedule.live:
            break
        schedule.end([schedule.live[0]])
    # Prompts 0 and 2 have both places until one group is complete.
    expected = [([0, 2], [1, 4]), ([], [5]), ([], [0]), ([1], [2])]
    assert begun[:4] == expected and begun[-1] == ([], [])
    assert sorted(row for _, rows in begun for row in rows) == list(range(8))
