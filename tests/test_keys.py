"""Every key is a chain of `fold_in` from the seed: part of each run's reproducibility, so written out here."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import keys


def chain(*words: int) -> np.ndarray:
    """Key data of the seed's key with each word folded in, one after the other."""
    key = jax.random.key(words[0])
    for word in words[1:]:
        key = jax.random.fold_in(key, word)
    return np.asarray(jax.random.key_data(key))


def test_every_key_is_its_chain():
    assert [(p.name, p.value) for p in keys.Purpose] == [("LORA_INIT", 0), ("AQN", 1), ("SAMPLE", 2), ("EVALUATE", 3)]
    step = keys.for_step(5, keys.Purpose.SAMPLE, 7)
    first = keys.for_round(step, 1)
    rows = keys.for_rows(first, jnp.array([3, 3, 9]), jnp.array([0, 1, 1]))
    tokens = keys.for_positions(rows, jnp.array([20, 20, 21]))
    np.testing.assert_array_equal(jax.random.key_data(step), chain(5, 2, 7))
    np.testing.assert_array_equal(jax.random.key_data(first), chain(5, 2, 7, 1))
    wanted = [chain(5, 2, 7, 1, 3, 0, 20), chain(5, 2, 7, 1, 3, 1, 20), chain(5, 2, 7, 1, 9, 1, 21)]
    np.testing.assert_array_equal(jax.random.key_data(tokens), wanted)


def test_words_are_the_whole_key():
    """The first word of a seed's key is 0, neither of a folded one is."""
    old, new = (jax.random.fold_in(key, 7) for key in (jax.random.PRNGKey(5), jax.random.key(5)))
    assert (np.asarray(old) > 0).all()
    for key in (old, new):
        np.testing.assert_array_equal(jax.random.key_data(keys.typed(key)), old)
        np.testing.assert_array_equal(keys.words(key), old)
