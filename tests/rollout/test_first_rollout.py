"""Compile cost of a first rollout: programs compiled, and layers traced for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fp32_policy
from timing import compile_calls

from qerl_jax.compilation import CompilationCounter
from qerl_jax.config import Config
from qerl_jax.lowered import LoweredPrograms
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.fused_decode import FusedDecodeExecutor
from qerl_jax.models.qwen2 import DecoderLayer
from qerl_jax.programs import Ahead, record, shapes_of
from qerl_jax.rl.advantages import make_batch
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout import decode
from qerl_jax.rollout.engine import generate, rehearse
from qerl_jax.rollout.prefill import prefill
from qerl_jax.rollout.shapes import RolloutShapes
from qerl_jax.run.abstract import abstract_trees
from qerl_jax.types import Engine, Policy, Prompts, Rollout, Sampling

pytestmark = pytest.mark.usefixtures("kept_programs_forgotten")

MODEL = ModelConfig(64, 128, 128, 5, 4, 2, 32, 1e4, 1e-6, True, 64, (0,), 0)
BF16 = jnp.dtype(jnp.bfloat16)
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    """A name for each time that Python traced a layer, and for each layer that ran fused."""
    seen = []

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(DecoderLayer, "down")
    count(FusedDecodeExecutor, "swiglu_project")
    return seen


def config_of(**changes) -> Config:
    sizes = {"batch_size": 4, "num_generations": 2, "max_prompt_length": 8, "max_completion_length": 8}
    return Config(model="x", weight_format="nvfp4", lora_rank=8, **sizes, **changes)


def states(policy: Policy) -> tuple[Policy, decode.PromptCache, decode.Slots]:
    """Arguments of `decode_chunk` as shapes."""
    shapes = RolloutShapes(4, 2, 8, 8, 4, 1, 0)
    prompt_cache, slots = jax.eval_shape(lambda: decode.allocate(jax.random.key(0), MODEL, BF16, shapes))
    return policy.replace(lora=jax.eval_shape(decode.cast_lora, policy)), prompt_cache, slots


def ints(*sizes: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]


@pytest.mark.parametrize(
    ("kernel", "times"),
    [
        ("xla", ["down"]),
        ("mosaic_gpu", ["down", "swiglu_project"] * 2),  # the first layer has no deferred residual
    ],
)
def test_decoding_traces_layers_of_one_shape_once(traced, kernel, times):
    policy, _ = abstract_trees(MODEL, "nvfp4", config_of(matmul_kernel=kernel))
    decode.decode_chunk.trace(*states(policy), Sampling(8).distribution, 4, False)
    assert traced == times


def test_a_kept_rollout_traces_no_layer_and_draws_the_same_bits(micro_dir, tmp_path, traced):
    """Programs of an earlier process, as this one is after its caches are cleared."""
    policy, arguments = fp32_policy(micro_dir, rank=3), (Sampling(5, num_generations=2), jax.random.key(0))
    prompts, rollouts, layers = [[5, 9, 2], [7, 1]], [], []
    for kept in (LoweredPrograms(tmp_path, b""), LoweredPrograms(tmp_path, b"")):
        jax.clear_caches()
        traced.clear()
        with Ahead(kept=kept) as ahead:
            ahead.submit(rehearse, policy, len(prompts), 3, *arguments)
            rollouts.append(jax.device_get(generate(policy, prompts, *arguments)))
        layers.append(len(traced))
    assert layers[0] > layers[1] == 0
    jax.tree.map(np.testing.assert_array_equal, *rollouts)


def test_prefill_traces_layers_of_one_shape_once(traced):
    policy, _ = abstract_trees(MODEL, "nvfp4", config_of(matmul_kernel="xla"))
    policy, prompt_cache, _ = states(policy)
    record(prefill, policy, prompt_cache, np.zeros(32, np.int32), *2 * (np.zeros(2, np.int32),), 16, False)
    assert traced == ["down"]


def test_an_update_of_more_layers_traces_no_more_of_them(traced):
    config, counts = config_of(matmul_kernel="xla", update_memory_gb=1e-9), []
    flat, tokens = jnp.zeros(4, jnp.int32), jnp.zeros((4, 16), jnp.int32)
    rollout = Rollout(tokens, tokens.astype(jnp.float32), flat, flat, flat.astype(jnp.int8), flat)
    batch = shapes_of(make_batch(rollout, jnp.zeros(4)))
    for layers in (1, 5):
        traced.clear()
        policy, state = abstract_trees(dataclasses.replace(MODEL, num_layers=layers), "nvfp4", config)
        record(grpo_step, state, policy.frozen, batch)
        counts.append(len(traced))
    assert 0 < counts[0] == counts[1]


def test_a_rollout_compiles_nothing_once_its_programs_are_compiled(micro_dir):
    """Over refills, survivors that move, and prompts of other lengths. A policy
    restored from a checkpoint is committed to its device.
    """
    policy = fp32_policy(micro_dir, rank=5)
    policy = policy.replace(lora=jax.device_put(policy.lora, jax.devices()[0]))
    policy = policy.replace(config=dataclasses.replace(policy.config, eos_token_ids=(3, 5)))
    sampling, engine = Sampling(16, num_generations=4), Engine(40, chunk=3)
    rng, key = np.random.default_rng(0), jax.random.key(0)
    compile_calls(rehearse, policy, 14, 60, sampling, key, engine)
    batches = [[rng.integers(0, 64, rng.integers(1, 1 + most)).tolist() for _ in range(14)] for most in (60, 4, 30)]
    batches = [Prompts.from_lists(prompts, length=60) for prompts in batches]
    with CompilationCounter() as counter:
        for prompts in batches:
            jax.block_until_ready(generate(policy, prompts, sampling, key, engine))
        assert counter.take() == []
