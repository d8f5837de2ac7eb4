"""The published recipes: they load, plan, fit the GPU they name, and twins differ where they must and nowhere else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from qerl_kernels import dispatch

from qerl_jax.config import Config, load, to_mapping
from qerl_jax.data.presets import PRESETS
from qerl_jax.io import assets
from qerl_jax.rl import plan
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.memory import memory_report

SHAPES = Path(__file__).parent / "data" / "qwen2.5_configs"
SIZES = ("3b", "7b", "14b", "32b")
TWINS = [(dataset, size) for dataset in ("gsm8k", "bigmath") for size in SIZES]
MUST_DIFFER = {"weight_format", "learning_rate", "sigma_start", "sigma_end", "output_dir"}


def recipe(name: str) -> Config:
    return load(assets.find_config(name))


def test_every_recipe_is_there():
    assert assets.recipes() == sorted(["tiny", *(f"{d}-{s}-{f}" for d, s in TWINS for f in ("nvfp4", "bf16"))])


@pytest.mark.parametrize(("dataset", "size"), TWINS)
def test_twins_differ_only_where_they_must(dataset, size):
    nvfp4, bf16 = (to_mapping(recipe(f"{dataset}-{size}-{stored}")) for stored in ("nvfp4", "bf16"))
    assert {key for key in nvfp4 if nvfp4[key] != bf16[key]} == MUST_DIFFER
    assert (nvfp4["weight_format"], bf16["weight_format"]) == ("nvfp4", "bf16")
    assert (bf16["sigma_start"], bf16["sigma_end"]) == (0, 0)


@pytest.mark.parametrize(("dataset", "size"), TWINS)
@pytest.mark.parametrize("stored", ["nvfp4", "bf16"])
def test_values_are_the_papers_and_fit_the_gpu(dataset, size, stored, monkeypatch):
    config = recipe(f"{dataset}-{size}-{stored}")
    group, iterations, length = {"gsm8k": (8, 4, 4096), "bigmath": (16, 1, 8192)}[dataset]
    assert (config.num_generations, config.num_iterations, config.max_completion_length) == (group, iterations, length)
    assert (config.batch_size, config.lora_rank, config.epsilon, config.epsilon_high) == (128, 32, 0.2, 0.28)
    assert config.learning_rate == {"nvfp4": 1e-5, "bf16": 5e-6}[stored]
    if stored == "nvfp4":
        assert (config.sigma_start, config.sigma_end, config.num_stages) == (1e-2, 5e-4, 10)
    assert config.output_dir == f"runs/{dataset}-{size}-{stored}" and config.dataset == (dataset,)
    assert config.model == f"Qwen2.5-{size.upper()}-Instruct"
    assert with_rewards(config).reward_funcs == tuple(PRESETS[dataset].rewards)
    limit = 141e9 if (size, stored) == ("32b", "bf16") else 80e9
    monkeypatch.setattr(plan, "device_bytes", lambda: limit)  # the update is planned for the GPU that the recipe names,
    monkeypatch.setattr(dispatch, "missing_for_mosaic_gpu", lambda dtype: None)  # where the kernels run
    planned = memory_report(dataclasses.replace(config, model=str(SHAPES / f"Qwen2.5-{size.upper()}")))
    memory = planned.memory
    assert memory.eval_sequences >= 8
    assert memory.weights + max(memory.cache, memory.eval_cache) < 0.95 * limit
    assert max(memory.cache, memory.eval_cache) <= config.rollout_memory_gb * 1e9
    peak = max(memory.rollout, memory.update, memory.evaluation)
    assert peak < 0.95 * limit
    if memory.sequences < config.batch_size:  # sequences wait for memory: then the card is made use of
        assert peak > 0.3 * limit
    assert planned.memory.sequences >= 8
