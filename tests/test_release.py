"""Values recorded from the released QeRL by `tools/make_release_goldens.py`, which runs its own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import Config
from qerl_jax.rl.advantages import make_batch
from qerl_jax.rl.loss import token_losses, token_weights
from qerl_jax.types import FinishReason, Rollout


def recorded(part: str) -> dict[str, Any]:
    """The golden file of one part."""
    return json.loads((Path(__file__).parent / "golden" / f"release_{part}.json").read_text())


def masked_rollout(golden: dict[str, Any]) -> Rollout:
    """The recorded completions as a rollout behind prompts of one token."""
    ids = np.array(golden["completion_ids"], np.int32)
    ends = (ids == golden["eos"]).any(axis=1)
    lengths = np.where(ends, (ids == golden["eos"]).argmax(axis=1) + 1, ids.shape[1])
    tokens = np.concatenate([np.ones((len(ids), 1), np.int32), ids], axis=1)
    return Rollout(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        prompt_lengths=jnp.ones(len(ids), jnp.int32),
        lengths=jnp.asarray(1 + lengths, jnp.int32),
        finish=jnp.asarray(np.where(ends, FinishReason.EOS, FinishReason.LENGTH), jnp.int8),
        prompt_index=jnp.arange(len(ids), dtype=jnp.int32),
    )


def test_losses_with_truncated_rows_are_the_releases():
    """Loss, gradient and metrics of each loss; two of eight rows are truncated and masked, as the release masks them.
    Its `grpo` and `dr_grpo` divide by all eight.
    """
    golden = recorded("losses")
    logp, old, reference, advantages = (
        jnp.asarray(golden[name], jnp.float32) for name in ("logp", "old", "reference", "advantages")
    )
    mask = make_batch(masked_rollout(golden), advantages, mask_truncated_completions=True).loss_mask[:, 1:]
    np.testing.assert_array_equal(mask, np.array(golden["mask_truncated_completions"], bool))
    assert mask.any(axis=1).sum() == 6
    for result in golden["results"]:
        limits = {name: golden[name] for name in ("max_completion_length", "epsilon", "epsilon_high")}
        config = Config(**limits, **result["settings"], importance_sampling_cap=None)

        def total(logp, config=config):
            given = logp, old, old, reference if config.beta else None, advantages, mask
            losses, values = token_losses(*given, config)
            weights = token_weights(mask, config.loss_type, config.max_completion_length)
            return jnp.sum(weights * losses), values

        (loss, values), gradient = jax.value_and_grad(total, has_aux=True)(logp)
        assert float(loss) == pytest.approx(result["loss"], abs=1e-6), result["settings"]
        np.testing.assert_allclose(gradient, result["gradient"], atol=1e-6, err_msg=str(result["settings"]))
        if config.beta:
            assert float(values["kl"].sum() / mask.sum()) == pytest.approx(result["metrics"]["kl"], abs=1e-6)
