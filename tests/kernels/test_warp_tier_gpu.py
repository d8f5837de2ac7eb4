"""The kernels of tier "warp" on a Hopper GPU, which runs instructions of sm_80, with the shared memory of an RTX 4090
or an A100: the tests of Hopper's kernels against fp64, with poisoned memory and repeats, on what is called there."""

import jax
import numpy as np
import pytest
from gpu_oracle import needs_gpu, weight_of
from qerl_kernels import dispatch
from qerl_kernels.gpu import gpu_of
from qerl_kernels.nvfp4_matmul import packing
from qerl_kernels.nvfp4_matmul.dequantize.kernel import dequantize
from test_decode_attention_gpu import (  # noqa: F401
    test_a_row_does_not_depend_on_the_others,
    test_every_group,
    test_every_model_at_every_edge,
    test_idle_rows_give_zero_and_lengths_of_the_prompt_alone,
    test_long_caches,
)
from test_decode_attention_gpu import test_a_thousand_runs_give_the_same_bits as test_attention_repeats
from test_decode_prologue_gpu import test_ranks, test_split_k_partials  # noqa: F401
from test_matmul_gpu import (  # noqa: F401
    test_a_thousand_runs_give_the_same_bits,
    test_adapters,
    test_adapters_and_their_gradients,
    test_any_shape,
    test_batch_invariant_rows_do_not_depend_on_the_others,
    test_gradients_agree_with_xla,
    test_mxfp4,
    test_transformations,
)

pytestmark = needs_gpu
ADA, A100 = (gpu_of(f"a GPU of sm_{arch}", arch, 132) for arch in (89, 80))
# The two differ in shared memory: in the stages of attention and of the skinny GEMM, and in which configs fit.
ALSO_ON_A100 = (test_every_model_at_every_edge, test_attention_repeats, test_any_shape, test_adapters,
                test_a_thousand_runs_give_the_same_bits)  # fmt: skip


def pytest_generate_tests(metafunc):
    gpus = (ADA, A100) if metafunc.function in ALSO_ON_A100 else (ADA,)
    metafunc.parametrize("gpu", gpus, ids=lambda gpu: f"sm_{gpu.arch}", indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def gpu(request):
    """Every kernel is called as for this GPU; what was traced for another is forgotten."""
    with dispatch.lowering_for(request.param):
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


@pytest.mark.parametrize(("n", "k"), [(64, 64), (70, 80), (4608, 3584), (3584, 18944)])
def test_a_dequantized_weight_is_exact(n, k, gpu):
    packed = packing.pack(weight_of(n, k, seed=n))
    expected = packing.packed_parts(packed)[0]
    for _ in range(20):
        found = dequantize(packed, gpu=gpu)
        np.testing.assert_array_equal(np.asarray(found).view(np.uint16), np.asarray(expected).view(np.uint16))
