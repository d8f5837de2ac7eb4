"""Values that the code of the released QeRL (NVlabs/QeRL at e8c6e79) computed from the inputs recorded beside them: its
functions, cut out by name, ran on stand-ins (`tools/make_release_goldens.py`, which git has up to 829df0f).
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, logprobs_of
from jax.tree_util import Partial

from qerl_jax import aqn
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.config import Config
from qerl_jax.models.lora import without_adapter
from qerl_jax.rl import optimizer
from qerl_jax.rl.adamw import AdamW, learning_rate
from qerl_jax.rl.advantages import make_batch
from qerl_jax.rl.loss import LossSettings, token_losses, token_weights
from qerl_jax.rl.state import init_state
from qerl_jax.types import FinishReason, Policy, Rollout

GOLDEN = Path(__file__).parent / "golden"


def recorded(part: str) -> dict[str, Any]:
    """The golden file of one part."""
    return json.loads((GOLDEN / f"release_{part}.json").read_text())


def loss_mask(ids: np.ndarray, eos: int) -> np.ndarray:
    """The tokens [B, C] in the loss under `mask_truncated_completions`, behind prompts of one token."""
    ends = (ids == eos).any(axis=1)
    lengths = np.where(ends, (ids == eos).argmax(axis=1) + 1, ids.shape[1])
    tokens = np.concatenate([np.ones((len(ids), 1), np.int32), ids.astype(np.int32)], axis=1)
    rollout = Rollout(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        prompt_lengths=jnp.ones(len(ids), jnp.int32),
        lengths=jnp.asarray(1 + lengths, jnp.int32),
        finish=jnp.asarray(np.where(ends, FinishReason.EOS, FinishReason.LENGTH), jnp.int8),
        prompt_index=jnp.arange(len(ids), dtype=jnp.int32),
    )
    return np.asarray(make_batch(rollout, jnp.zeros(len(ids)), mask_truncated_completions=True).loss_mask[:, 1:])


def test_losses_with_truncated_rows_are_the_releases():
    """Loss, gradient and metrics of each loss; two of eight rows are truncated and masked, as the release masks them.
    Its `grpo` and `dr_grpo` divide by all eight.
    """
    golden = recorded("losses")
    logp, old, reference, advantages = (
        jnp.asarray(golden[name], jnp.float32) for name in ("logp", "old", "reference", "advantages")
    )
    mask = jnp.asarray(loss_mask(np.array(golden["completion_ids"]), golden["eos"]))
    np.testing.assert_array_equal(mask, np.array(golden["mask_truncated_completions"], bool))
    assert mask.any(axis=1).sum() == 6
    for result in golden["results"]:
        limits = {name: golden[name] for name in ("max_completion_length", "epsilon", "epsilon_high")}
        config = Config(**limits, **result["settings"], importance_sampling_cap=None)

        def total(logp, config=config):
            given = logp, old, old, reference if config.beta else None, advantages, mask
            losses, values = token_losses(*given, LossSettings.of(config))
            weights = token_weights(mask, config.loss_type, config.max_completion_length)
            return jnp.sum(weights * losses), values

        (loss, values), gradient = jax.value_and_grad(total, has_aux=True)(logp)
        assert float(loss) == pytest.approx(result["loss"], abs=1e-6), result["settings"]
        np.testing.assert_allclose(gradient, result["gradient"], atol=1e-6, err_msg=str(result["settings"]))
        if config.beta:
            assert float(values["kl"].sum() / mask.sum()) == pytest.approx(result["metrics"]["kl"], abs=1e-6)


def test_the_noise_of_every_rollout_is_the_releases():
    """But for borders of stages that its float division misplaces: there its σ is still that of the stage before."""
    misplaced = 0
    for run in recorded("noise")["runs"]:
        config, rollouts = Config(**run["settings"]), len(run["sigmas"])
        ours = [aqn.sigma(config, step, rollouts) for step in range(rollouts)]
        for step, (own, theirs) in enumerate(zip(ours, run["sigmas"], strict=True)):
            update = step * config.num_iterations + 1
            if own != pytest.approx(theirs, rel=1e-8):
                assert update * config.num_stages % (rollouts * config.num_iterations) == 0, (run["settings"], step)
                assert ours[step - 1] == pytest.approx(theirs, rel=1e-8)
                misplaced += 1
    assert 0 < misplaced < 5


@pytest.fixture(scope="module")
def adapted(tiny_dir) -> Policy:
    """The adapter with norms that PEFT wrote, on the fixture of three layers."""
    return load_policy(tiny_dir, dtype=jnp.float32, adapter=GOLDEN / "adapter_with_norms")


def config_of(policy: Policy, **fields: Any) -> Config:
    """A config that describes the policy's adapters."""
    lora = policy.lora_config
    return Config(
        lora_rank=lora.rank, lora_alpha=lora.alpha, lora_target_modules=lora.target_modules, max_steps=10, **fields
    )


def test_norms_do_not_decay(adapted):
    """One update without a gradient multiplies each adapter by 1 − lr · decay and leaves the norms alone."""
    golden = recorded("optimizer")
    rates = {"learning_rate": golden["learning_rate"], "lr_scheduler_type": "constant", "warmup_ratio": 0}
    config = config_of(adapted, weight_decay=golden["weight_decay"], train_norms=True, **rates)
    ones = adapted.replace(**{name: jax.tree.map(jnp.ones_like, getattr(adapted, name)) for name in ("norms", "lora")})
    state = init_state(ones, config)
    trees = {"norms": state.norms, "lora": state.lora}
    still = jax.tree.map(jnp.zeros_like, trees)
    before = {"opt_state": state.opt_state, **trees}
    after = optimizer.apply(Partial(AdamW.update, state.optimizer), before, still, jnp.float32(1), jnp.bool_(True))
    theirs = golden["one_after_an_update_without_gradient"]
    for tree, words in (("norms", ["input_layernorm", "post_attention_layernorm"]), ("lora", ["lora_A", "lora_B"])):
        of_tree = [value for name, value in theirs.items() if any(word in name for word in words)]
        leaves = jax.tree.leaves(after[tree])
        assert len(of_tree) == len(leaves) > 0
        for leaf in leaves:
            np.testing.assert_allclose(leaf, of_tree[0], rtol=1e-6)
    assert len(set(theirs.values())) == 2


def test_learning_rates_are_those_of_transformers():
    """Every update's rate; 0.1 of 15 or 25 updates is no whole number."""
    for case in recorded("optimizer")["schedules"]:
        fields = {name: case[name] for name in ("lr_scheduler_type", "warmup_ratio")}
        schedule = learning_rate(Config(max_steps=case["updates"], num_iterations=1, learning_rate=1.0, **fields))
        ours = [float(schedule(update)) for update in range(case["updates"])]
        np.testing.assert_allclose(ours, case["rates"], atol=1e-6, err_msg=str(fields))


def test_the_kl_reference_of_an_adapter_with_norms_is_the_base(adapted):
    """The release disables the adapter, which brings back the checkpoint's norms."""
    golden = recorded("reference")
    tokens, everywhere = jnp.asarray(golden["tokens"]), jnp.ones((2, 10), bool)
    np.testing.assert_allclose(logprobs_of(adapted, tokens, everywhere), golden["logp"], atol=2e-5)
    for train_norms in (False, True):
        state = init_state(adapted, config_of(adapted, beta=0.1, train_norms=train_norms))
        reference = adapted.replace(lora=without_adapter(state.lora), norms=state.reference_norms)
        np.testing.assert_allclose(logprobs_of(reference, tokens, everywhere), golden["reference"], atol=2e-5)
        assert_trees_equal(state.norms, adapted.norms)

    plain = adapted.replace(norms=adapted.base_norms, base_norms=None)
    assert init_state(plain, config_of(plain)).reference_norms is None
