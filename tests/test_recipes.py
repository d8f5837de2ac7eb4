"""The published recipes: they load, plan, fit the GPU they name, and twins differ where they must and nowhere else."""

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest
from huggingface_hub import constants
from qerl_kernels.gpu import H200

from qerl_jax.checkpoint import assets
from qerl_jax.config import Config, load, to_mapping
from qerl_jax.config.foreign import FOREIGN
from qerl_jax.config.values import coerce
from qerl_jax.data.presets import PRESETS
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.dry_run import absent_datasets
from qerl_jax.run.memory import memory_report
from qerl_jax.train import main

ROOT = Path(__file__).parent.parent
SHAPES = ROOT / "tests" / "data" / "qwen2.5_configs"
SIZES = ("3b", "7b", "14b", "32b")
TWINS = [(dataset, size) for dataset in ("gsm8k", "bigmath") for size in SIZES]
MUST_DIFFER = {"weight_format", "learning_rate", "sigma_start", "sigma_end", "output_dir"}


def recipe(name: str) -> Config:
    return load(assets.find_config(name))


SCRIPTS = json.loads((ROOT / "tests" / "golden" / "release_scripts.json").read_text())["scripts"]
OF_SCRIPT = {f"dapo_qwen2.5-{s}_{f}_single_gpu.sh": f"release-{s}-{f}" for s in SIZES for f in ("nvfp4", "bf16")}
OF_SCRIPT["llama3.1_8b_nemotron.sh"] = "release-llama3.1-8b-nvfp4"
BASELINES = [(size, stored) for size in ("3b", "7b") for stored in ("nf4", "mxfp4")]  # in the paper's GSM8K tables
MORE_DATA = [f"release-{name}-7b-nvfp4" for name in ("dapomath", "miromind", "codeforces")]
SMALL = ("nvfp4", "bf16", "nf4")
FIELDS = typing.get_type_hints(Config)


def test_every_recipe_is_there():
    papers = [f"{d}-{s}-{f}" for d, s in TWINS for f in ("nvfp4", "bf16")]
    papers += [f"gsm8k-{size}-{stored}" for size, stored in BASELINES]
    papers += [f"gsm8k-0.5b-{stored}" for stored in SMALL]  # not the paper's
    assert assets.recipes() == sorted(["tiny", *papers, *OF_SCRIPT.values(), *MORE_DATA])
    assert OF_SCRIPT.keys() == SCRIPTS.keys()


@pytest.mark.parametrize("script", OF_SCRIPT)
def test_recipes_are_the_released_scripts(script):
    """Every flag of the script is the field of that name with that value, or a field of another name, or has a reason
    in `config/foreign.py`.
    """
    config, flags = (
        recipe(OF_SCRIPT[script]),
        {flag.replace("-", "_"): value for flag, value in SCRIPTS[script].items()},
    )
    for name, value in flags.items():
        if name not in FIELDS:
            assert name in FOREIGN, name
        elif name not in ("output_dir", "vllm_gpu_memory_utilization"):  # the recipes sample without vLLM
            hint = FIELDS[name]
            expected = value == "True" if hint is bool else coerce(name, value, hint)
            assert getattr(config, name) == expected, name
    completions = int(flags["per_device_train_batch_size"]) * int(flags["gradient_accumulation_steps"])
    assert config.batch_size == completions and config.train_norms == (flags["ln"] == "True")
    if qwen := re.fullmatch(r"dapo_qwen2.5-(\d+b)_(\w+)_single_gpu.sh", script):
        size, stored = qwen.groups()
        assert (config.model, config.weight_format) == (f"Qwen/Qwen2.5-{size.upper()}-Instruct", stored)
    assert "sigma_start" in flags or (config.sigma_start, config.sigma_end) == (0, 0)
    assert config.max_steps == -1 and config.importance_sampling_cap is None


def test_the_largest_released_script_fits_80_gb():
    config = recipe("release-32b-nvfp4")
    changes = {"model": str(SHAPES / "Qwen2.5-32B"), "matmul_kernel": "mosaic_gpu"}
    memory = memory_report(dataclasses.replace(config, **changes), 80e9, gpu=H200).memory
    assert memory.rollout.sequences == config.batch_size
    assert max(memory.rollout_peak, memory.update_peak) < 0.95 * 80e9


@pytest.mark.parametrize("name", MORE_DATA)
def test_other_datasets_of_the_7b_script(name):
    """DATA_NAME sets dataset and lengths: the script's 1024 and 8192 stay where it names neither GSM8K nor BigMath."""
    ours, base = to_mapping(recipe(name)), to_mapping(recipe("release-7b-nvfp4"))
    changed = {key: ours[key] for key in ours if ours[key] != base[key]}
    dataset = name.split("-")[1]
    lengths = {"max_prompt_length": 1024, "max_completion_length": 8192}
    assert [changed.pop(name) for name in ("prompt_format", "reward_funcs", "reward_weights")] == [None] * 3
    assert changed == lengths | {"dataset": [dataset], "output_dir": f"runs/{name}"}
    assert with_rewards(recipe(name)).reward_funcs == tuple(PRESETS[dataset].rewards)


LLAMA_8B = {  # Llama 3.1, arXiv 2407.21783, table 3, and the published config.json
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip


def test_the_llama_recipe_takes_a_llama(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    flags = ["--model", str(tmp_path), "--output-dir", str(tmp_path / "run"), "--dry-run"]
    assert main(["--config", "release-llama3.1-8b-nvfp4", *flags]) == 0
    said = capsys.readouterr().out
    assert "8,030.3 M parameters" in said
    absent = list(absent_datasets(recipe("release-llama3.1-8b-nvfp4"), Path(constants.HF_HUB_CACHE)))
    assert said.count("is not on this machine") == len(absent) and all(line in said for line in absent)


@pytest.mark.parametrize(("size", "stored"), BASELINES)
def test_baselines_differ_in_format_and_noise_alone(size, stored):
    ours, base = (to_mapping(recipe(f"gsm8k-{size}-{name}")) for name in (stored, "nvfp4"))
    changed = {key: ours[key] for key in ours if ours[key] != base[key]}
    noise = {"sigma_start": 0.0, "sigma_end": 0.0}
    assert changed == noise | {"weight_format": stored, "output_dir": f"runs/gsm8k-{size}-{stored}"}


@pytest.mark.parametrize("stored", SMALL)
def test_recipes_of_half_a_billion_parameters(stored):
    """They differ in the weights' format alone, and pay for correctness alone."""
    ours, base = (to_mapping(recipe(f"gsm8k-0.5b-{name}")) for name in (stored, "nvfp4"))
    own = {"weight_format": stored, "output_dir": f"runs/gsm8k-0.5b-{stored}"}
    assert ours == base | own
    assert (ours["sigma_start"], ours["sigma_end"], ours["reward_funcs"]) == (0, 0, ["answer"])


def test_every_recipe_names_learning_rate_and_noise():
    """Defaults of both are no recipe's: a change of them changes no published run."""
    for name in assets.recipes():
        words = {line.split(":")[0] for line in assets.find_config(name).read_text().splitlines()}
        assert {"learning_rate", "sigma_start", "sigma_end"} <= words, name


@pytest.mark.parametrize(("dataset", "size"), TWINS)
def test_twins_differ_only_where_they_must(dataset, size):
    nvfp4, bf16 = (to_mapping(recipe(f"{dataset}-{size}-{stored}")) for stored in ("nvfp4", "bf16"))
    assert {key for key in nvfp4 if nvfp4[key] != bf16[key]} == MUST_DIFFER
    assert (nvfp4["weight_format"], bf16["weight_format"]) == ("nvfp4", "bf16")
    assert (bf16["sigma_start"], bf16["sigma_end"]) == (0, 0)


@pytest.mark.parametrize(("dataset", "size"), TWINS)
@pytest.mark.parametrize("stored", ["nvfp4", "bf16"])
def test_values_are_the_papers(dataset, size, stored):
    config = recipe(f"{dataset}-{size}-{stored}")
    group, iterations, length = {"gsm8k": (8, 4, 4096), "bigmath": (16, 1, 8192)}[dataset]
    assert (config.num_generations, config.num_iterations, config.max_completion_length) == (group, iterations, length)
    assert (config.batch_size, config.lora_rank, config.epsilon, config.epsilon_high) == (128, 32, 0.2, 0.28)
    assert config.learning_rate == {"nvfp4": 1e-5, "bf16": 5e-6}[stored]
    if stored == "nvfp4":
        assert (config.sigma_start, config.sigma_end, config.num_stages) == (1e-2, 5e-4, 10)
    assert config.output_dir == f"runs/{dataset}-{size}-{stored}" and config.dataset == (dataset,)
    assert config.model == f"Qwen/Qwen2.5-{size.upper()}-Instruct"
    assert with_rewards(config).reward_funcs == tuple(PRESETS[dataset].rewards)


@pytest.mark.parametrize(
    ("dataset", "size", "stored"),
    [("gsm8k", "3b", "bf16"), ("gsm8k", "7b", "nvfp4"), ("bigmath", "14b", "nvfp4"), ("bigmath", "32b", "bf16")],
)
def test_recipes_fit_the_gpu_that_they_name(dataset, size, stored):
    config, limit = recipe(f"{dataset}-{size}-{stored}"), 141e9 if size == "32b" else 80e9
    changes = {"model": str(SHAPES / f"Qwen2.5-{size.upper()}"), "matmul_kernel": "mosaic_gpu"}
    planned = memory_report(dataclasses.replace(config, **changes), limit, gpu=H200)
    memory = planned.memory
    assert memory.evaluation.sequences >= 8
    assert memory.weights + max(memory.rollout.cache, memory.evaluation.cache) < 0.95 * limit
    assert max(memory.rollout.cache, memory.evaluation.cache) <= config.rollout_memory_gb * 1e9
    peak = max(memory.rollout_peak, memory.update_peak, memory.evaluation_peak)
    assert peak < 0.95 * limit
    if memory.rollout.sequences < config.batch_size:  # sequences wait for memory: then the card is made use of
        assert peak > 0.3 * limit
    assert planned.memory.rollout.sequences >= 8
