"""What a run says of itself, from rows made by hand."""

from __future__ import annotations

from qerl_jax.reporting.health import warnings

HEALTHY = {
    "reward": 0.3, "accuracy": 0.3, "frac_reward_zero_std": 0.4, "completions/clipped_ratio": 0.05,
    "completions/mean_length": 300.0, "entropy": 0.3,
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


def test_the_collapse_of_a_published_model():
    """Its tags were paid for: 250 tokens became 33, the reward rose by 0.2, accuracy stayed at 4 %."""
    first = rows(10, reward=0.1, accuracy=0.04, completions__mean_length=250.0)
    last = rows(10, reward=0.28, accuracy=0.04, completions__mean_length=33.0)
    found = warnings(first + last)
    assert set(found) == {"paid for something else", "shorter"}
    assert "rose from 0.10 to 0.28, accuracy stayed (4.0% to 4.0%)" in found["paid for something else"]
    assert "from 250 to 33 tokens" in found["shorter"]


def test_a_collapse_of_entropy():
    """At a learning rate that destroys the policy: 0.36 to 0.03 nats a token."""
    assert kinds(rows(10, entropy=0.36), rows(10, entropy=0.03)) == {"entropy"}
    assert kinds(rows(10, entropy=0.06), rows(10, entropy=0.04)) == set()
