"""The order of problems: a function of (seed, cursor) alone, over one set or a weighted mixture."""

from collections import Counter

import numpy as np
import pytest

from qerl_jax.data.stream import ProblemStream, at_cursor


def test_the_order_stays_what_it_was():
    """A run that is resumed by a newer version continues with the problems it had not seen."""
    expected = np.random.default_rng([3, 1]).permutation(10).tolist()
    assert at_cursor(range(10), 3, 10, 10) == expected
    assert ProblemStream((range(10),), None, 3).at(10, 10) == expected
    sets = range(10), range(100, 110)
    orders = [iter((np.random.default_rng([3, 0, s]).permutation(10) + 100 * (s - 1)).tolist()) for s in (1, 2)]
    which = np.random.default_rng([3, 0, 0, 1]).random(12) >= 0.6
    assert ProblemStream(sets, (3, 2), 3).at(0, 12) == [next(orders[s]) for s in which.astype(int)]


def test_what_is_not_shuffled_comes_in_its_order_or_in_that_of_a_key():
    """A curriculum is the same however it is cut, and the same in every epoch."""
    sets = (["a3", "b1", "c2"], ["d1", "e0"])
    plain = ProblemStream(sets, None, seed=5, shuffled=False)
    assert plain.at(0, 5) == ["a3", "b1", "c2", "d1", "e0"] and plain.at(3, 4) == ["d1", "e0", "a3", "b1"]
    sorted_ = ProblemStream(sets, None, seed=6, shuffled=False, key=lambda item: int(item[1]))
    assert sorted_.at(0, 5) == ["e0", "b1", "d1", "c2", "a3"]  # equal ones as they stand in the source
    assert [item for cursor in range(0, 10, 2) for item in sorted_.at(cursor, 2)] == 2 * sorted_.at(0, 5)
    mixed = ProblemStream(sets, (1, 1), seed=5, shuffled=False, key=lambda item: int(item[1])).at(0, 40)
    for own in (["b1", "c2", "a3"], ["e0", "d1"]):
        drawn = [item for item in mixed if item in own]
        assert drawn == [own[i % len(own)] for i in range(len(drawn))] and len(drawn) > len(own)


SETS = ([f"a{i}" for i in range(7)], [f"b{i}" for i in range(20)], [f"c{i}" for i in range(50)])


def test_without_weights_sets_are_one():
    stream = ProblemStream(SETS, None, seed=5)
    assert len(stream) == 77
    assert Counter(stream.at(0, 77)) == Counter(stream.at(77, 77)) == Counter(item for items in SETS for item in items)


def test_a_mixture_is_the_same_however_it_is_cut():
    stream = ProblemStream(SETS, (1, 2, 1), seed=5)
    whole = stream.at(0, 200)
    assert [item for cursor in range(0, 200, 8) for item in stream.at(cursor, 8)] == whole
    assert stream.at(123, 5) == whole[123:128]
    assert ProblemStream(SETS, (1, 2, 1), seed=6).at(0, 200) != whole
    assert ProblemStream(SETS, (2, 4, 2), seed=5).at(0, 200) == whole  # only the ratio counts


@pytest.mark.parametrize("letter", "abc")
def test_no_repetition_within_an_epoch_of_each_set(letter):
    drawn = [item for item in ProblemStream(SETS, (1, 2, 1), seed=5).at(0, 400) if item[0] == letter]
    size = len(SETS["abc".index(letter)])
    epochs = [drawn[i : i + size] for i in range(0, len(drawn), size)]
    assert len(epochs) >= 2
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch)
    assert epochs[0] != epochs[1]


def test_shares_follow_the_weights():
    """Binomial: within five standard deviations of n·w."""
    n, weights = 20_000, np.array([0.1, 0.6, 0.3])
    counts = Counter(item[0] for item in ProblemStream(SETS, tuple(weights), seed=1).at(0, n))
    deviation = np.sqrt(n * weights * (1 - weights))
    assert (np.abs([counts[letter] for letter in "abc"] - n * weights) < 5 * deviation).all()


def test_sets_of_one_size_have_different_orders():
    items = range(30)
    drawn = ProblemStream(([("a", i) for i in items], [("b", i) for i in items]), (1, 1), seed=2).at(0, 60)
    a, b = ([i for letter, i in drawn if letter == which] for which in "ab")
    assert a[:20] != b[:20]
