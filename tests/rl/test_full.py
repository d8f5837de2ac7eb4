"""Full fine-tuning: the update of all weights against PyTorch, and the dtypes of what is kept and what is computed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from helpers import assert_trees_equal, fp32_policy, with_norm_offsets
from oracles import torch_qwen2
from oracles.torch_updates import TorchUpdates
from updates import ROWS, make_batch, make_config

from qerl_jax.checkpoint.load import load_policy
from qerl_jax.compilation import CompilationCounter
from qerl_jax.config import Config
from qerl_jax.models.lora import LoraConfig
from qerl_jax.programs import compile_calls, shapes_of
from qerl_jax.rl.adamw import make_optimizer
from qerl_jax.rl.plan import make_update_plan
from qerl_jax.rl.state import current_policy, init_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.types import TrainState

MODELS = {
    "Qwen2, own head": {},
    "Qwen2, tied head": {"tie_word_embeddings": True},
    "Qwen3": {"kind": "Qwen3", "head_dim": 8},
    "Llama": {"kind": "Llama"},
}
CASES = {
    "several micro-batches": ("Qwen2, own head", {"tokens_per_micro_batch": 128, "temperature": 0.7}),
    "truncated sampling, recomputed layers": (
        "Qwen2, tied head",
        {"update_memory_gb": 1e-9, "num_iterations": 2, "top_k": 20},
    ),
    "KL, decay, clipped": ("Qwen3", {"beta": 0.3, "weight_decay": 0.1, "max_grad_norm": 0.05, "num_iterations": 2}),
    "no biases": ("Llama", {"loss_type": "grpo"}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two layers, hidden 32, vocab 64, of each kind."""
    place = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        torch_qwen2.make(place / name, seed=0, scale=0.3, **options)
    return place


def full_config(**changes) -> Config:
    """As `make_config`, but no adapters and all weights trained."""
    return make_config(**{"lora_rank": 0, "weight_format": "full", "importance_sampling_cap": 2.0, **changes})


def tensors_of(state: TrainState) -> dict[str, np.ndarray]:
    """Every trained weight by Hugging Face's name, spelt out here."""
    weights, model = state.weights, state.model
    found = {"model.embed_tokens.weight": weights["embed_tokens"], "model.norm.weight": weights["norm"]["weight"]}
    found |= {"lm_head.weight": weights["lm_head"]} if "lm_head" in weights else {}
    heads, width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for i in range(model.num_layers):
        attention, mlp = weights["layers"][i]["self_attn"], weights["layers"][i]["mlp"]
        qkv = np.split(np.asarray(attention["qkv_proj"]["weight"].values), [heads, heads + width])
        gate_up = np.split(np.asarray(mlp["gate_up_proj"]["weight"].values), 2)
        own = {f"self_attn.{name}_proj.weight": rows for name, rows in zip("qkv", qkv, strict=True)}
        if "bias" in attention["qkv_proj"]:
            biases = np.split(np.asarray(attention["qkv_proj"]["bias"]), [heads, heads + width])
            own |= {f"self_attn.{name}_proj.bias": rows for name, rows in zip("qkv", biases, strict=True)}
        own |= {f"mlp.{name}_proj.weight": rows for name, rows in zip(("gate", "up"), gate_up, strict=True)}
        own["self_attn.o_proj.weight"] = attention["o_proj"]["weight"].values
        own["mlp.down_proj.weight"] = mlp["down_proj"]["weight"].values
        own |= {
            f"self_attn.{name}.weight": attention[name]["weight"] for name in ("q_norm", "k_norm") if name in attention
        }
        own |= {f"{name}.weight": norm["weight"] for name, norm in state.norms["layers"][i].items()}
        found |= {f"model.layers.{i}.{name}": value for name, value in own.items()}
    return {name: np.asarray(value) for name, value in found.items()}


class TorchTrainer(TorchUpdates):
    """The updates of every parameter in float64 PyTorch; matrices decay, vectors do not."""

    def __init__(self, directory, config: Config):
        self.config, self.base = config, torch_qwen2.load(directory).double()
        self.model = torch_qwen2.load(directory).double()
        self.parameters = dict(self.model.named_parameters())
        groups = [
            {"params": [p for p in self.parameters.values() if p.ndim == 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        betas = config.adam_beta1, config.adam_beta2
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case == "no biases")) for case in CASES]
)
def test_three_steps_of_all_weights_equal_pytorch(directories, case):
    """Losses, gradient norms and every weight after three steps on different batches, in fp32."""
    model, changes = CASES[case]
    config = full_config(**changes)
    trainer, policy = TorchTrainer(directories / model, config), fp32_policy(directories / model, rank=0)
    state = init_state(policy, config)
    before = tensors_of(state)
    assert before.keys() == trainer.parameters.keys()
    for name, theirs in trainer.parameters.items():
        np.testing.assert_array_equal(before[name], theirs.detach().numpy(), err_msg=name)
    for step in range(3):
        losses, norms = trainer.step(make_batch(64, seed=step))
        state, metrics = grpo_step(state, policy.frozen, make_batch(64, seed=step))
        assert float(metrics["loss"]) == pytest.approx(np.mean(losses), abs=2e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(np.mean(norms), rel=1e-4)
        assert float(metrics["skipped"]) == 0
    for name, ours in tensors_of(state).items():
        theirs = trainer.parameters[name].detach().numpy()
        assert np.abs(theirs - before[name]).max() > 1e-3, name
        np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def bf16(directories):
    """A bf16 policy with norms that bf16 cannot hold."""
    return with_norm_offsets(load_policy(directories / "Qwen2, own head", lora=LoraConfig(rank=0)), 2)


def test_masters_and_moments_are_fp32_and_the_copy_to_compute_with_is_bf16(bf16):
    state, _ = grpo_step(init_state(bf16, full_config()), bf16.frozen, make_batch(64))
    held, copied = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in ((bf16.frozen, state), bf16.frozen))
    assert make_update_plan(state, bf16.frozen, 1e9).rollout_bytes == 1e9 - held - copied  # beside what a rollout reads
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    trained = jax.tree.leaves((state.weights, state.norms))
    assert len(moments) == 2 * len(trained) and {leaf.dtype for leaf in moments + trained} == {jnp.dtype("float32")}
    policy = current_policy(bf16, state)
    assert policy.dtype == jnp.bfloat16
    for leaf, was, master in zip(*map(jax.tree.leaves, (policy.frozen, bf16.frozen, state.weights)), strict=True):
        assert leaf.dtype == was.dtype
        np.testing.assert_array_equal(leaf, np.asarray(master).astype(leaf.dtype))
    assert_trees_equal(policy.norms, state.norms)


def test_a_step_too_small_for_bf16_changes_the_masters(bf16):
    """Steps of 1e-6: every matrix moves, its bf16 copy hardly; so do steps of the same size add up."""
    state = init_state(bf16, full_config(learning_rate=1e-6, adam_epsilon=1e-12))
    after, _ = grpo_step(state, bf16.frozen, make_batch(64))
    for one, other in zip(
        jax.tree.leaves(state.weights["layers"]), jax.tree.leaves(after.weights["layers"]), strict=True
    ):
        assert 0 < np.abs(one - other).max() < 2e-6
    copies = (jax.tree.leaves(current_policy(bf16, each).frozen["layers"]) for each in (state, after))
    assert np.mean([np.mean(one != other) for one, other in zip(*copies, strict=True)]) < 0.05


SGD = optax.sgd(1.0)


def test_the_update_computes_with_the_rounded_masters(bf16):
    """Masters that differ by less than bf16 resolves have the same loss and gradient, to the bit. The norms, which stay
    in fp32, are the same in both.
    """
    state = init_state(bf16, full_config(), SGD)

    def between(leaf, was):
        return leaf * (1 + 2.0**-10) if was.dtype == jnp.bfloat16 else leaf

    moved = state.replace(weights=jax.tree.map(between, state.weights, bf16.frozen))
    assert_trees_equal(current_policy(bf16, moved).frozen, bf16.frozen)
    (one, metrics), (other, same) = (grpo_step(each, bf16.frozen, make_batch(64)) for each in (state, moved))
    assert_trees_equal(metrics, same)
    assert_trees_equal(one.norms, other.norms)
    steps = [jax.tree.map(jnp.subtract, b.weights, a.weights) for a, b in ((state, one), (moved, other))]
    for step, same in zip(*map(jax.tree.leaves, steps), strict=True):
        assert np.abs(step).max() > 0
        np.testing.assert_allclose(step, same, atol=1e-6)  # the subtraction's own rounding


def test_the_gradient_of_a_bf16_model_is_that_of_its_weights_in_fp32(directories, bf16):
    """The distance is that of rounded activations: a few percent of the gradient of every array."""
    exact = fp32_policy(directories / "Qwen2, own head", rank=0)
    exact = exact.replace(frozen=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), bf16.frozen), norms=bf16.norms)
    gradients = []
    for policy in (exact, bf16):
        state = init_state(policy, full_config(), SGD)
        after, _ = grpo_step(state, policy.frozen, make_batch(64))
        trees = ({"weights": each.weights, "norms": each.norms} for each in (state, after))
        gradients.append(jax.tree.leaves(jax.tree.map(jnp.subtract, *trees)))
    for wanted, found in zip(*gradients, strict=True):
        assert 0 < np.linalg.norm(found - wanted) < 0.06 * np.linalg.norm(wanted)


def test_an_optimizer_over_the_whole_tree_makes_the_same_step(directories):
    """AdamW runs part by part, any other optimizer over all weights: here the same AdamW."""
    config = full_config(weight_decay=0.1)
    policy = fp32_policy(directories / "Qwen2, tied head", rank=0)
    states = [init_state(policy, config, optimizer) for optimizer in (None, make_optimizer(config))]
    for step in range(2):
        states = [grpo_step(state, policy.frozen, make_batch(64, seed=step))[0] for state in states]
    for part in ("weights", "norms", "opt_state"):
        one, other = (jax.tree.leaves(getattr(state, part)) for state in states)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_all_is_compiled_ahead_with_an_optimizer_of_ones_own(directories):
    config = full_config(num_iterations=2, beta=0.1, tokens_per_micro_batch=128, logprob_chunk_size=7)
    policy = jax.device_put(load_policy(directories / "Qwen2, tied head", lora=LoraConfig(rank=0)), jax.devices()[0])
    state = init_state(policy, config, SGD)
    batches = jax.device_put([make_batch(64, seed=seed) for seed in range(2)], jax.devices()[0])
    compile_calls(grpo_step, state, policy.frozen, shapes_of(batches[0]))
    with CompilationCounter() as counter:
        for batch in batches:
            state, _ = jax.block_until_ready(grpo_step(state, policy.frozen, batch))
        assert counter.take() == []
    jax.tree.map(np.asarray, (state.weights, policy.frozen))  # nothing that stays was donated


def test_an_update_that_is_not_finite_changes_nothing(directories):
    policy = fp32_policy(directories / "Qwen2, tied head", rank=0)
    state, batch = init_state(policy, full_config()), make_batch(64)
    after, metrics = grpo_step(state, policy.frozen, batch.replace(advantages=jnp.full(ROWS, jnp.nan)))
    assert float(metrics["skipped"]) == 1 and int(after.step) == 1 and int(after.cursor) == state.config.num_prompts
    assert_trees_equal(after.replace(step=state.step, cursor=state.cursor), state)


def test_policies_that_cannot_be_trained_whole_are_refused(directories):
    adapted = fp32_policy(directories / "Llama", rank=2)
    with pytest.raises(ValueError, match="'full' trains all weights and no adapters, the policy's have rank 2"):
        init_state(adapted, full_config())
    quantized = fp32_policy(directories / "Llama", rank=0, weight_format="nvfp4")
    with pytest.raises(ValueError, match="'full' trains unquantized weights, the policy's are Nvfp4"):
        init_state(quantized, full_config())
    divided = adapted.replace(lora_config=LoraConfig(0), config=dataclasses.replace(adapted.config, tensor_parallel=2))
    with pytest.raises(ValueError, match="on one GPU, not with tensor_parallel_size 2"):
        init_state(divided, full_config())
    with pytest.raises(ValueError, match="rank 0, the config has lora_rank 2"):
        init_state(
            fp32_policy(directories / "Llama", rank=0),
            dataclasses.replace(full_config(), weight_format="bf16", lora_rank=2),
        )
