"""What layers keep, and the bytes of a micro-batch moment by moment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import moments
import numpy as np
import pytest
from updates import make_config

from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.rl import plan as update_plan
from qerl_jax.rl.activations import Keeps, LayerBytes, XlaMatmuls, layer_bytes, peak_bytes
from qerl_jax.rl.packing import PackShape
from qerl_jax.rl.plan import UpdatePlan, make_update_plan
from qerl_jax.run.memory import memory_report

SHAPES = Path(__file__).parent.parent / "data" / "qwen2.5_configs"
PACK = PackShape(128, 1, 1, 128, 64, 64)
MODEL = ModelConfig(512, 256, 512, 12, 4, 2, 64, 1e6, 1e-6, True, 4096, (0,), 0)


def walked(layers: list[Keeps], need: LayerBytes) -> int:
    """The oracle's peak for these bytes."""
    sizes = {"input": need.input, "gate_up": need.gate_up, "rest": need.rest}

    def forward(keeps: Keeps) -> int:  # whose results are arrays, but for a layer that keeps none
        return need.forward + (need.gate_up if keeps is Keeps.INPUT else 0)

    return moments.peak(layers, sizes, moments.Programs(forward, need.backward, need.head - need.input))


@pytest.mark.parametrize("seed", range(200))
def test_the_peak_is_that_of_the_micro_batch_walked_through(seed):
    """Any layers in any order, of any sizes; the head's bytes contain its input."""
    rng = np.random.default_rng(seed)
    layers = [list(Keeps)[i] for i in rng.integers(0, 4, rng.integers(1, 20))]
    need = LayerBytes(*map(int, rng.integers(1, 100, 9) ** 2))
    need = need._replace(head=need.head + need.input)
    assert peak_bytes(layers, need) == walked(layers, need)


def test_layers_that_recompute_need_no_memory_where_those_behind_them_are_freed():
    """Eight layers, of which the first two compute gate and up again: when their backward passes run, at most three
    layers' activations are there. The peak is that of the last layer, which computes nothing again.
    """
    need = LayerBytes(1, 20, 10, 0, 40, 0, 45, 0, 0)
    layers = UpdatePlan(PACK, 0, 2, 0, 0, 0).layers(8)
    assert layers == [Keeps.ALL_BUT_GATE_UP] * 2 + [Keeps.ALL] * 6
    assert peak_bytes(layers, need) == 9 * 1 + 8 * 10 + 6 * 20 + 40


def test_the_peak_of_few_layers_by_hand():
    """In a forward pass there are the inputs of the layers so far and the result (1 each), what they keep (10 and 20),
    and 5 for the program; in a backward pass the next micro-batch's input and 40, where gate and up are computed again
    45 and they themselves, where all is, 50 and all that is kept.
    """
    need = LayerBytes(1, 20, 10, 5, 40, 30, 45, 50, 7)
    assert peak_bytes([Keeps.ALL] * 3, need) == 3 * (1 + 10 + 20) + 1 + 40
    assert peak_bytes([Keeps.ALL_BUT_GATE_UP] * 3, need) == 3 * (1 + 10) + 1 + 45 + 20
    assert peak_bytes([Keeps.INPUT] * 3, need) == 3 + 1 + 50 + 10 + 20
    assert peak_bytes([Keeps.ALL] * 3, need._replace(head=100)) == 3 * (1 + 10 + 20) + 1 + 100
    # Five may be back on the device when the last layer's backward pass runs; two leave it beside a forward pass.
    assert peak_bytes([Keeps.GATE_UP_ON_HOST] * 8, need) == 8 * (1 + 10) + 1 + 5 * 20 + 40
    assert (
        peak_bytes([Keeps.GATE_UP_ON_HOST] * 2 + [Keeps.ALL_BUT_GATE_UP] * 12, need) == 14 * (1 + 10) + 1 + 3 * 20 + 5
    )


@pytest.mark.parametrize("count", [1, 7, 64])
def test_each_layer_keeps_what_the_plan_says(count):
    """Offloaded layers are at equal distances but for one; what is recomputed comes first."""
    for recomputed in {0, count // 3}:
        rest = count - recomputed
        for offloaded in range(rest + 1):
            for again in {0, (rest - offloaded) // 2, rest - offloaded}:
                layers = UpdatePlan(PACK, recomputed, again, offloaded, 0, 0).layers(count)
                assert len(layers) == count and layers[:recomputed] == [Keeps.INPUT] * recomputed
                assert layers.count(Keeps.INPUT) == recomputed and layers.count(Keeps.ALL_BUT_GATE_UP) == again
                places = np.flatnonzero([keeps is Keeps.GATE_UP_ON_HOST for keeps in layers])
                assert len(places) == offloaded
                if offloaded > 1:
                    assert np.ptp(np.diff(places)) <= 1 and places[0] == recomputed
                    assert abs(count - places[-1] - np.diff(places).mean()) <= 1
                others = [keeps for keeps in layers[recomputed:] if keeps is not Keeps.GATE_UP_ON_HOST]
                assert others == [Keeps.ALL_BUT_GATE_UP] * again + [Keeps.ALL] * (len(others) - again)


def test_as_many_layers_are_offloaded_as_copies_take_the_time_of_the_forward_pass():
    """32B, of 64 layers: gate and up of 2304 tokens are 255 MB, 5.7 ms at 45 GB/s; a layer's forward pass takes 3.3 ms.
    So 64 · 3.3 / 5.7 = 37 layers at most, whatever the tokens. In fp32 half as many.
    """
    model = memory_report(Config(model=str(SHAPES / "Qwen2.5-32B"), weight_format="nvfp4", rollout_memory_gb=2)).model
    seconds = 2 * 2304 * sum(n * k for n, k in model.projection_shapes().values()) / update_plan._FORWARD_RATE
    assert seconds == pytest.approx(3.3e-3, rel=0.01)
    copy = 2304 * 2 * model.intermediate_size * 2 / update_plan._COPY_RATE
    assert copy == pytest.approx(5.7e-3, rel=0.01)
    for itemsize, most in ((2, 64 * seconds / copy), (4, 32 * seconds / copy)):
        share = update_plan._offloaded_share(model, itemsize)
        found = [offloaded for _, _, offloaded in update_plan._divisions(64, share)]
        assert max(found) == int(most) and found[:3] == [0, 1, 2]
    config = make_config(batch_size=8, num_generations=8, logprob_chunk_size=512, lora_rank=32)
    config = dataclasses.replace(config, max_prompt_length=256, max_completion_length=2048, update_memory_gb=19.4)
    configs = (dataclasses.replace(config, activation_offloading=way) for way in (False, True))
    plain, offloading = (make_update_plan(model, 2, own, 8, 2304, None, can_offload=True) for own in configs)
    assert plain.pack == offloading.pack and plain.pack.tokens == 2304
    # Copies on their way take the place of what some more layers would keep.
    assert plain.recomputed_gate_up < offloading.offloaded_gate_up < 37
    assert offloading.recomputed == offloading.recomputed_gate_up == 0


def plans(can_offload: bool, tokens: int | None = 1024) -> list[tuple[float, UpdatePlan]]:
    """(budget, plan), the memory falling from what is needed to next to nothing."""
    config = make_config(logprob_chunk_size=16, lora_rank=8, tokens_per_micro_batch=tokens, activation_offloading=True)
    config = dataclasses.replace(config, max_prompt_length=64, max_completion_length=192)
    whole = make_update_plan(MODEL, 2, config, 64, 256, None, can_offload=can_offload)
    assert not (whole.recomputed or whole.recomputed_gate_up or whole.offloaded_gate_up)
    needed = whole.kept_bytes + whole.working_bytes
    budgets = [share * needed / 60 for share in range(60, 0, -1)]
    return [(free, make_update_plan(MODEL, 2, config, 64, 256, free, can_offload=can_offload)) for free in budgets]


def test_a_device_without_host_memory_offloads_nothing():
    assert all(plan.offloaded_gate_up == 0 for _, plan in plans(False))


def test_what_does_not_fit_is_offloaded_first_then_recomputed(monkeypatch):
    """Every plan fits and needs what it says. Less memory is never faster, and offloading never slower than without."""
    monkeypatch.setattr(update_plan, "_COPY_RATE", 13 * update_plan._COPY_RATE)  # these layers are narrow
    config = make_config(logprob_chunk_size=16, lora_rank=8)
    config = dataclasses.replace(config, max_prompt_length=64, max_completion_length=192)
    costs, kinds = [], set()
    for (free, plan), (_, without) in zip(plans(True), plans(False), strict=True):
        assert plan.lacking_bytes or plan.kept_bytes + plan.working_bytes <= free
        assert plan.lacking_bytes == without.lacking_bytes
        need, layers = layer_bytes(MODEL, 2, plan.pack, config, XlaMatmuls()), plan.layers(12)
        assert plan.kept_bytes == 12 * need.input + sum(map(need.kept, layers))
        assert plan.kept_bytes + plan.working_bytes == peak_bytes(layers, need)
        if not plan.lacking_bytes:
            costs.append(update_plan._cost(MODEL, config, 64, plan))
            assert costs[-1] <= update_plan._cost(MODEL, config, 64, without)
        kinds.add((plan.recomputed > 0, plan.recomputed_gate_up > 0, plan.offloaded_gate_up > 0))
        assert plan.recomputed == 0 or Keeps.ALL not in layers
    assert costs == sorted(costs)
    assert kinds >= {(False, False, False), (False, False, True), (False, True, True), (True, False, False)}
