"""Advantages by hand, and the batch they make of a rollout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.types import FinishReason, Rollout

NAN = float("nan")


def advantages(rewards, group, scale="group"):
    with jax.numpy_rank_promotion("raise"):
        return np.asarray(group_advantages(jnp.asarray(rewards, jnp.float32), group, scale))


def test_by_hand():
    """(1, 2, 3): mean 2, std 1 with Bessel's correction. (0, 0, 3): mean 1, std sqrt(3). Of all six: mean 1.5, squares
    0.25 0.25 2.25 2.25 2.25 2.25, sum 9.5, / 5.
    """
    centred = np.array([-1, 0, 1, -1, -1, 2])
    for scale, deviation in (("group", np.repeat([1, 3**0.5], 3)), ("batch", (9.5 / 5) ** 0.5)):
        expected = centred / (deviation + 1e-4)
        np.testing.assert_allclose(advantages([1, 2, 3, 0, 0, 3], 3, scale), expected, rtol=1e-6)
    np.testing.assert_allclose(advantages([1, 2, 3, 0, 0, 3], 3, "none"), centred, rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.0, 0.1, 2.2, 50.3, 1 / 3])
def test_equal_rewards_are_exactly_zero(scale, value):
    """0.1 seven times is not 0.7 in fp32: the mean must leave no remainder that the division then blows up."""
    result = advantages([value] * 7 + list(range(7)), 7, scale)
    assert (result[:7] == 0).all() and np.abs(result[7:]).max() > 0.01


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nan_rewards_count_nowhere(scale):
    """A row that nothing could score: the others get what they would get without it."""
    got = advantages([1, NAN, 3, 8, 5, 5, 9, NAN], 4, scale)
    assert (got[[1, 7]] == 0).all()
    clean = np.array([1, 3, 8, 5, 5, 9.0])
    centred = clean - np.repeat([4, 19 / 3], 3)
    deviation = {"group": np.repeat([clean[:3].std(ddof=1), clean[3:].std(ddof=1)], 3), "batch": clean.std(ddof=1)}
    expected = centred if scale == "none" else centred / (deviation[scale] + 1e-4)
    np.testing.assert_allclose(got[[0, 2, 3, 4, 5, 6]], expected, rtol=1e-5, atol=1e-6)


def test_all_nan_and_single_valid():
    for scale in ("group", "batch", "none"):
        assert (advantages([NAN] * 4 + [NAN, 3, NAN, NAN], 4, scale) == 0).all()


def test_errors_name_both_numbers():
    with pytest.raises(ValueError, match="7 rewards are not a multiple of num_generations 3"):
        group_advantages(jnp.zeros(7), 3)
    with pytest.raises(ValueError, match="'std'"):
        group_advantages(jnp.zeros(6), 3, "std")


def rollout() -> Rollout:
    """Four rows: ended, truncated, failed, ended."""
    return Rollout(
        tokens=jnp.arange(24, dtype=jnp.int32).reshape(4, 6),
        logprobs=jnp.zeros((4, 6)),
        prompt_lengths=jnp.asarray([2, 2, 1, 1], jnp.int32),
        lengths=jnp.asarray([4, 6, 3, 5], jnp.int32),
        finish=jnp.asarray([FinishReason.EOS, FinishReason.LENGTH, FinishReason.FAILED, FinishReason.EOS], jnp.int8),
        prompt_index=jnp.asarray([0, 0, 1, 1], jnp.int32),
    )


def test_loss_mask_is_the_completion_without_what_cannot_teach():
    completion = np.array([[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]], bool)
    advantage = jnp.asarray([1.0, 2, 3, 4])
    np.testing.assert_array_equal(make_batch(rollout(), advantage).loss_mask, completion)
    masked = make_batch(rollout(), advantage, mask_truncated_completions=True).loss_mask
    np.testing.assert_array_equal(masked, completion & np.array([1, 0, 1, 1], bool)[:, None])
    unscored = make_batch(rollout(), advantage, jnp.asarray([0.0, 1, 0, NAN]))
    np.testing.assert_array_equal(unscored.loss_mask, completion & np.array([1, 1, 1, 0], bool)[:, None])
    for batch in (unscored, make_batch(rollout(), advantage)):
        np.testing.assert_array_equal(batch.advantages, advantage)


def test_the_tokens_of_a_failed_row_give_way_to_a_sound_ones():
    """The first sound one's; all others keep theirs, also where the first row failed or all did."""
    tokens = np.arange(24).reshape(4, 6)
    np.testing.assert_array_equal(make_batch(rollout(), jnp.zeros(4)).tokens, tokens[[0, 1, 0, 3]])
    first = rollout().replace(finish=rollout().finish[jnp.array([2, 0, 1, 3])])
    np.testing.assert_array_equal(make_batch(first, jnp.zeros(4)).tokens, tokens[[1, 1, 2, 3]])
    none = rollout().replace(finish=jnp.full(4, FinishReason.FAILED, jnp.int8))
    assert not make_batch(none, jnp.zeros(4)).loss_mask.any()
