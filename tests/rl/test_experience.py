"""Dynamic sampling with a stream, a rollout and rewards made of numbers: replaced groups, their order, the counts."""

import array
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import on_replicas
from rich.console import Console

from qerl_jax import train
from qerl_jax.backends.vllm_engine import VllmEngine
from qerl_jax.config import Config
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.data.stream import ProblemStream
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.reporting.phases import Phases
from qerl_jax.rewards.load import Rewards
from qerl_jax.rl.experience import Experience, equal_groups, refill_size
from qerl_jax.run.prepare import Run
from qerl_jax.types import FinishReason, Policy, Prompts, Rollout, TrainState

NAN = float("nan")
CURSOR = 40  # position in the data stream when the step begins
PROMPTS, GROUP = 3, 2
PAD = 7


class Numbers(ProblemStream):
    """Problem n is the n-th after `CURSOR`; draws are recorded."""

    def at(self, cursor: int, count: int) -> list[EncodedProblem]:
        self.sets[0].append((cursor - CURSOR, count))
        numbers = range(cursor - CURSOR, cursor - CURSOR + count)
        return [EncodedProblem(Problem(n, str(n), ""), array.array("i", [n])) for n in numbers]


class World(VllmEngine):
    """Problem n of the stream has the rewards `(table[n], 0)` in its group; draws and keys are recorded. It samples in
    the place of vLLM."""

    def __init__(self, *table: float):
        self.table, self.drawn, self.keys = table, [], []

    def generate(self, actor, prompts: Prompts, sampling, key: jax.Array, engine) -> Rollout:
        self.keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        rows = np.repeat(np.asarray(prompts.ids, np.int32), GROUP)
        member = np.tile(np.arange(GROUP, dtype=np.int32), len(prompts.ids))
        return Rollout(
            tokens=jnp.asarray(np.stack([rows, member, rows + 100, np.full_like(rows, PAD)], axis=1)),
            logprobs=jnp.asarray(np.stack([*[rows] * 3, np.zeros_like(rows)], axis=1), jnp.float32),
            prompt_lengths=jnp.ones(len(rows), jnp.int32),
            lengths=jnp.full(len(rows), 3, jnp.int32),
            finish=jnp.full(len(rows), FinishReason.LENGTH, jnp.int8),
            prompt_index=jnp.asarray(np.repeat(np.arange(len(prompts.ids)), GROUP), jnp.int32),
        )

    def reward(self, *, completions: list[str], **_: object) -> list[float]:
        """A completion's text is its tokens: place in the group, then 100 + the problem's number."""
        pairs = [map(int, text.split()) for text in completions]
        return [0.0 if member else self.table[token - 100] / 2 for member, token in pairs]

    def collect(self, rounds: int, replicas: Replicas = ALONE) -> Experience:
        config = Config(
            model="m", batch_size=PROMPTS * GROUP, num_generations=GROUP, max_prompt_length=4,
            dynamic_sampling=rounds > 0, max_refill_rounds=rounds, reward_funcs=("half",), reward_weights=(2.0,),
        )  # fmt: skip
        tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
        shape = SimpleNamespace(pad_token_id=PAD)
        policy = Policy({}, {}, {}, shape, lora_config=None, tokenizer=tokenizer)
        stream, rewards = Numbers((self.drawn,), None, 0), Rewards(half=self.reward)
        run = Run(config, pathlib.Path(), Console(), policy, rewards, stream, [], vllm=self, replicas=replicas)
        state = TrainState(jnp.int32(1), jnp.int32(CURSOR), {}, {}, {}, None, shape, config, None)
        return train.collect_experience(run, Phases(), state, 0.0)


def check(experience: Experience, items: list[int], world: World) -> None:
    """Problems, rollout, completions, rewards and parts agree row by row."""
    assert [item.problem.id for item in experience.problems] == items
    rows = [n for n in items for _ in range(GROUP)]
    assert experience.rollout.tokens[:, 0].tolist() == rows
    assert experience.rollout.tokens[:, 1].tolist() == [0, 1] * PROMPTS
    assert experience.rollout.tokens[:, 3].tolist() == [PAD] * len(rows)
    assert experience.rollout.logprobs[:, 0].tolist() == rows and not experience.rollout.logprobs[:, 3].any()
    assert experience.rollout.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert experience.completions == [f"{i % GROUP} {n + 100}" for i, n in enumerate(rows)]
    expected = [value for n in items for value in (world.table[n], 0.0)]
    np.testing.assert_array_equal(experience.rewards, np.asarray(expected, np.float32))
    np.testing.assert_array_equal(experience.reward_parts["half"], experience.rewards / 2)
    assert experience.sampled == 2 * GROUP * experience.drawn  # two tokens each, also of groups that were replaced


def test_without_resampling_every_group_stays():
    world = World(0, 0, 1)
    experience = world.collect(0)
    check(experience, [0, 1, 2], world)
    assert (experience.drawn, experience.resampled, experience.resampling_rounds, world.drawn) == (3, 0, 0, [(0, 3)])


def test_equal_groups_are_replaced_by_the_first_useful_fresh_ones():
    """Problem 1 teaches nothing; of the fresh 3, 4 the first that does is 4. Two of three taught: two are enough."""
    world = World(1, 0, 2, 0, 3)
    experience = world.collect(4)
    check(experience, [0, 4, 2], world)
    assert (experience.drawn, experience.resampled, experience.resampling_rounds) == (5, 1, 1)
    assert world.drawn == [(0, 3), (3, 2)] and len(set(world.keys)) == 2
    check(World(1, 0, 2, 4, 3).collect(4), [0, 3, 2], World(1, 0, 2, 4, 3))  # both would do


@pytest.mark.parametrize(
    ("prompts", "equal", "drawn", "size"),
    [
        (32, 1, 32, 2),  # 31 of 32 teach: one is not enough, 2 · 31/32 are
        (32, 8, 32, 16),  # three of four: 8 give 6, 16 give 12
        (32, 8, 48, 16),  # 24 of 48: 16 give 8
        (32, 8, 49, 32),
        (32, 24, 32, 32),  # the whole is the most
        (32, 32, 32, 32),
        (24, 4, 24, 6),  # 12, 6: 6 · 20/24 = 5
        (1, 1, 1, 1),
    ],
)
def test_refills_are_as_large_as_the_shortage(prompts, equal, drawn, size):
    assert refill_size(np.arange(prompts) < equal, drawn) == size


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_resampling_goes_on_until_all_teach_on_any_number_of_replicas(count):
    """One of three taught: a whole round; then two of six: all three again. Of the three groups of a round replicas
    have two and one, one each, or none. Equal groups are on all of them.
    """
    world = World(0, 0, 2, 0, 3, 0, 0, 0, 5)
    for experience in on_replicas(count, lambda replicas: world.collect(4, replicas)):
        check(experience, [4, 8, 2], world)
        assert (experience.drawn, experience.resampled, experience.resampling_rounds) == (9, 2, 2)
        assert experience.rollout.tokens.shape == (6, 4)
    assert world.drawn.count((0, 3)) == count  # each reads the stream of all


def test_rounds_are_bounded_and_what_is_left_stays():
    world = World(*[0] * 9)
    experience = world.collect(2)
    check(experience, [0, 1, 2], world)
    assert (experience.drawn, experience.resampled, experience.resampling_rounds) == (9, 0, 2)
    assert len(set(world.keys)) == 3


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([1, 1], True), ([1, 2], False), ([NAN, 1], True), ([NAN, NAN], True), ([NAN, 1, 1], True),
        ([NAN, 1, 2], False), ([0.1, 0.1, 0.1], True),
    ],
)  # fmt: skip
def test_groups_that_teach_nothing(rewards, equal):
    both = np.asarray([*rewards, *range(len(rewards))], np.float32)
    assert equal_groups(both, len(rewards)).tolist() == [equal, False]
