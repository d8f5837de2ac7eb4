"""The check of `tools/bench_rollout.py` on the kernels that ran."""

import pytest

GEMM, PROLOGUE = "nvfp4_skinny_m8_lora_x", "decode_prologue_norm_lora"
OTHERS = ["decode_attention_h128", "rope_and_cache", "nvjet_tst_64x8", "loop_add_fusion"]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (("mosaic_gpu", 8, False), [GEMM, PROLOGUE, *OTHERS]),
        (("mosaic_gpu", 8, True), [GEMM, *OTHERS]),
        (("mosaic_gpu", 256, False), [GEMM, *OTHERS]),
        (("xla", 8, False), OTHERS),
    ],
)
def test_a_row_needs_the_kernels_of_its_implementation(tool, how, names):
    rollouts = tool("bench_rollout")
    expected = rollouts.expected_kernels(*how)
    assert rollouts.refuse_other_kernels(names, expected) == sorted(expected)
    for left_out in [name for name in names if name not in OTHERS[2:]]:
        with pytest.raises(SystemExit, match="no row is written"):
            rollouts.refuse_other_kernels([name for name in names if name != left_out], expected)
    for added in {GEMM, PROLOGUE} - set(names):
        with pytest.raises(SystemExit, match="no row is written"):
            rollouts.refuse_other_kernels([*names, added], expected)
