"""`batch_invariant`: the bits of a completion do not depend on its neighbours; without the mode they do."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from helpers import fp32_policy, randomized

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.models.executor import PlainExecutor
from qerl_jax.models.lora import LoraConfig
from qerl_jax.models.modules import Norm, RMSNorm
from qerl_jax.programs import calling
from qerl_jax.rollout.engine import generate
from qerl_jax.types import Engine, Policy, Prompts, Sampling

LENGTHS, WIDTH, KEY = [3, 200, 40, 1, 90, 8], 200, jax.random.key(5)  # long enough for XLA to cut sums otherwise


def rollout(policy: Policy, chosen: list[int], group: int, engine: Engine) -> dict[tuple[int, int], tuple]:
    """(prompt, index in the group) -> tokens and log-probabilities."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 500, length).tolist() for length in LENGTHS]
    some = Prompts.from_lists([prompts[p] for p in chosen], ids=chosen, length=WIDTH)
    out = generate(policy, some, Sampling(12, num_generations=group), KEY, engine)
    rows = [(p, g) for p in chosen for g in range(group)]
    return {row: (np.asarray(out.tokens[i]), np.asarray(out.logprobs[i])) for i, row in enumerate(rows)}


@pytest.mark.nightly
@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_rows_are_the_same_bits_beside_any_neighbours(weight_format):
    """The bundled policy in fp32: 18 sequences at once, against four in three slots with other chunks."""
    policy = randomized(fp32_policy(model_path("tiny"), weight_format=weight_format), 0)
    equal = {}
    for invariant in (True, False):
        many = rollout(policy, [0, 1, 2, 3, 4, 5], 3, Engine(batch_invariant=invariant))
        few = rollout(policy, [4, 0], 2, Engine(slots=3, chunk=5, batch_invariant=invariant))
        equal[invariant] = [np.array_equal(a, b) for row in few for a, b in zip(few[row], many[row], strict=True)]
    assert all(equal[True])
    assert not all(equal[False]), "this machine would not show a difference"


def wider(path: Path, weight_format: str, dtype: str, matmul_kernel: str = "auto") -> Policy:
    """A 256-wide model with adapters, so that XLA splits the norms' reductions by batch size; some rows reach EOS."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    small.bf16(path / "model", shards=1, head_dim=64, **sizes)
    policy = load_policy(path / "model", weight_format, LoraConfig(16), jnp.dtype(dtype), matmul_kernel=matmul_kernel)
    config = dataclasses.replace(policy.config, eos_token_ids=tuple(range(20)))
    return randomized(policy.replace(config=config), 0, 0.05)


def assert_the_same_bits(policy: Policy) -> None:
    """72 sequences at once, whose last survivors move into fewer slots, against four in three slots."""
    many = rollout(policy, [0, 1, 2, 3, 4, 5], 12, Engine(chunk=2, batch_invariant=True))
    few = rollout(policy, [4, 0], 2, Engine(slots=3, chunk=5, batch_invariant=True))
    for row, found in few.items():
        for a, b in zip(found, many[row], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_norms_of_wider_rows_are_the_same_bits(tmp_path, dtype):
    assert_the_same_bits(wider(tmp_path, "nvfp4", dtype))


def test_norms_of_heads_are_the_same_bits():
    """Those of q and k (Qwen3), of 1 to 72 rows of four heads."""
    x = np.random.default_rng(0).normal(size=(72, 4, 256)).astype(np.float32)
    norm, equal = RMSNorm(Norm(jnp.ones(256)), 1e-6, jnp.dtype("float32")), {}
    for invariant in (True, False):
        normalize = jax.jit(functools.partial(PlainExecutor(invariant).normalize, norm))
        equal[invariant] = [np.array_equal(normalize(x[:rows]), normalize(x)[:rows]) for rows in (1, 2, 3, 8)]
    assert all(equal[True])
    assert not all(equal[False]), "this machine would not show a difference"


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_rows_are_the_same_bits_on_a_gpu(tmp_path, weight_format):
    """BF16, and NVFP4 through the kernels."""
    kernel = "mosaic_gpu" if weight_format == "nvfp4" else "xla"
    assert_the_same_bits(wider(tmp_path, weight_format, "bfloat16", kernel))


class Prefilled(Exception):
    """In place of decoding."""


def test_each_prompt_is_prefilled_alone(tmp_path):
    """A prefill's shape depends on its own prompt only; without the mode prompts are packed together."""
    policy = fp32_policy(small.bf16(tmp_path / "model", shards=1))
    seen = []

    def note(program, args, kwargs):
        if program.__name__ == "decode_chunk":
            raise Prefilled
        if program.__name__ == "prefill_layer":
            _, x, _, places, _, _, batch_invariant = args
            seen.append((len(x), *places.layout.unpack_index.shape, batch_invariant))
        return program(*args, **kwargs)

    with calling(note):
        for is_invariant in (True, False):
            with pytest.raises(Prefilled):
                rollout(policy, [0, 2, 4], 1, Engine(batch_invariant=is_invariant))
    alone, layers = [(size, 1, size, True) for size in (16, 48, 96)], policy.config.num_layers
    assert seen[:-layers] == [shape for shape in alone for _ in range(layers)] and seen[-1][0] == 512
