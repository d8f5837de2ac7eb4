"""Config: YAML and command line in, errors that name the field and both values."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from qerl_jax import train
from qerl_jax.command_line.train import parse
from qerl_jax.config import FREE_ON_RESUME, Config, ConfigError, differences, dump, load, to_mapping
from qerl_jax.data.files import DataError
from qerl_jax.io import assets
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rl.packing import PackShape
from qerl_jax.rl.plan import UpdatePlan, out_of_memory
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.recorder import checkpoint_is_due
from qerl_jax.types import Engine, Sampling


def test_round_trip_through_yaml(tmp_path):
    config = Config(model="m", lora_target_modules=("q_proj", "v_proj"), learning_rate=3e-5, delta=2.0, top_p=0.9)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(path) == config


def test_yaml_numbers_and_dashes(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("learning-rate: 1e-5\nsigma_end: 1e-4\nmax_steps: 1e2\nlora_alpha: 16\n")
    config = load(path)
    assert (config.learning_rate, config.sigma_end, config.max_steps, config.lora_alpha) == (1e-5, 1e-4, 100, 16.0)
    assert isinstance(config.max_steps, int) and isinstance(config.lora_alpha, float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1", ["unknown key 'lerning_rate'", "'learning_rate'"]),
        ("loss_type: ppo", ["loss_type", "'ppo'", "dapo"]),
        ("max_steps: many", ["max_steps", "'many'"]),
        ("max_steps: 1.5", ["max_steps", "1.5"]),
        ("max_steps: 0", ["max_steps", "0", "num_train_epochs"]),
        ("num_train_epochs: 0", ["num_train_epochs", "0"]),
        ("train_norms: 1", ["train_norms", "1"]),
        ("top_p: 0", ["top_p", "0"]),
        ("temperature: 0", ["temperature", "0"]),
        ("learning_rate: .nan", ["learning_rate", "nan"]),
        ("batch_size: 12", ["num_generations 8", "batch_size 12"]),
        ("tokens_per_micro_batch: 0", ["tokens_per_micro_batch must be above 0"]),
        ("update_memory_gb: -1", ["update_memory_gb must be above 0"]),
        ("{reward_funcs: [answer], reward_weights: [2, 0.2]}", ["1 reward_funcs", "2 reward_weights"]),
        ("reward_weights: [1]", ["reward_weights [1.0]", "without reward_funcs"]),
        ("reward_funcs: []", ["reward_funcs", "empty"]),
        ("dataset: []", ["dataset", "empty"]),
        ("dataset: 3", ["dataset", "3"]),
        ("dataset: [math, gsm8k, math]", ["dataset", "'math'", "twice"]),
        ("{dataset: [math, gsm8k], dataset_weights: [1]}", ["2 dataset", "1 dataset_weights"]),
        ("{dataset: [math, gsm8k], dataset_weights: [1, 0]}", ["dataset_weights", "0", "'gsm8k'"]),
        ("overlong_prompts: cut", ["overlong_prompts", "'cut'", "truncate_left"]),
        ("lora_rank: 0", ["lora_rank 0", "train_norms"]),
        ("lora_target_modules: []", ["lora_rank 32", "lora_target_modules"]),
        ("{weight_format: full, lora_rank: 16}", ["lora_rank 16 contradicts weight_format 'full'", "leave lora_rank"]),
        ("{weight_format: full, lora_alpha: 64}", ["lora_alpha 64.0 contradicts weight_format 'full'"]),
        ("{weight_format: full, use_rslora: true}", ["use_rslora True contradicts weight_format 'full'"]),
        ("{weight_format: full, adapter: there}", ["adapter 'there' contradicts weight_format 'full'"]),
        ("{weight_format: full, rollout_backend: vllm}", ["'vllm' contradicts weight_format 'full'"]),
        (
            "{weight_format: full, lora_target_modules: [q_proj]}",
            ["lora_target_modules ['q_proj'] contradicts weight_format 'full'"],
        ),
        ("{weight_format: full, noise_target: lora}", ["noise_target 'lora' contradicts weight_format 'full'"]),
        ("{lora_rank: 0, train_norms: true, noise_target: lora}", ["noise_target 'lora' contradicts lora_rank 0"]),
        ("noise_target: adapters", ["noise_target 'adapters'", "['norms', 'lora']"]),
        ("lora_target_modules: [q_proj, x_proj]", ["x_proj", "down_proj"]),
        ("sigma_end: 0", ["sigma_end 0"]),
        ("sigma_start: 0", ["sigma_start 0", "sigma_end 0.0005"]),
        ("num_stages: 2", ["num_stages 2", "'qerl'"]),
        ("delta: 1.1", ["delta 1.1", "0.28"]),
        ("importance_sampling_floor: 3", ["importance_sampling_floor 3", "cap 2.0"]),
        ("{importance_sampling_mode: token_mask, importance_sampling_cap: null}", ["'token_mask'", "no meaning"]),
        ("{loss_type: cispo, delta: 4}", ["delta 4", "cispo"]),
        ("{loss_type: cispo, epsilon_high: 0.28}", ["epsilon_high 0.28", "'cispo'"]),
        ("{overwrite: true, resume: auto}", ["overwrite", "'auto'"]),
        ("- a list", ["list", "mapping"]),
        ("a: [", ["not YAML"]),
    ],
)
def test_errors_name_file_field_and_values(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    for word in ["bad.yaml", *words]:
        assert word in str(error.value)


def test_one_dataset_or_several(tmp_path):
    path = tmp_path / "config.yaml"
    for text, expected in (("math", ("math",)), ("[math]", ("math",)), ("[math, a.jsonl]", ("math", "a.jsonl"))):
        path.write_text(f"dataset: {text}\n")
        assert load(path).dataset == expected
    sets = ["--dataset", "math", "gsm8k:/a/b", "--dataset-weights", "1", "2.5"]
    config = parse(["--model", "m", *sets, "--reward-columns", "level"])
    assert (config.dataset, config.dataset_weights) == (("math", "gsm8k:/a/b"), (1.0, 2.5))
    assert config.reward_columns == ("level",)
    path.write_text(dump(config))
    assert load(path) == config


def test_epochs_make_the_steps_of_trl():
    """Optimizer updates that TRL's sampler and transformers' Trainer come to, by `tools/make_trl_goldens.py`."""
    recorded = json.loads((Path(__file__).parent / "golden" / "trl_epochs.json").read_text())
    assert len(recorded["runs"]) > 5
    for run in recorded["runs"]:
        config = Config(**run["config"]).with_max_steps(run["problems"])
        assert config.max_steps == run["updates"], run
        assert config.num_rollouts == -(-run["updates"] // run["config"]["num_iterations"])


def test_given_steps_count_and_epochs_need_a_rollout_of_problems():
    given = Config(max_steps=7, num_train_epochs=3, num_iterations=4)
    assert given.with_max_steps(10**6) is given and given.num_rollouts == 2
    with pytest.raises(ConfigError, match="15 problems are fewer than the 16 of one rollout"):
        Config().with_max_steps(15)
    with pytest.raises(ConfigError, match=r"num_train_epochs 1\.0 needs the number of problems"):
        _ = Config().num_rollouts


@pytest.mark.parametrize(("save_steps", "num_iterations"), [(1, 4), (3, 1), (4, 4), (6, 4), (50, 3)])
def test_checkpoints_are_due_after_the_rollout_whose_update_trl_saves_at(save_steps, num_iterations):
    """TRL saves at each update that is a multiple of save_steps, and at the last one."""
    config = Config(max_steps=60, save_steps=save_steps, num_iterations=num_iterations)
    saved = {update for update in range(1, 61) if update % save_steps == 0 or update == 60}
    expected = {-(-update // num_iterations) for update in saved}
    assert {step for step in range(1, config.num_rollouts + 1) if checkpoint_is_due(step, config)} == expected


def test_engines_carry_every_field_that_decides_a_rollout():
    fields = {"rollout_memory_gb": 3.5, "batch_invariant": True, "kv_cache_dtype": "fp8_e4m3"}
    config = Config(model="m", eval_batch_size=5, **fields)
    expected = Engine(memory_gb=3.5, batch_invariant=True, kv_cache_dtype="fp8_e4m3")
    assert config.engine == expected
    assert config.eval_engine == dataclasses.replace(expected, slots=5)


def test_rewards_come_from_the_dataset_unless_named():
    def rewards(**fields):
        config = with_rewards(Config(**fields))
        return dict(zip(config.reward_funcs, config.reward_weights, strict=True))

    assert rewards() == {"answer": 2.0, "soft_format": 0.2}
    assert rewards(dataset=("bigmath", "math")) == {"math_verify": 1.0, "soft_format": 0.2}
    assert rewards(dataset="dapomath", reward_funcs=("answer", "strict_format")) == {"answer": 1, "strict_format": 1}
    assert rewards(reward_funcs="answer", reward_weights=[3]) == {"answer": 3}
    with pytest.raises(DataError, match="name reward_funcs"):
        rewards(dataset=("gsm8k", "dapomath"))
    with pytest.raises(DataError, match="did you mean 'gsm8k'"):
        rewards(dataset="gsm9k")


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load("nowhere.yaml")


def test_command_line_over_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: m\nlearning_rate: 1e-4\nmax_steps: 7\n")
    config = parse(
        [
            "--config",
            str(path),
            "--max-steps",
            "9",
            "--lora_rank",
            "4",
            "--reward-funcs",
            "answer",
            "--reward-weights",
            "1",
        ]
    )
    assert (config.model, config.learning_rate, config.max_steps, config.lora_rank) == ("m", 1e-4, 9, 4)
    assert config.reward_funcs == ("answer",)


def test_recipes_by_name_and_by_path(tmp_path, monkeypatch):
    """A file first, then a bundled recipe; with neither, the nearest name."""
    monkeypatch.chdir(tmp_path)
    assert parse(["--config", "tiny"]) == load(assets.config_directory() / "tiny.yaml")
    (tmp_path / "tiny").write_text("model: mine\n")
    assert parse(["--config=tiny"]).model == "mine"
    with pytest.raises(
        ConfigError, match=r"tinny does not exist, nor a bundled recipe of that name; did you mean 'tiny'"
    ):
        parse(["--config", "tinny"])


def test_command_line_defaults():
    assert parse([]) == load(assets.find_config("tiny"))
    assert parse(["--seed", "3"]) == dataclasses.replace(load(assets.find_config("tiny")), seed=3)
    assert parse(["--model", "m"]) == Config(model="m")


def test_command_line_refuses(capsys):
    assert train.main(["--config"]) == 2
    assert "--config needs a file" in capsys.readouterr().err
    assert train.main(["--model", "m", "--batch-size", "12"]) == 2
    assert capsys.readouterr().err == "error: num_generations 8 does not divide batch_size 12\n"


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in text


def test_differences_name_both_values_and_spare_free_fields():
    ours = Config(model="m", learning_rate=1e-4, output_dir="b", save_steps=3)
    theirs = to_mapping(Config(model="m", learning_rate=1e-5, output_dir="a"))
    assert differences(ours, theirs) == ["learning_rate: 1e-05 -> 0.0001"]


def test_what_an_out_of_memory_error_advises_to_change_may_change_on_resume():
    memory = {"rollout_memory_gb": 1, "update_memory_gb": 2, "tokens_per_micro_batch": 512, "logprob_chunk_size": 64}
    ours = Config(model="m", compilation_cache_dir="elsewhere", eval_batch_size=8, **memory)
    assert differences(ours, to_mapping(Config(model="m"))) == []
    advice = out_of_memory(UpdatePlan(PackShape(128, 1, 1, 128, 64, 64), 0, 0, 0, 0)).partition("; lower ")[2]
    named = set(re.findall(r"[a-z]+(?:_[a-z]+)+", advice))
    assert named and named <= FREE_ON_RESUME


def test_a_checkpoint_from_before_a_field_was_added_goes_on_with_its_default():
    theirs = to_mapping(Config(model="m"))
    for name in ("batch_invariant", "adam_beta2", "lora_target_modules"):
        del theirs[name]
    assert differences(Config(model="m"), theirs) == []
    assert differences(Config(model="m", batch_invariant=True), theirs) == ["batch_invariant: False -> True"]


def test_the_upper_clip_of_a_checkpoint_counts_by_its_value():
    """Checkpoints hold a number where a recipe now leaves the clip to the loss."""
    once = to_mapping(Config(model="m", epsilon_high=0.28))
    assert differences(Config(model="m"), once) == []
    assert differences(Config(model="m", epsilon_high=0.2), once) == ["epsilon_high: 0.28 -> 0.2"]


def test_published_recipes_load():
    for path in assets.config_directory().glob("*.yaml"):
        assert load(path).model


def test_each_group_of_settings_holds_its_fields():
    """What rollouts, evaluations and adapters get of a config, every value other than its default."""
    config = Config(
        model="x", batch_size=24, num_generations=6, max_completion_length=77, temperature=0.8, top_k=30, top_p=0.9,
        min_p=0.1, lora_rank=4, lora_alpha=9.0, use_rslora=True, lora_target_modules=("q_proj", "up_proj"),
        eval_temperature=0.3, eval_top_p=0.5, eval_num_generations=5, eval_batch_size=11, rollout_memory_gb=3.0,
        batch_invariant=True, kv_cache_dtype="fp8_e4m3", max_refill_rounds=3,
    )  # fmt: skip
    assert config.num_prompts == 4
    assert config.sampling == Sampling(77, 0.8, 30, 0.9, 0.1, 6)
    assert config.eval_sampling == Sampling(77, temperature=0.3, top_p=0.5, num_generations=5)
    assert config.lora == LoraConfig(4, 9.0, True, ("q_proj", "up_proj"))
    assert config.lora.scale == 9.0 / 2
    engine = Engine(memory_gb=3.0, batch_invariant=True, kv_cache_dtype="fp8_e4m3")
    assert config.engine == engine and config.eval_engine == dataclasses.replace(engine, slots=11)
    assert config.resampling_rounds == 0
    assert dataclasses.replace(config, dynamic_sampling=True).resampling_rounds == 3
