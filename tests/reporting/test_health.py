"""What a run says of itself, from rows made by hand."""

import dataclasses
import re

import pytest

from qerl_jax.config import Config
from qerl_jax.reporting.health import MAX_SKIPPED_STEPS, UntrainedError, refuse_skipped, refuse_untrained, warnings

HEALTHY = {
    "reward": 0.3, "accuracy": 0.3, "frac_reward_zero_std": 0.4, "completions/clipped_ratio": 0.05,
    "completions/mean_length": 300.0, "entropy": 0.3, "grad_norm": 0.1, "skipped": 0.0, "tokens": 900.0,
    "completions/failed": 0.0,
}  # fmt: skip


def rows(count: int, **changes: float | None) -> list[dict]:
    return [HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()} for _ in range(count)]


def kinds(*parts: list[dict]) -> set[str]:
    return set(warnings([row for part in parts for row in part]))


def test_a_healthy_run_says_nothing():
    assert (
        kinds(rows(40)) == kinds(rows(10), rows(10, reward=0.5, accuracy=0.5, completions__mean_length=90.0)) == set()
    )
    assert kinds([]) == kinds(rows(2, frac_reward_zero_std=1.0)) == set()


def test_three_steps_without_a_signal():
    assert kinds(rows(5), rows(3, frac_reward_zero_std=1.0)) == {"equal rewards"}
    assert kinds(rows(3, frac_reward_zero_std=1.0), rows(1)) == set()
    assert kinds(rows(3, reward=None, frac_reward_zero_std=1.0)) == {"no reward"}
    assert kinds(rows(3, reward=float("nan"), accuracy=None)) == {"no reward"}
    assert kinds(rows(3, completions__clipped_ratio=1.0)) == {"truncated"}
    assert kinds(rows(3, grad_norm=0.0)) == {"no gradient"} and kinds(rows(3, skipped=1.0)) == {"not finite"}
    assert kinds(rows(3, grad_norm=0.0, frac_reward_zero_std=1.0)) == {"equal rewards"}
    never = warnings(rows(3, grad_norm=0.0, completions__clipped_ratio=1.0))["truncated"]
    collapsed = warnings(rows(1) + rows(3, grad_norm=0.0, completions__clipped_ratio=1.0))["truncated"]
    assert collapsed == f"{never}, or lower learning_rate" and never.endswith("max_completion_length: raise it")


def test_what_is_said_has_its_numbers():
    """Before and after, and the steps that it is said of."""
    first = rows(10, reward=0.31, accuracy=0.12, completions__mean_length=300.0, entropy=0.51)
    last = rows(10, reward=0.62, accuracy=0.122, completions__mean_length=44.0, entropy=0.023)
    said = warnings(first + rows(5) + last)
    assert {kind: re.split("[;:]", sentence)[0] for kind, sentence in said.items()} == {
        "paid for something else": "the reward rose from 0.31 to 0.62, accuracy stayed (12.0% to 12.2%)",
        "shorter": "completions shrank from 300 to 44 tokens, accuracy did not rise",
        "entropy": "the entropy fell from 0.51 to 0.023 nats a token",
    }
    idle = {
        "not finite": ({"skipped": 1.0}, "loss, gradient or new parameters of updates were not finite"),
        "no reward": ({"reward": None}, "no completion had a reward"),
        "equal rewards": ({"frac_reward_zero_std": 1.0}, "the rewards of every group were equal"),
        "no gradient": ({"grad_norm": 0.0}, "the gradient was 0"),
        "truncated": ({"completions__clipped_ratio": 1.0}, "all completions were cut off at max_completion_length"),
    }
    for kind, (changes, words) in idle.items():
        assert warnings(rows(4, **changes))[kind].startswith(f"in 3 steps in a row {words}")
        assert kinds(rows(4, **changes), rows(1)) == set()  # one step that trains ends it


CONFIG = Config(batch_size=16, num_generations=8, num_iterations=2)
SKIPPED, EQUAL = {"skipped": 2.0, "grad_norm": None}, {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (SKIPPED, "of updates were not finite"),
        (EQUAL | {"completions__failed": 16.0, "reward": None}, "the largest logit of every completion"),
        (EQUAL | {"reward": None, "tokens": 0.0}, "no completion had a reward"),
        (EQUAL | {"completions__clipped_ratio": 1.0}, "all completions were cut off"),
        ({"grad_norm": 0.0, "tokens": 0.0}, "left out of the loss"),
        (EQUAL, "the rewards of every group were equal"),
        ({"grad_norm": 0.0}, "the gradient was 0"),
    ],
)
def test_a_run_that_trained_nothing_is_an_error(changes, words):
    """Unless one step trained. Half of a step's updates are enough for that."""
    idle = rows(3, **changes)
    with pytest.raises(ValueError, match=f"none of 3 steps trained anything: .*{words}"):
        refuse_untrained(idle, CONFIG)
    assert refuse_untrained(idle + rows(1), CONFIG) == refuse_untrained(idle + rows(1, skipped=1.0), CONFIG) == ""


def test_equal_rewards_of_a_trial_are_said_and_several_reasons_counted():
    assert "the rewards of every group were equal" in refuse_untrained(rows(2, **EQUAL), CONFIG)
    still, one = rows(1, learning_rate=0.0), dataclasses.replace(CONFIG, num_iterations=1)  # a warm-up's first step
    assert refuse_untrained(still, one).startswith("none of 1 steps trained anything: its learning rate was 0, where")
    assert refuse_untrained(still + rows(1, learning_rate=1e-5), one) == refuse_untrained(still, CONFIG) == ""
    assert refuse_untrained(still, dataclasses.replace(one, learning_rate=0.0)) == ""
    with pytest.raises(ValueError, match=r"3 × the rewards .*; 1 × the gradient"):
        refuse_untrained(rows(1, grad_norm=0.0) + rows(3, **EQUAL), CONFIG)


def test_skipped_steps_in_a_row_are_an_error_at_the_limit():
    last = rows(MAX_SKIPPED_STEPS, **SKIPPED)
    refuse_skipped(rows(1) + last[1:], CONFIG)
    refuse_skipped(rows(1, **EQUAL) + last[1:], CONFIG)
    refuse_skipped(last + rows(1), CONFIG)
    with pytest.raises(ValueError, match=f"steps 3 to {MAX_SKIPPED_STEPS + 2} changed nothing") as trained:
        refuse_skipped(rows(2) + last, CONFIG)
    with pytest.raises(UntrainedError, match=f"steps 1 to {MAX_SKIPPED_STEPS} changed nothing"):
        refuse_skipped(last, CONFIG)
    assert not isinstance(trained.value, UntrainedError)  # what the first two trained is saved


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ({"reward": 0.34}, set()),
        ({"reward": 0.36}, {"paid for something else"}),
        ({"reward": 0.36, "accuracy": 0.305}, {"paid for something else"}),
        ({"reward": 0.36, "accuracy": 0.315}, set()),
        ({"completions__mean_length": 101.0}, set()),
        ({"completions__mean_length": 99.0}, {"shorter"}),
        ({"completions__mean_length": 99.0, "accuracy": 0.315}, set()),
        ({"entropy": 0.051}, set()),
        ({"entropy": 0.049}, {"entropy"}),
        ({"entropy": 0.049, "accuracy": 0.81}, set()),
        ({"entropy": 0.049, "accuracy": 0.79}, {"entropy"}),
    ],
)
def test_the_limits_of_what_is_said(last, found):
    """On both sides of each, from a reward and an accuracy of 0.3, 300 tokens and an entropy of 0.3."""
    assert kinds(rows(10), rows(10, **last)) == found and kinds(rows(10), rows(9, **last)) == set()
    assert "entropy" not in found or kinds(rows(10), rows(30, **last)) == found  # long since, too
