"""The programs of a run: its functions on the shapes of their arguments, for `programs.Ahead` to record and compile."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import aqn, keys
from qerl_jax.compilation import committed
from qerl_jax.config import Config
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.plan import UpdatePlan, make_update_plan, within
from qerl_jax.rl.reduction import check_same_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout import engine
from qerl_jax.run.abstract import abstract_run
from qerl_jax.run.hooks import Hooks
from qerl_jax.types import Policy, Rollout, TrainState


def rehearse_run(config: Config, hooks: Hooks, device_bytes: float | None, replicas: Replicas = ALONE) -> None:
    """`rehearse_step` from the model's config.json alone, with the plan for a device of so much memory."""
    count = replicas.tensor_parallel
    policy, state = committed(abstract_run(config, hooks.optimizer, count), count)
    plan = make_update_plan(state, policy.frozen, device_bytes, replicas=replicas.count)
    rehearse_step(config, hooks, policy, state, plan, replicas)


def rehearse_step(
    config: Config,
    hooks: Hooks,
    policy: Policy,
    state: TrainState,
    plan: UpdatePlan,
    replicas: Replicas = ALONE,
) -> None:
    """The calls of programs in `train.train_step`, for `programs.record`.

    Args:
      config: settings of the run.
      hooks: functions of the user's.
      policy, state: those the run starts with, or their shapes, committed to a device.
      plan: of its updates, and of the memory of its rollouts.
      replicas: those that share its work.
    """
    # A function of the user's may read values.
    noisy = state.norms if hooks.perturb else hooks.noisy(state.norms, 0.0, keys.for_step(0, keys.Purpose.AQN, 0))
    aqn.count_perturbed(state.norms, noisy)
    actor = policy.replace(norms=noisy, lora=state.lora)
    if config.rollout_backend == "jax" and replicas.share(config.num_prompts):
        sizes = replicas.largest_share(config.num_prompts), config.max_prompt_length
        key = keys.for_step(0, keys.Purpose.SAMPLE, 0)
        engine.rehearse(actor, *sizes, config.sampling, key, within(plan, config.engine))
    rollout = rollout_shape(config.batch_size, config.max_prompt_length + config.max_completion_length)
    rewards = jnp.asarray(np.zeros(config.batch_size, np.float32))
    advantages = group_advantages(rewards, config.num_generations, config.scale_rewards)
    batch = make_batch(rollout, advantages, rewards, config.mask_truncated_completions)
    own = {"token_loss": hooks.token_loss, "with_reference": hooks.with_reference}
    wholes = dataclasses.replace(plan, pack=plan.pack.wholes())
    for each in dict.fromkeys((wholes, plan)):  # not every update has halves: their programs come last
        after, _ = grpo_step(state, policy.frozen, batch, each, replicas=replicas, **own)
        check_same_state(replicas, after)


def rollout_shape(rows: int, width: int) -> Rollout:
    """The shape of a rollout of so many rows of `width` tokens."""

    def rollout() -> Rollout:
        numbers, tokens = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, width), jnp.int32)
        floats = tokens.astype(jnp.float32)
        return Rollout(tokens, floats, numbers, numbers, numbers.astype(jnp.int8), numbers, entropies=floats)

    return jax.eval_shape(rollout)


def rehearse_evaluation(
    config: Config, policy: Policy, plan: UpdatePlan | None, prompts: int, prompt_length: int
) -> None:
    """The calls of programs in the evaluation of a policy on so many prompts, for `programs.record`."""
    key = keys.for_step(0, keys.Purpose.EVALUATE, 0)
    engine.rehearse(policy, prompts, prompt_length, config.eval_sampling, key, within(plan, config.eval_engine))


def rehearse_evaluation_of_run(config: Config, plan: UpdatePlan | None, prompts: int, prompt_length: int) -> None:
    """`rehearse_evaluation` from the model's config.json alone."""
    policy, _ = committed(abstract_run(config, None, 1))
    rehearse_evaluation(config, policy, plan, prompts, prompt_length)
