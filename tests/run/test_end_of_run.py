"""The adapter that a run leaves behind."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from helpers import assert_trees_equal, randomized
from rich.console import Console

from qerl_jax.config import Config
from qerl_jax.io.load import load_policy
from qerl_jax.rl.state import init_state
from qerl_jax.run import lifecycle
from qerl_jax.run.prepare import Run
from qerl_jax.run.recorder import Recorder

ADAPTER = Path(__file__).parents[1] / "golden" / "adapter_with_norms"


def bare(kind: type, **attributes: Any) -> Any:
    """An object with these attributes alone, in place of one that its constructor would make."""
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def test_norms_that_were_imported_are_exported_though_not_trained(tmp_path, tiny_dir, monkeypatch):
    """What the run trained on, evaluated and leaves is one policy."""
    policy = load_policy(tiny_dir, dtype=jnp.float32, adapter=ADAPTER)
    lora = policy.lora_config
    config = Config(
        model=str(tiny_dir),
        max_steps=1,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_target_modules=lora.target_modules,
        output_dir=str(tmp_path),
    )
    state = init_state(policy, config)
    state = state.replace(step=jnp.int32(1), lora=randomized(policy, 0).lora)
    for name in ("read_metrics", "write_plots", "write_report", "summary_table"):
        monkeypatch.setattr(lifecycle, name, lambda *_: None)
    idle = types.SimpleNamespace(close=lambda: None)
    phases = types.SimpleNamespace(totals={}, overdue=0, beat=lambda _: None)
    evaluations = types.SimpleNamespace(all=dict)
    recorder = bare(Recorder, checkpoints=idle, curves=idle, phases=phases, stopped=0, evaluations=evaluations)
    console = Console(quiet=True)
    run = bare(Run, config=config, directory=tmp_path, console=console, eval_problems=[], policy=policy)
    lifecycle.finish_run(run, recorder, state)
    left = load_policy(tiny_dir, dtype=jnp.float32, adapter=tmp_path / "adapter")
    assert_trees_equal(left.norms, policy.norms)
    assert_trees_equal(left.lora, state.lora)
