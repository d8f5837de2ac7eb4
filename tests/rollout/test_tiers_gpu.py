"""Engine and update by the kernels of each tier on a Hopper GPU, which runs those of sm_80 and sm_89: they are as far
from fp32 as XLA is in bf16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import updates
from helpers import logprobs_of
from qerl_kernels import dispatch
from qerl_kernels.gpu import gpu_of
from test_batch_invariant import wider

from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout.engine import generate
from qerl_jax.types import Policy, Prompts, Sampling

MISSING = dispatch.missing_for_mosaic_gpu(jnp.bfloat16)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"needs {MISSING}")]
MARGIN = 2  # another order of sums; XLA's own rollout is 1.3 times as far as its whole sequences


@pytest.fixture(params=[None, 80, 89], ids=["Hopper", "sm_80", "sm_89"])
def tier(request):
    """Kernels and shared memory (163 and 99 KiB) of this compute capability; None: of the GPU as it is."""
    gpu = dispatch.this_gpu()
    jax.clear_caches()
    with dispatch.lowering_for(gpu if request.param is None else gpu_of("GPU A", request.param, gpu.sms)):
        yield
    jax.clear_caches()


def distance(found, exact) -> float:
    """‖found − exact‖ / ‖exact‖ over two trees."""
    pairs = list(zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (found, exact)), strict=True))
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)))


def gradient(policy: Policy):
    """AdamW's first moments after one step on a batch that is the same for every policy."""
    state = init_state(policy, updates.make_config(lora_rank=16))
    return grpo_step(state, policy.frozen, updates.make_batch(512))[0].opt_state[0].mu


def agree(path, kernel: str = "mosaic_gpu") -> None:
    """40 rows are decoded together, more than one skinny GEMM has, then fewer; `kernel` against the others."""
    kinds = {"own": (kernel, "bfloat16"), "xla": ("xla", "bfloat16"), "exact": ("xla", "float32")}
    policies = {name: wider(path / name, "nvfp4", dtype, kernel) for name, (kernel, dtype) in kinds.items()}
    rng = np.random.default_rng(0)
    prompts = Prompts.from_lists([rng.integers(20, 500, length).tolist() for length in (3, 60, 40, 1, 90)])
    rollout = generate(policies["own"], prompts, Sampling(24, num_generations=8), jax.random.key(1))
    drawn = np.asarray(rollout.completion_mask[:, 1:])
    logps = {
        name: np.asarray(logprobs_of(policy, rollout.tokens, rollout.attention_mask))[drawn]
        for name, policy in policies.items()
    }
    bound = MARGIN * distance(logps["xla"], logps["exact"])
    assert distance(np.asarray(rollout.logprobs[:, 1:])[drawn], logps["exact"]) <= bound
    assert distance(logps["own"], logps["exact"]) <= bound
    gradients = {name: gradient(policy) for name, policy in policies.items()}
    assert distance(gradients["own"], gradients["exact"]) <= MARGIN * distance(gradients["xla"], gradients["exact"])


def test_rollout_and_update(tmp_path, tier):
    agree(tmp_path)
