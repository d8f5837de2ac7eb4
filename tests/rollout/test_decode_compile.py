"""Decode chunk and prefill compiled for an H200 (a decode chunk also for another GPU): copies, graphs, reductions."""

import json
from pathlib import Path

import h200
import pytest

LAYERS = 2


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.parametrize(
    ("gpu", "norms"),
    [
        pytest.param((), 0, id="H200"),
        pytest.param(("89", "128", "8"), 3, id="RTX 4090"),
        pytest.param(("90", "114", "8"), 3, id="H100 PCIe", marks=pytest.mark.nightly),
    ],
)
def test_a_decode_step_is_one_captured_graph_that_copies_nothing(tmp_path, gpu, norms):
    """The loop copies no weights and no caches and does not concatenate adapters. Its body is a single command buffer
    with ten kernels a layer, a few for the whole step, one of them for all cosines and sines, and where XLA computes
    the norms at most three more a layer.
    """
    ran = h200.run(Path(__file__).parent / "decode_for_h200.py", str(tmp_path), *gpu)
    found = json.loads(ran.stdout.splitlines()[-1])
    operations = found["operations"]
    assert set(operations) <= {"copy", "fusion", "custom-call"}
    assert set(operations.get("copy", [])) <= {"pred[8]{0}", "s32[8]{0}"}  # a flag or a number for each slot
    assert len(operations["custom-call"]) == 10 * LAYERS
    assert sum("f32[8,64]" in shape for shape in operations["fusion"]) == 1
    assert not any("bf16[1024,96]" in shape for shape in operations["fusion"]), "adapters are concatenated in the loop"
    assert found["thunks"] == ["kCommandBuffer"]
    assert 0 < found["captured"] - (10 + norms) * LAYERS <= 21  # 21 for the step: one more a layer would exceed it


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_weights_stay_packed_where_many_rows_are_decoded(tmp_path):
    """Each layer dequantizes its four matrices within the loop, at every step: before it, all would exist at once."""
    ran = h200.run(Path(__file__).parent / "decode_for_h200.py", str(tmp_path), "89", "128", "256")
    found = json.loads(ran.stdout.splitlines()[-1])
    inside = [shape.split("{")[0] for shape in found["operations"]["custom-call"]]
    matrices = ["bf16[1280,1024]", "bf16[1024,1024]", "bf16[4096,1024]", "bf16[1024,2048]"]
    assert all(inside.count(shape) == LAYERS for shape in matrices) and found["kernels"] == len(inside)


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_a_layer_of_prefill_copies_no_weight_and_no_cache():
    """Four GEMMs with packed weights; the residual stream and the layer's caches are updated in place. Where XLA
    multiplies, 7B takes 1.5 GB for 32 prompts of 256 tokens (1.1 on Hopper), as estimated.
    """
    ran = h200.run(Path(__file__).parent / "prefill_for_h200.py")
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["gemms"] == 4
    assert found["copied"] == [] and found["reused"] == found["kept"]
    assert found["bytes"] <= 1.51e9 and found["estimate"] == pytest.approx(found["bytes"], rel=0.1)


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.parametrize(
    ("weight_format", "sampling"),
    [
        ("nvfp4", "whole"),
        ("bf16", "truncated"),
        pytest.param("nvfp4", "truncated", marks=pytest.mark.nightly),
        pytest.param("bf16", "whole", marks=pytest.mark.nightly),
    ],
)
def test_batch_invariant_sums_are_the_same_programs_for_any_number_of_slots(weight_format, sampling):
    """XLA chooses the order of a fused reduction anew for each program; without the mode the orders do differ. The
    draw, whose random bits take exclusive ors, is not fused with the normalizer's sum of exponentials.
    """
    ran = h200.run(Path(__file__).parent / "sums_for_h200.py", weight_format, sampling)
    found = json.loads(ran.stdout.splitlines()[-1])
    few, many = found["batch_invariant"]
    assert len(few) > 4 and few == many
    assert not any(" xor(" in text and " exponential(" in text for text in few)
    few, many = found.get("not", "ab")
    assert few != many
