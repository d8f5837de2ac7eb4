"""The update of several replicas against that of one process; `rl/test_update.py` compares the latter with padded
rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, fp32_policy, randomized, with_norm_offsets
from replicas import on_replicas
from updates import LENGTH, make_batch, make_config

from qerl_jax.parallel import Replicas
from qerl_jax.programs import ALIKE, calling
from qerl_jax.rl import state as rl_state
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.optimizer import whole_of
from qerl_jax.rl.plan import choose_plan, make_update_plan
from qerl_jax.rl.reduction import check_same_state, checksum
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import assigned, grpo_step

ROWS, MICRO_BATCHES = 22, 5


def batch_of(seed: int):
    """Rows of different lengths; one is masked whole, one has advantage 0."""
    batch = make_batch(64, seed, ROWS)
    return batch.replace(loss_mask=batch.loss_mask.at[3].set(False), advantages=batch.advantages.at[7].set(0))


def few_rows(plan):
    """A plan of micro-batches of at most five sequences."""
    return dataclasses.replace(plan, pack=dataclasses.replace(plan.pack, suffixes=5, prefixes=5))


@pytest.fixture(scope="module")
def policy(micro_dir):
    return with_norm_offsets(randomized(fp32_policy(micro_dir, rank=2), 1, 0.3), 2)


@pytest.fixture(scope="module")
def alone(policy):
    """State, batch, plan, and the update of one process: two iterations with KL, capped weights and trained norms."""
    config = make_config(
        batch_size=ROWS, num_iterations=2, importance_sampling_cap=1.2, beta=0.1, train_norms=True, max_grad_norm=0.3
    )
    state = init_state(policy, config)
    plan = few_rows(make_update_plan(state, policy.frozen, longest=LENGTH))
    batch = batch_of(0)
    assert len(assigned(plan, batch, needs_advantage=False)) == MICRO_BATCHES
    return state, batch, plan, grpo_step(state, policy.frozen, batch, plan)


DEALS = [(2, 5, 5, 0), (7, 5, 5, 0), (1, 5, 4, 1), (2, 7, 2, 2), pytest.param(3, 5, 3, 2, marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("count", "most", "wholes", "halves"), DEALS)
def test_the_update_is_that_of_one_process(policy, alone, monkeypatch, count, most, wholes, halves):
    """Uneven deals of micro-batches of at most five or seven sequences: 3 and 2; one each and two replicas without any;
    with a half for the last sequence, two for the last seven, two for six of three replicas. They add up two parts of a
    layer each.
    """
    state, batch, plan, (wanted, metrics) = alone
    monkeypatch.setattr(rl_state, "_TOGETHER", 1)
    pack = dataclasses.replace(plan.pack, suffixes=most, prefixes=most, has_half=halves > 0)
    plan = dataclasses.replace(plan, pack=pack)
    found = [some.kind.tokens for i in range(count) for some in assigned(plan, batch, False, Replicas(i, count))]
    assert sorted(found) == [pack.tokens // 2] * halves + [pack.tokens] * wholes
    found = on_replicas(count, lambda replicas: grpo_step(state, policy.frozen, batch, plan, replicas=replicas))
    for after, reported in found:
        assert_trees_equal((whole_of(after), reported), (whole_of(found[0][0]), found[0][1]))
        for name in ("lora", "norms"):
            for a, b in zip(*(jax.tree.leaves(getattr(x, name)) for x in (after, wanted)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)
        assert set(reported) == set(metrics)
        for name, value in metrics.items():
            np.testing.assert_allclose(reported[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert float(metrics["tokens"]) == np.asarray(batch.loss_mask).sum()


@pytest.mark.parametrize("optimizer", [None, optax.sgd(0.1)], ids=["AdamW", "of the user"])
def test_what_all_compute_alike_is_compiled_without_a_choice_by_time(policy, alone, optimizer):
    """Advantages, and each program behind the sum, but for those that also run before it, copy or make no state."""
    _, batch, plan, _ = alone
    state = init_state(policy, alone[0].config, optimizer)

    def one(replicas):
        found = []

        def call(jitted, args, kwargs):
            found.append((jitted.__name__, jitted.lower(*args, **kwargs)._lowering._compiler_options_kvs))
            return jitted(*args, **kwargs)

        with calling(call):
            group_advantages(jnp.arange(4.0), 2)
            grpo_step(state, policy.frozen, batch, plan, replicas=replicas)
        return found

    for advantages, *update in on_replicas(2, one):
        [behind, _] = [i for i, (name, _) in enumerate(update) if name == "of_all"]
        before = {name for name, _ in update[:behind]} | {"skipped", "unflattened", "next_position"}
        alike = [each for each in update[behind:] if each[0] not in before]
        step = "apply" if optimizer else "apply_flat"
        assert {name for name, _ in alike} == {"of_all", "add_squares", "finish", "stays_finite", step}
        assert all(options == tuple(ALIKE.items()) for _, options in [advantages, *alike])


def test_an_update_that_is_not_finite_on_one_replica_is_skipped_on_all(policy, alone):
    state, batch, plan, _ = alone
    [first, *_] = assigned(plan, batch, needs_advantage=False)
    row = int(first.assignment.rows[0])  # of the first replica
    batch = batch.replace(advantages=batch.advantages.at[row].set(jnp.nan))
    found = on_replicas(2, lambda replicas: grpo_step(state, policy.frozen, batch, plan, replicas=replicas))
    for after, metrics in found:
        assert float(metrics["skipped"]) == 2
        assert_trees_equal(whole_of(after), whole_of(state))


def test_states_that_differ_in_a_bit_end_the_run(alone, monkeypatch):
    """Of all adapters, of the optimizer, or the highest of the last layer's last array; also where two elements are
    exchanged.
    """
    state, *_ = alone
    monkeypatch.setattr(rl_state, "_TOGETHER", 1)

    def changed(change):
        return jax.tree.map(lambda leaf: change(leaf) if leaf.ndim == 2 else leaf, state.lora)

    def check(other):
        def one(replicas):
            return check_same_state(replicas, other if replicas.index else state)

        return on_replicas(2, one)

    assert check(jax.tree.map(jnp.copy, state)) == [None, None]
    count = jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype == jnp.int32 else leaf, state.opt_state)
    bit = changed(lambda leaf: leaf.at[0, 0].set(jnp.nextafter(leaf[0, 0], 2.0)))
    swapped = changed(lambda leaf: leaf.at[0, :2].set(leaf[0, :2][::-1]))
    (*leaves, last), structure = jax.tree.flatten(state.lora)
    sign = jax.tree.unflatten(structure, [*leaves, last.at[0, 0].multiply(-1)])
    for other in (*(state.replace(lora=lora) for lora in (bit, swapped, sign)), state.replace(opt_state=count)):
        for error in check(other):
            assert str(error).startswith("the replicas differ in the state after step 0, by parts: [[")


@pytest.mark.parametrize(("count", "prompts"), [(1, 8), (8, 4), (16, 2), (32, 1)])
def test_the_plan_has_a_micro_batch_for_each_replica(policy, count, prompts):
    """32 groups of two, 512 + 512 tokens each: the best for one device are 4 micro-batches of eight groups,
    which would leave some of more replicas idle."""
    config = make_config(logprob_chunk_size=1, max_prompt_length=512, max_completion_length=512)
    model = dataclasses.replace(policy.config, num_layers=8)
    plan = choose_plan(model, 2, config, 64, 1024, None, replicas=count)
    assert plan.pack.tokens == prompts * 3 * 512


def test_a_checksum_is_the_sum_of_all_words_each_times_its_odd_number():
    """Of leaves in their order; a swap of two words, or one bit, is another sum."""
    rng = np.random.default_rng(0)
    tree = {
        "a": rng.normal(size=(2, 3)).astype(np.float32),
        "b": rng.normal(size=5).astype(jnp.bfloat16),
        "c": np.array([True, False, True]),
        "d": rng.integers(-100, 100, 4, np.int8),
        "e": rng.integers(0, 2**32, 3, np.uint32),
    }

    def by_hand(tree: dict[str, np.ndarray]) -> int:
        kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        words = [int(word) for leaf in tree.values() for word in leaf.ravel().view(kinds[leaf.dtype.itemsize])]
        return sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**32

    swapped = tree | {"a": tree["a"][::-1]}
    assert int(checksum(tree)) == by_hand(tree) != by_hand(swapped) == int(checksum(swapped))
