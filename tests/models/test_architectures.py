"""Qwen2, Qwen3 and Llama 3 against transformers: logits, rollouts, updates and what noise reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, fp32_policy, logits_of, logprobs_of, randomized
from oracles import torch_qwen2
from updates import make_batch, make_config

from qerl_jax import Sampling, aqn, generate, grpo_step, init_state, keys, token_logprobs
from qerl_jax.checkpoint.quantize import quantize_checkpoint

SHAPES = {
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, untied": ("Qwen2", {"tie_word_embeddings": False, "head_dim": 12, "num_key_value_heads": 1}),
    "qwen2, epsilon": ("Qwen2", {"rms_norm_eps": 0.1, "rope_theta": 100.0, "num_key_value_heads": 4}),
    "llama, plain rotary": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama 3.2, tied": (
        "Llama",
        {"rope_parameters": {**torch_qwen2.LLAMA_ROPE, "factor": 32.0}, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3, untied": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": False, "num_key_value_heads": 1, "rms_norm_eps": 0.1},
    ),
}
KINDS = [("Llama", {"rope_parameters": torch_qwen2.LLAMA_ROPE}), ("Qwen3", {"head_dim": 12})]


@pytest.mark.parametrize(("kind", "shape"), SHAPES.values(), ids=SHAPES)
def test_logits_equal_transformers(tmp_path, kind, shape):
    """Of rows padded on the right, on the left and not at all: transformers computes none by its neighbours."""
    model = torch_qwen2.make(tmp_path, seed=1, kind=kind, scale=0.2, **shape)
    tokens, places = np.random.default_rng(0).integers(0, 64, (3, 60)), np.arange(60)
    mask = np.stack([places < 41, places >= 7, places >= 0])
    policy = fp32_policy(tmp_path)
    assert (policy.frozen.get("lm_head") is None) == bool(shape.get("tie_word_embeddings"))
    ours = np.asarray(logits_of(policy, tokens, mask))
    theirs = torch_qwen2.logits(model, tokens, mask)
    assert np.abs(theirs[mask]).max() > 0.3
    np.testing.assert_allclose(ours[mask], theirs[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "shape"), KINDS, ids=["Llama", "Qwen3"])
def test_a_rollout_agrees_with_whole_sequences(tmp_path, kind, shape):
    """Prefill, decode and the trainer's pass give one distribution: log-probabilities of what was drawn."""
    torch_qwen2.make(tmp_path, seed=2, kind=kind, scale=0.2, **shape)
    policy = fp32_policy(tmp_path)
    prompts = [[3, 5, 7, 11, 2], [40, 41], [9] * 20]
    rollout = generate(policy, prompts, Sampling(24, num_generations=2), jax.random.key(0))
    logp = logprobs_of(policy, rollout.tokens, rollout.attention_mask)
    drawn = np.asarray(rollout.completion_mask[:, 1:])
    np.testing.assert_allclose(np.asarray(rollout.logprobs[:, 1:])[drawn], np.asarray(logp)[drawn], atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "shape"), [KINDS[0], pytest.param(*KINDS[1], marks=pytest.mark.nightly)], ids=["Llama", "Qwen3"]
)
def test_the_update_has_the_gradient_of_the_whole_model(tmp_path, kind, shape):
    """At ratio 1, the layer-wise backward pass against plain autodiff of the policy gradient."""
    torch_qwen2.make(tmp_path, seed=3, kind=kind, scale=0.2, **shape)
    policy = randomized(fp32_policy(tmp_path, rank=2), seed=0)
    config = make_config(loss_type="dapo", train_norms=True, learning_rate=1e-3)
    state, batch = init_state(policy, config), make_batch(64)

    def loss(trained):
        logp = token_logprobs(policy.replace(**trained), batch.tokens, batch.attention_mask)
        ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
        mask = batch.loss_mask[:, 1:]
        return -(ratio * batch.advantages[:, None] * mask).sum() / mask.sum()

    gradient = jax.jit(jax.grad(loss))({"lora": policy.lora, "norms": policy.norms})
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
    after, metrics = grpo_step(state, policy.frozen, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    moments = after.opt_state[0].mu
    for name in ("lora", "norms"):
        for ours, theirs in zip(*(jax.tree.leaves(tree[name]) for tree in (moments, gradient)), strict=True):
            np.testing.assert_allclose(ours / (1 - config.adam_beta1), theirs, atol=2e-5 * float(norm))


def test_noise_reaches_the_two_layer_norms_and_not_those_of_heads(tmp_path):
    torch_qwen2.make(tmp_path, seed=4, kind="Qwen3", head_dim=12)
    policy = fp32_policy(tmp_path)
    noisy = aqn.perturb(policy.norms, 0.01, keys.for_step(0, keys.Purpose.AQN, 0))
    assert aqn.count_perturbed(policy.norms, noisy) == 2 * policy.config.num_layers
    assert "q_norm" in policy.frozen["layers"][0]["self_attn"]


@pytest.mark.parametrize(("kind", "shape"), KINDS, ids=["Llama", "Qwen3"])
def test_a_quantized_checkpoint_is_what_loading_quantizes(tmp_path, kind, shape):
    torch_qwen2.make(tmp_path / "model", seed=5, kind=kind, **{**shape, "head_dim": 16})
    quantize_checkpoint(tmp_path / "model", tmp_path / "stored")
    loaded = fp32_policy(tmp_path / "model", weight_format="nvfp4")
    assert_trees_equal(fp32_policy(tmp_path / "stored").frozen, loaded.frozen)
