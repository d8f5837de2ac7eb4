"""Dynamic sampling with a stream, a rollout and a score made of numbers: what is replaced, by what, what is counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rollout.collect import collect, equal_groups
from qerl_jax.types import FinishReason, Rollout

NAN = float("nan")
PROMPTS, GROUP = 3, 2


class World:
    """Problem n of the stream scores `(table[n], 0)` in its group; everything that happens is recorded."""

    def __init__(self, *table: float):
        self.table, self.drawn, self.keys = table, [], []

    def draw(self, offset: int, count: int) -> list[int]:
        self.drawn.append((offset, count))
        return list(range(offset, offset + count))

    def roll(self, items: list[int], key: jax.Array) -> Rollout:
        self.keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        rows = np.repeat(np.asarray(items, np.int32), GROUP)
        member = np.tile(np.arange(GROUP, dtype=np.int32), len(items))
        return Rollout(
            tokens=jnp.asarray(np.stack([rows, member, rows + 100], axis=1)),
            logprobs=jnp.asarray(np.stack([rows] * 3, axis=1), jnp.float32),
            prompt_lengths=jnp.ones(len(rows), jnp.int32),
            lengths=jnp.full(len(rows), 3, jnp.int32),
            finish=jnp.full(len(rows), FinishReason.EOS, jnp.int8),
            prompt_index=jnp.asarray(np.repeat(np.arange(len(items)), GROUP), jnp.int32),
        )

    def score(self, items: list[int], rollout: Rollout) -> tuple[list[float], dict[str, list[float]]]:
        rewards = [value for n in items for value in (self.table[n], 0.0)]
        return rewards, {"half": [r / 2 for r in rewards]}

    def collect(self, rounds: int):
        return collect(self.draw, self.roll, self.score, jax.random.key(1), PROMPTS, GROUP, rounds)


def check(experience, items: list[int], world: World) -> None:
    """Items, rollout, rewards and parts agree row by row."""
    assert experience.items == items
    rows = [n for n in items for _ in range(GROUP)]
    assert experience.rollout.tokens[:, 0].tolist() == rows
    assert experience.rollout.tokens[:, 1].tolist() == [0, 1] * PROMPTS
    assert experience.rollout.logprobs[:, 0].tolist() == rows
    assert experience.rollout.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]
    expected = [value for n in items for value in (world.table[n], 0.0)]
    np.testing.assert_array_equal(experience.rewards, np.asarray(expected, np.float32))
    np.testing.assert_array_equal(experience.reward_parts["half"], experience.rewards / 2)


def test_without_refill_every_group_stays():
    world = World(0, 0, 1)
    experience = world.collect(0)
    check(experience, [0, 1, 2], world)
    assert (experience.drawn, experience.refilled, experience.rounds, world.drawn) == (3, 0, 0, [(0, 3)])


def test_equal_groups_are_replaced_by_the_first_useful_fresh_ones():
    """Problem 1 teaches nothing; of the fresh 3, 4, 5 the first that does is 4."""
    world = World(1, 0, 2, 0, 3, 4)
    experience = world.collect(4)
    check(experience, [0, 4, 2], world)
    assert (experience.drawn, experience.refilled, experience.rounds) == (6, 1, 1)
    assert world.drawn == [(0, 3), (3, 3)] and len(set(world.keys)) == 2


def test_refill_goes_on_until_all_teach():
    world = World(0, 0, 2, 0, 3, 0, 0, 0, 5)
    experience = world.collect(4)
    check(experience, [4, 8, 2], world)
    assert (experience.drawn, experience.refilled, experience.rounds) == (9, 2, 2)


def test_rounds_are_bounded_and_what_is_left_stays():
    world = World(*[0] * 9)
    experience = world.collect(2)
    check(experience, [0, 1, 2], world)
    assert (experience.drawn, experience.refilled, experience.rounds) == (9, 0, 2)
    assert len(set(world.keys)) == 3


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([1, 1], True),
        ([1, 2], False),
        ([NAN, 1], True),
        ([NAN, NAN], True),
        ([NAN, 1, 1], True),
        ([NAN, 1, 2], False),
        ([0.1, 0.1, 0.1], True),
    ],
)
def test_groups_that_teach_nothing(rewards, equal):
    both = np.asarray([*rewards, *range(len(rewards))], np.float32)
    assert equal_groups(both, len(rewards)).tolist() == [equal, False]
