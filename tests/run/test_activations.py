"""What layers keep, and the bytes of a micro-batch moment by moment."""

import dataclasses

import jax
import moments
import numpy as np
import pytest
from qerl_kernels.gpu import gpu_of
from qerl_kernels.nvfp4_matmul import cases, packing
from updates import make_config

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.linear import XlaMatmuls, xla_matmuls
from qerl_jax.rl import plan as update_plan
from qerl_jax.rl.activations import Keeps, LayerBytes, layer_bytes, peak_bytes
from qerl_jax.rl.flash_attention import views
from qerl_jax.rl.micro_batches import PackShape
from qerl_jax.rl.plan import UpdatePlan, choose_plan

PACK = PackShape(128, 1, 1, 128, 64, 64)
MODEL = ModelConfig(512, 256, 512, 12, 4, 2, 64, 1e6, 1e-6, True, 4096, (0,), 0)


def walked(layers: list[Keeps], need: LayerBytes) -> int:
    """The oracle's peak for these bytes."""
    sizes = {"input": need.input, "gate_up": need.gate_up, "rest": need.rest}

    def forward(keeps: Keeps) -> int:  # whose results are arrays, but for a layer that keeps none
        return need.forward + (need.gate_up if keeps is Keeps.INPUT else 0)

    return moments.peak(layers, sizes, moments.Programs(forward, need.backward, need.head - need.input))


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_that_of_the_micro_batch_walked_through(seed):
    """Any layers in any order, of any sizes; the head's bytes contain its input."""
    rng = np.random.default_rng(seed)
    layers = [list(Keeps)[i] for i in rng.integers(0, 3, rng.integers(1, 20))]
    need = LayerBytes(*map(int, rng.integers(1, 100, 9) ** 2))
    need = need._replace(head=need.head + need.input)
    assert peak_bytes(layers, need) == walked(layers, need)


def test_layers_that_recompute_need_no_memory_where_those_behind_them_are_freed():
    """Eight layers, of which the first two compute gate and up again: when their backward passes run, at most three
    layers' activations are there. The peak is that of the last layer, which computes nothing again.
    """
    need = LayerBytes(1, 20, 10, 0, 40, 0, 45, 0, 0)
    layers = UpdatePlan(PACK, 0, 2, 0, 0).layers(8)
    assert layers == [Keeps.ALL_BUT_GATE_UP] * 2 + [Keeps.ALL] * 6
    assert peak_bytes(layers, need) == 9 * 1 + 8 * 10 + 6 * 20 + 40


def test_the_bytes_of_a_layer_and_of_the_head_by_hand():
    """1024 tokens with 256 features, 384 of six heads and 128 of two, and 512 of gate and of up. Kept are q, k and v,
    attention's output, and what it adds. In bf16 20 prefixes are a row, though they and 20 suffixes are three
    segments in each of 16 rows: gradients of 8 bytes for each segment of the larger number, and statistics for all. In
    fp32 three arrays of scores, of a suffix to itself and its prefix. The head has no more logits than tokens.
    """
    pack, config = PackShape(1024, 20, 20, 64, 48, 32), make_config(logprob_chunk_size=2000)
    model = dataclasses.replace(MODEL, num_heads=6)
    bf16, fp32 = (layer_bytes(model, itemsize, pack, config, XlaMatmuls()) for itemsize in (2, 4))
    assert views(pack) == (16, 3)
    assert (bf16.input, bf16.gate_up) == (4 * 1024 * 256, 2 * 1024 * 2 * 512)
    assert bf16.rest == 2 * 1024 * (384 + 2 * 128 + 384 + 256) + 4 * 1024 * 6
    assert bf16.mlp == 1024 * (2 * (4 * 512 + 2 * 256) + 4 * 3 * 256)
    assert bf16.attention == 1024 * 384 * (4 * 2 + 8 * 20) + 4 * 6 * 1024 * (3 + 20)
    assert fp32.attention == 1024 * 384 * 4 * 4 + 3 * 4 * 6 * 32 * 64
    assert bf16.head == 1024 * 512 * (4 + 2) + 1024 * 256 * (4 + 2 * 2)
    # Where XLA multiplies: sums in fp32 of gate and up, and where the whole layer runs again of its other results.
    by_xla = layer_bytes(model, 2, pack, config, XlaMatmuls(wide_bytes=8, dequantized_bytes=1000))
    assert by_xla.forward == 2 * 1024 * (512 + 256) + 8 * 1024 * 2 * 512 + 1000
    assert by_xla.gate_up_again - by_xla.mlp == 8 * 1024 * 2 * 512
    assert by_xla.layer_again - by_xla.gate_up_again == 8 * 1024 * 256


@pytest.mark.parametrize(
    ("arch", "needs"), [(90, XlaMatmuls()), *((arch, XlaMatmuls(4, True, 2 * 256 * 128)) for arch in (89, 120))]
)
def test_packed_weights_take_memory_where_the_gpu_has_no_kernel_for_many_rows(arch, needs):
    """The largest matrix in bf16 and results in fp32, of 4 bytes; unpacked ones everywhere, with a sum beside it. Of
    gate and up of 7B, packed, 1024 rows at a time, with the adapters' part of as many.
    """
    weights = [cases.random_weight(jax.random.key(0), n, 128) for n in (256, 64)]
    gpu = gpu_of("GPU A", arch, 128)
    assert xla_matmuls([packing.pack(weight) for weight in weights], 2, gpu) == needs
    assert xla_matmuls(weights, 2, gpu) == XlaMatmuls(8, False, 2 * 256 * 128)
    wide = {0: 0, 4: 8 * 1024 * 37888}[needs.wide_bytes]
    assert (needs.wide(8192, 37888), needs.wide(64, 128)) == (wide, 64 * 128 * needs.wide_bytes)
    assert XlaMatmuls(8).wide(8192, 37888) == 8 * 8192 * 37888


@pytest.mark.parametrize("count", [1, 7, 64])
def test_each_layer_keeps_what_the_plan_says(count):
    """What is recomputed comes first, whole layers before gate and up alone."""
    for recomputed in {0, count // 3}:
        for again in {0, (count - recomputed) // 2, count - recomputed}:
            layers = UpdatePlan(PACK, recomputed, again, 0, 0).layers(count)
            whole = count - recomputed - again
            assert layers == [Keeps.INPUT] * recomputed + [Keeps.ALL_BUT_GATE_UP] * again + [Keeps.ALL] * whole


def test_what_does_not_fit_is_recomputed_gate_and_up_first():
    """From the memory that is needed to next to none: every plan fits and needs what it says, none recomputes more than
    it must, and less memory is never faster.
    """
    config = make_config(logprob_chunk_size=16, lora_rank=8, tokens_per_micro_batch=1024)
    config = dataclasses.replace(config, max_prompt_length=64, max_completion_length=192)
    whole = choose_plan(MODEL, 2, config, 64, 256, None)
    assert whole.recomputed == whole.recomputed_gate_up == 0
    needed, costs, kinds = whole.kept_bytes + whole.working_bytes, [], set()
    for gigabytes, recomputes in (((needed + 1) / 1e9, False), ((needed - 1) / 1e9, True)):
        plan = choose_plan(MODEL, 2, dataclasses.replace(config, update_memory_gb=gigabytes), 64, 256, None)
        assert (plan.recomputed_gate_up > 0) == recomputes
    for free in (share * needed / 60 for share in range(60, 0, -1)):
        plan = choose_plan(MODEL, 2, config, 64, 256, free)
        need, layers = layer_bytes(MODEL, 2, plan.pack, config, XlaMatmuls()), plan.layers(12)
        assert plan.kept_bytes == 12 * need.input + sum(map(need.kept, layers))
        assert plan.kept_bytes + plan.working_bytes == peak_bytes(layers, need)
        kinds.add((plan.recomputed > 0, plan.recomputed_gate_up > 0))
        assert plan.recomputed == 0 or Keeps.ALL not in layers
        if plan.lacking_bytes:
            assert layers == [Keeps.INPUT] * 12 and plan.lacking_bytes == round(peak_bytes(layers, need) - free)
            continue
        assert plan.kept_bytes + plan.working_bytes <= free
        if plan.recomputed_gate_up and not plan.recomputed:
            less = [Keeps.ALL_BUT_GATE_UP] * (plan.recomputed_gate_up - 1)
            assert peak_bytes(less + [Keeps.ALL] * (12 - len(less)), need) > free
        costs.append(update_plan._cost(MODEL, update_plan._Limits(256, 64, 192, config.num_generations), 64, plan))
    assert costs == sorted(costs)
    assert kinds == {(False, False), (False, True), (True, True), (True, False)}
