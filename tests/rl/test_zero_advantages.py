"""Rows of advantage 0 leave the update where their gradient is 0: the same update, for less."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, fp32_policy, randomized
from updates import COMPLETION, LENGTH, PROMPT, make_batch, make_config

from qerl_jax.compilation import committed
from qerl_jax.programs import _signature, calling
from qerl_jax.rl.loss import LossSettings, built_in_loss
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.types import Batch, Policy

ROWS, GROUP = 16, 4
ZERO = np.repeat([True, False, True, False], GROUP)  # two groups of equal rewards


@pytest.fixture(scope="module")
def micro(micro_dir) -> Policy:
    return randomized(fp32_policy(micro_dir, rank=2), 1, 0.3)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Groups of one prompt; two of them with advantage 0, and one row of a third."""
    batch = make_batch(64, rows=ROWS)
    tokens, columns = np.array(batch.tokens), np.arange(LENGTH)
    prompts = np.repeat(np.asarray(batch.prompt_lengths)[::GROUP], GROUP)
    lengths = np.minimum(np.maximum(np.asarray(batch.lengths), prompts + 1), prompts + COMPLETION)
    for row in range(ROWS):
        tokens[row, : prompts[row]] = tokens[row // GROUP * GROUP, : prompts[row]]
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None])
    advantages = np.where(ZERO, 0, np.random.default_rng(1).normal(size=ROWS))
    advantages[GROUP + 1] = 0  # inside an unequal group, whose prompt it shares
    return batch.replace(
        tokens=jnp.asarray(tokens),
        prompt_lengths=jnp.asarray(prompts),
        lengths=jnp.asarray(lengths),
        loss_mask=jnp.asarray(mask),
        logprobs=jnp.asarray(np.where(mask, np.minimum(batch.logprobs, -0.1), 0)),
        advantages=jnp.asarray(advantages, jnp.float32),
        prompt_index=jnp.asarray(np.arange(ROWS) // GROUP, jnp.int32),
    )


def everything(config):
    """The built-in loss as one that does not say that its gradient vanishes with the advantage."""
    loss = built_in_loss(config)

    def same(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
        return loss(logp, old_logp, behaviour_logp, reference_logp, advantages, mask)

    return same


VARIANTS = {
    "dapo": {},
    "grpo": {"importance_sampling_level": "sequence"},
    "dr_grpo": {"delta": 1.4, "num_iterations": 2},
    "cispo": {"tokens_per_micro_batch": 32},
}


@pytest.mark.parametrize("loss_type", VARIANTS)
def test_a_loss_is_zero_with_its_advantage(loss_type):
    """So is its gradient; in a row with another advantage neither is."""
    loss = built_in_loss(make_config(loss_type=loss_type, **VARIANTS[loss_type]))
    advantages, mask = jnp.asarray([0.0, 1.0, 0.0, -1.0]), jnp.ones((4, 6), bool)
    logp, old = jnp.asarray(-np.random.default_rng(0).gamma(2.0, 0.1, (2, 4, 6)), jnp.float32)

    def of(logp):
        losses, _ = loss(logp, old, old, None, advantages, mask)
        return losses.sum(), losses

    gradient, losses = jax.grad(of, has_aux=True)(logp)
    assert loss.vanishes_with_advantage
    for found in (losses, gradient):
        np.testing.assert_array_equal(np.any(found, axis=1), advantages != 0)


def test_a_loss_that_denies_it_in_a_slot_or_a_property_is_believed():
    """The class has a descriptor of that name, which is true whatever the attribute is."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Slot:
        vanishes_with_advantage: bool = False

        def __call__(self, *arrays):
            return -arrays[0], {}

    class Property:
        vanishes_with_advantage = property(lambda self: False)
        __call__ = Slot.__call__

    for loss in (Slot(), Property()):
        assert not loss.vanishes_with_advantage
        assert not LossSettings.of(make_config(), loss).vanishes_with_advantage


@pytest.mark.parametrize("loss_type", [pytest.param("dapo", marks=pytest.mark.nightly), "dr_grpo", "cispo"])
def test_the_update_is_that_of_all_rows(micro, batch, loss_type):
    settings = {"importance_sampling_cap": 2.0, "loss_type": loss_type, **VARIANTS[loss_type]}
    config = make_config(batch_size=ROWS, num_generations=GROUP, **settings)
    state = init_state(micro, config, optax.sgd(0.5))
    found, metrics = grpo_step(state, micro.frozen, batch)
    wanted, of_all = grpo_step(state, micro.frozen, batch, token_loss=everything(config))
    for a, b in zip(jax.tree.leaves(found.lora), jax.tree.leaves(wanted.lora), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    same = ["loss", "grad_norm", "tokens", "skipped", "clip_ratio/low_mean", "clip_ratio/high_mean"]
    for name in same[: 4 if loss_type == "cispo" else 6]:
        np.testing.assert_allclose(metrics[name], of_all[name], rtol=1e-4, atol=1e-6, err_msg=name)
    mask, trained = np.asarray(batch.loss_mask), np.asarray(batch.advantages) != 0
    assert int(metrics["tokens"]) == mask.sum() == int(of_all["trained_tokens"])
    assert int(metrics["trained_tokens"]) == mask[trained].sum() < mask.sum()
    assert max(abs(float(x.max())) for x in jax.tree.leaves(found.lora)) > 0


def test_the_tokens_of_such_rows_are_not_read(micro, batch):
    config = make_config(batch_size=ROWS, num_generations=GROUP, importance_sampling_cap=2.0)
    state = init_state(micro, config)
    wanted = grpo_step(state, micro.frozen, batch)
    other = jnp.where(ZERO[:, None] & (jnp.arange(LENGTH) >= PROMPT), 63 - batch.tokens, batch.tokens)
    poisoned = jnp.where(ZERO[:, None], jnp.nan, batch.logprobs)
    found = grpo_step(state, micro.frozen, batch.replace(tokens=other, logprobs=poisoned))
    assert_trees_equal(found[0].lora, wanted[0].lora)
    assert_trees_equal(found[1], wanted[1])


@pytest.mark.parametrize("optimizer", [None, optax.adamw(0.1, weight_decay=0.3)], ids=["the config's", "adamw"])
def test_equal_rewards_alone_are_a_step_of_gradient_zero(micro, batch, optimizer):
    """The optimizer decays, carries its momentum and counts, as with a gradient of zeros."""
    config = make_config(batch_size=ROWS, num_generations=GROUP, weight_decay=0.2)
    state, _ = grpo_step(init_state(micro, config, optimizer), micro.frozen, batch)
    found, metrics = grpo_step(state, micro.frozen, batch.replace(advantages=jnp.zeros(ROWS)))
    zeros = jax.tree.map(jnp.zeros_like, {"lora": state.lora})
    updates, _ = jax.jit(state.optimizer.update)(zeros, state.opt_state, {"lora": state.lora})
    wanted = optax.apply_updates({"lora": state.lora}, updates)["lora"]
    for a, b in zip(jax.tree.leaves(found.lora), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    assert float(metrics["grad_norm"]) == 0 == float(metrics["trained_tokens"]) and float(metrics["loss"]) == 0
    assert np.isnan(metrics["entropy"]) and int(found.step) == 2
    assert all(np.isnan(value) for name, value in metrics.items() if name.startswith("sampling/"))  # extremes, too


def test_a_penalty_or_a_loss_of_ones_own_keeps_all_rows(micro, batch):
    for changes, own in (({"beta": 0.1}, False), ({}, True)):
        config = make_config(batch_size=ROWS, num_generations=GROUP, **changes)
        loss = everything(config) if own else None
        _, metrics = grpo_step(init_state(micro, config), micro.frozen, batch, token_loss=loss)
        assert int(metrics["trained_tokens"]) == int(metrics["tokens"]) == int(batch.loss_mask.sum())
    config = make_config(batch_size=ROWS, num_generations=GROUP, beta=0.1)
    _, metrics = grpo_step(init_state(micro, config), micro.frozen, batch.replace(advantages=jnp.zeros(ROWS)))
    assert float(metrics["kl"]) > 0 and float(metrics["grad_norm"]) > 0


def test_no_share_of_equal_groups_compiles_anything(micro, batch):
    """Every call of a program is one of a step without an equal group, where the state is committed to a device, as in
    a run.
    """
    config = make_config(batch_size=ROWS, num_generations=GROUP, tokens_per_micro_batch=64)
    state = committed(init_state(micro, config))
    called: list[set] = []

    def note(jitted, args, kwargs):
        called[-1].add(_signature(jitted, args, kwargs))
        return jitted(*args, **kwargs)

    with calling(note):
        for equal in (0, 1, 2, 4):
            called.append(set())
            advantages = np.where(np.arange(ROWS) < equal * GROUP, 0, 1).astype(np.float32)
            grpo_step(state, micro.frozen, batch.replace(advantages=jnp.asarray(advantages)))
    assert [some - called[0] for some in called] == [set()] * 4 and len(called[0]) > len(called[3]) > 5
