"""The adapter that a run leaves behind."""

import os
from pathlib import Path

import jax.numpy as jnp
from helpers import assert_trees_equal, randomized

from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.safetensors import read_json
from qerl_jax.config import Config
from qerl_jax.rl.state import init_state
from qerl_jax.run.lifecycle import export_trained

ADAPTER = Path(__file__).parents[1] / "golden" / "adapter_with_norms"


def test_norms_that_were_imported_are_exported_though_not_trained(tmp_path, tiny_dir):
    """What the run trained on, evaluated and leaves is one policy."""
    policy = load_policy(tiny_dir, dtype=jnp.float32, adapter=ADAPTER)
    lora = policy.lora_config
    config = Config(
        model=str(tiny_dir), max_steps=1, lora_rank=lora.rank, lora_alpha=lora.alpha,
        lora_target_modules=lora.target_modules,
    )  # fmt: skip
    state = init_state(policy, config)
    state = state.replace(lora=randomized(policy, 0).lora)
    for name in ("notes", "README.md"):  # left where --overwrite took the adapter away
        (tmp_path / "adapter").mkdir(exist_ok=True)
        (tmp_path / "adapter" / name).write_text("mine")
    export_trained(policy.replace(source=os.path.relpath(tiny_dir)), state, tmp_path / "adapter")
    named = Path(read_json(tmp_path / "adapter" / "adapter_config.json")["base_model_name_or_path"])
    assert named.is_absolute() and named.samefile(tiny_dir)
    assert (tmp_path / "adapter" / "notes").read_text() == "mine"
    left = load_policy(tiny_dir, dtype=jnp.float32, adapter=tmp_path / "adapter")
    assert_trees_equal(left.norms, policy.norms)
    assert_trees_equal(left.lora, state.lora)
