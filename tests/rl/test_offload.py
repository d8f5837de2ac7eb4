"""Gate and up in pinned host memory: the same update, the same programs, and few of them on the device at a time."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest
from helpers import assert_trees_equal, fp32_policy, randomized
from oracles import torch_qwen2
from updates import make_batch, make_config

from qerl_jax.compilation import CompilationCounter
from qerl_jax.rl import layer, offload
from qerl_jax.rl import plan as update_plan
from qerl_jax.rl.activations import Keeps
from qerl_jax.rl.compile import compile_update, update_programs
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import grpo_step, plan_of
from qerl_jax.types import Policy

LAYERS = 12


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Policy:
    """Twelve layers, hidden 32."""
    path = tmp_path_factory.mktemp("deep")
    torch_qwen2.make(path, seed=0, scale=0.3, num_hidden_layers=LAYERS)
    return randomized(fp32_policy(path, rank=2), 1, 0.3)


@pytest.fixture(autouse=True)
def host_memory(monkeypatch):
    """The CPU's pinned host memory, to which gate and up of half the layers can be copied in time."""
    monkeypatch.setattr(offload, "can_offload", lambda: True)
    monkeypatch.setattr(update_plan, "_offloaded_share", lambda *_: 0.5)


def budget_for(policy: Policy, config, batch, wanted) -> float:
    """A budget in GB whose plan is as `wanted`."""
    state = init_state(policy, config)
    for megabytes in np.linspace(4, 0.2, 200):
        tried = dataclasses.replace(config, update_memory_gb=float(megabytes) / 1e3)
        if wanted(plan_of(state.replace(config=tried), policy.frozen, batch)):
            return tried.update_memory_gb
    raise AssertionError("no budget has such a plan")


KINDS = {
    "offloaded": lambda plan: plan.offloaded_gate_up > 3 and not plan.recomputed_gate_up,
    "offloaded and gate and up recomputed": lambda plan: plan.offloaded_gate_up and plan.recomputed_gate_up > 2,
    "offloaded and recomputed": lambda plan: plan.offloaded_gate_up and plan.recomputed,
}


def test_the_cpu_has_no_memory_of_its_own_to_offload_to(monkeypatch):
    monkeypatch.undo()
    assert not offload.can_offload()


@pytest.mark.parametrize(
    ("kind", "memory"),
    [("offloaded", "unpinned_host"), *((kind, "pinned_host") for kind in KINDS)],
)
def test_the_update_is_the_same_bit_by_bit(deep, kind, memory, monkeypatch):
    """Two steps, against layers that keep all; where some also recompute, which is another program, to rounding."""
    monkeypatch.setattr(offload, "HOST", memory)
    config = make_config(activation_offloading=True, batch_size=8, tokens_per_micro_batch=48, train_norms=True)
    batch = make_batch(64, 0, 8)
    config = dataclasses.replace(config, update_memory_gb=budget_for(deep, config, batch, KINDS[kind]))
    copies = collections.Counter()
    monkeypatch.setattr(offload, "to_host", counted(copies, offload.to_host))
    monkeypatch.setattr(offload, "to_device", counted(copies, offload.to_device))
    results = []
    for share in (0.5, 0.0):
        monkeypatch.setattr(update_plan, "_offloaded_share", lambda *_, share=share: share)
        state = init_state(deep, config if share else dataclasses.replace(config, update_memory_gb=None))
        plan = plan_of(state, deep.frozen, batch)
        assert bool(plan.offloaded_gate_up) == bool(share)
        for _ in range(2):
            state, metrics = grpo_step(state, deep.frozen, batch)
        results.append((state.lora, state.norms, metrics))
        if share:
            offloaded = plan.offloaded_gate_up
            assert copies["to_host"] == copies["to_device"] > 2 * offloaded and copies["to_host"] % offloaded == 0
            before = dict(copies)
    assert copies == before
    if kind == "offloaded":
        assert_trees_equal(*results)
    else:  # what is computed again is another program
        for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)


def counted(copies: collections.Counter, function):
    def call(*arguments):
        copies[function.__name__] += 1
        return function(*arguments)

    return call


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("kind", ["offloaded", "offloaded and gate and up recomputed"])
def test_all_is_compiled_ahead(deep, kind, committed):
    """Arrays that were committed to no device, or to one; states of before, and fresh ones beside a batch of either
    kind. No layer has a program of its own because it is offloaded.
    """
    sizes = {"batch_size": 8, "tokens_per_micro_batch": 56 + 8 * committed, "num_iterations": 2}
    config = make_config(activation_offloading=True, beta=0.1, **sizes)
    batches = [make_batch(64, seed, 8) for seed in range(3)]
    config = dataclasses.replace(config, update_memory_gb=budget_for(deep, config, batches[0], KINDS[kind]))
    policy = jax.device_put(deep, jax.devices()[0]) if committed else deep
    state = init_state(policy, config)
    names = [program.name for program in update_programs(state, policy.frozen, batches[0])]
    assert sum(name.startswith("layer") for name in names) == len(set(names) & set(LAYER_PROGRAMS[kind]))
    with CompilationCounter() as counter:
        assert compile_update(state, policy.frozen, batches[0]) == len(names)
        counter.take()
        for batch in batches:
            after, _ = grpo_step(state, policy.frozen, batch)
            grpo_step(after, policy.frozen, jax.device_put(batch, jax.devices()[0]))
        assert counter.take() == []
    jax.tree.map(np.asarray, (state.lora, policy.frozen, after.lora))  # nothing that stays was donated


LAYER_PROGRAMS = {
    "offloaded": ("layer forward", "layer backward", "layer forward, nothing kept"),
    "offloaded and gate and up recomputed": (
        *("layer forward", "layer backward", "layer backward, gate and up recomputed", "layer forward, nothing kept"),
    ),
}


def test_no_more_are_on_the_device_than_the_estimate_counts(deep, monkeypatch):
    """Before each forward pass that is to be offloaded at most `MOST_LEAVING - 1` copies may be under way; a copy back
    is asked for `AHEAD` layers before its backward pass, once the one `AHEAD + BEHIND` layers before has ended.
    """
    config = make_config(activation_offloading=True, batch_size=8, tokens_per_micro_batch=200)
    batch = make_batch(64, 0, 8)
    config = dataclasses.replace(config, update_memory_gb=budget_for(deep, config, batch, KINDS["offloaded"]))
    state, events = init_state(deep, config), []
    keeps = plan_of(state, deep.frozen, batch).layers(LAYERS)
    places = [i for i, own in enumerate(keeps) if own is Keeps.GATE_UP_ON_HOST]
    assert len(places) > offload.MOST_LEAVING + 1

    def noted(name: str, module, at=lambda *arguments: ()):
        function = getattr(module, name)

        def call(*arguments):
            events.append((name, *at(*arguments)))
            return function(*arguments)

        monkeypatch.setattr(module, name, call)

    noted("forward_and_keep", layer)
    noted("backward", layer)
    noted("to_host", offload)
    noted("to_device", offload)
    noted("wait_for", offload, lambda leaving, left: (len(leaving), left))
    noted("wait_for_gradient", offload, lambda _, i: (i,))
    grpo_step(state, deep.frozen, batch)
    wanted, leaving = [], 0
    for i in range(LAYERS):
        if i in places:
            wanted += [("wait_for", leaving, offload.MOST_LEAVING - 1), ("forward_and_keep",), ("to_host",)]
            leaving = min(leaving, offload.MOST_LEAVING - 1) + 1
        else:
            wanted += [("forward_and_keep",)]
    wanted += [("wait_for", len(places), 0)]
    for i in range(LAYERS - 1, -offload.AHEAD - 1, -1):
        if i in places:
            wanted += [("wait_for_gradient", i + offload.AHEAD + offload.BEHIND), ("to_device",)]
        if i + offload.AHEAD < LAYERS:
            wanted += [("backward",)]
    micro_batches = len(events) // len(wanted)
    assert micro_batches > 0 and events == wanted * micro_batches


def test_under_jit_nothing_is_offloaded(deep):
    config = make_config(activation_offloading=True, batch_size=8, tokens_per_micro_batch=48)
    batch = make_batch(64, 0, 8)
    config = dataclasses.replace(config, update_memory_gb=budget_for(deep, config, batch, KINDS["offloaded"]))
    state, plans = init_state(deep, config), []

    def planned(state, frozen, batch):
        plans.append(plan_of(state, frozen, batch))
        return state.step

    jax.eval_shape(planned, state, deep.frozen, batch)
    assert plans[0].offloaded_gate_up == 0 < plan_of(state, deep.frozen, batch).offloaded_gate_up


def test_it_is_asked_for(deep):
    config, batch = (
        make_config(activation_offloading=True, batch_size=8, tokens_per_micro_batch=48),
        make_batch(64, 0, 8),
    )
    config = dataclasses.replace(config, update_memory_gb=budget_for(deep, config, batch, KINDS["offloaded"]))
    state = init_state(deep, dataclasses.replace(config, activation_offloading=False))
    plan = plan_of(state, deep.frozen, batch)
    assert plan.offloaded_gate_up == 0 and plan.recomputed_gate_up > 0
