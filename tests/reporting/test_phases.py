"""Times of the phases of a run."""

import time

import pytest

from qerl_jax.reporting.phases import Phases


def test_times_add_up_until_they_are_taken():
    phases = Phases()
    for _ in range(2):  # as refills do
        with phases("rollout"):
            time.sleep(0.05)
    with pytest.raises(KeyError), phases("update"):  # a phase that fails is counted, too
        raise KeyError
    taken = phases.take("rollout", "grading")
    assert taken["time/grading"] == 0 and 0.1 <= taken["time/rollout"] == phases.totals["rollout"]
    assert phases.take("rollout")["time/rollout"] == 0
    assert set(phases.totals) == {"rollout", "update"}
