"""Continuous batching on the host: every sequence starts once, in an idle slot, with its own prompt cached."""

import numpy as np
import pytest

from qerl_jax.rollout.schedule import Schedule


@pytest.mark.parametrize(
    ("prompts", "group", "slots", "prompt_slots"),
    [(1, 1, 1, 1), (5, 3, 4, 4), (4, 8, 32, 4), (9, 1, 4, 4), (6, 4, 3, 2)],
)
def test_random_ends_leave_nothing_out(prompts, group, slots, prompt_slots):
    """Property: in whatever order sequences end, all are decoded, no two prompts in use share a prompt slot, and
    compaction keeps every live sequence, with or without idle slots beside them, and says where it was.
    """
    rng = np.random.default_rng(prompts * slots)
    schedule = Schedule(prompts, group, slots, prompt_slots)
    prompt_slot_of, started, done = {}, [], [0] * prompts
    while True:
        loads, admissions = schedule.fill()
        live = [row for row in schedule.sequences if row is not None]
        for load in loads:
            in_use = {
                prompt_slot_of[row // group]
                for row in live
                if row // group in prompt_slot_of and row // group != load.prompt
            }
            assert load.prompt_slot < prompt_slots and load.prompt_slot not in in_use
            prompt_slot_of[load.prompt] = load.prompt_slot
        for admission in admissions:
            assert schedule.sequences[admission.slot] == admission.sequence
            assert prompt_slot_of[admission.sequence // group] == admission.prompt_slot
            started.append(admission.sequence)
        assert len(live) == len(set(live)) <= len(schedule.sequences)
        if not live:
            break
        held = {row // group for row in started} - {p for p in range(prompts) if done[p] == group}
        assert len(live) == len(schedule.sequences) or not schedule.queued or len(held) == prompt_slots, (
            "an idle slot waits"
        )
        ended = [slot for slot in schedule.live if rng.random() < 0.4]
        for slot in ended:
            done[schedule.sequences[slot] // group] += 1
        schedule.end(ended)
        left = [schedule.sequences[slot] for slot in schedule.live]
        if not schedule.queued and len(schedule.sequences) > len(left) > 0:
            before, count = schedule.sequences, int(rng.integers(len(left), len(schedule.sequences)))
            kept = schedule.compact(count)
            assert [schedule.sequences[slot] for slot in schedule.live] == left and len(set(kept)) == count
            assert [before[slot] for slot in kept] == schedule.sequences
    assert sorted(started) == list(range(prompts * group)) and schedule.queued == 0


def test_cached_prompts_come_before_new_ones():
    """Groups of three in four slots: the second group starts with the slot left over and continues as slots free up."""
    schedule = Schedule(3, 3, 4, 2)
    loads, admissions = schedule.fill()
    assert [load.prompt for load in loads] == [0, 1]
    assert [admission.sequence for admission in admissions] == [0, 1, 2, 3]
    schedule.end([1])
    loads, admissions = schedule.fill()
    assert not loads and [(a.slot, a.sequence) for a in admissions] == [(1, 4)]
    schedule.end([0, 2])  # group 0 is complete: its prompt slot goes to prompt 2
    loads, admissions = schedule.fill()
    assert [(load.prompt, load.prompt_slot) for load in loads] == [(2, 0)]
    assert [admission.sequence for admission in admissions] == [5, 6]
