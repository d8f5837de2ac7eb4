"""Config: YAML and command line in, errors that name the field and both values."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

from qerl_jax.checkpoint import assets
from qerl_jax.config import FREE_ON_RESUME, Config, ConfigError, differences, dump, load, to_mapping
from qerl_jax.data.files import DataError
from qerl_jax.rl.micro_batches import PackShape
from qerl_jax.rl.plan import UpdatePlan, out_of_memory
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.recorder import checkpoint_is_due
from qerl_jax.train import parse


def test_round_trip_through_yaml(tmp_path):
    """Texts stay texts, whatever they look like."""
    texts = {"model": "010", "adapter": "1e5", "system_prompt": "null", "prompt_column": "yes", "output_dir": "1:30"}
    config = Config(lora_target_modules=("q_proj", "v_proj"), learning_rate=3e-5, delta=2.0, top_p=0.9, **texts)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(path) == config


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            "learning-rate: 1e-5\nsigma_start: 1e-2\nsigma_end: 1.0e-04",
            {"learning_rate": 1e-5, "sigma_start": 1e-2, "sigma_end": 1e-4},
        ),
        ("max_steps: 1e2\nlora_alpha: 16", {"max_steps": 100, "lora_alpha": 16.0}),
        ("seed: 010\nsave_steps: '7'\nbeta: +.5", {"seed": 10, "save_steps": 7, "beta": 0.5}),
        ("model: 010\nsystem_prompt: 3.10\nadapter: yes", {"model": "010", "system_prompt": "3.10", "adapter": "yes"}),
        ("train_norms: True\nadapter: null\nsystem_prompt:", {"train_norms": True}),
        ("dataset: math", {"dataset": ("math",)}),
        (
            "dataset: [math, a.jsonl]\nreward_columns: level",
            {"dataset": ("math", "a.jsonl"), "reward_columns": ("level",)},
        ),
        ("report_to: none", {"report_to": ()}),
        ("eval_dataset: none", {"eval_dataset": None}),
        ("compilation_cache_dir: null", {"compilation_cache_dir": None}),
        ("report_to: [none]\nlora_dropout: 0.0\nuse_vllm: false\nrepetition_penalty: 1.0", {}),
        ("", {}),
    ],
)
def test_yaml_is_read_as_written(tmp_path, text, values):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load(path)
    assert config == Config(**values)
    assert all(type(getattr(config, name)) is type(value) for name, value in values.items())


def test_numbers_of_numpy_are_numbers(tmp_path):
    config = Config(seed=np.arange(4)[3], learning_rate=np.float32(0.5))
    assert (type(config.seed), type(config.learning_rate)) == (int, float)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == Config(seed=3, learning_rate=0.5)
    with pytest.raises(ConfigError, match="learning_rate must be finite"):
        Config(learning_rate=np.float32("nan"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("save_steps", "1:30", "must be a number, got '1:30'"),
        ("learning_rate", "1_0", "must be a number, got '1_0'"),
        ("seed", "0x10", "must be a number"),
        ("learning_rate", "1e-400", "must be 0 or at least 1.2e-38"),
        ("temperature", "1e-320", "must be 0 or at least 1.2e-38"),
        ("delta", "1e400", "must be at most"),
        ("learning_rate", ".nan", "must be a number"),
        ("max_steps", "1.5", "must be of type int, got '1.5'"),
        ("seed", "2147483648", "must be at most 2147483647"),
    ],
)
def test_a_number_that_would_become_another_is_refused(field, value, words):
    """As an argument; `tools/hostile_inputs.py` has many more, as flags and in files."""
    with pytest.raises(ConfigError, match=re.escape(f"{field} {words}")):
        Config(**{field: value})


def test_limits_that_are_taken_and_those_that_are_not():
    """At the bound itself."""
    bounds = {"epsilon_high": 0.25, "delta": 1.25}
    with pytest.raises(ConfigError, match=r"delta 1\.25 must exceed the upper clip 1 \+ 0\.25"):
        Config(**bounds)
    with pytest.raises(ConfigError, match=r"importance_sampling_floor 2\.0 must be below importance_sampling_cap 2\.0"):
        Config(importance_sampling_floor=2.0, importance_sampling_cap=2.0)
    Config(loss_type="cispo", epsilon_high=1.0)
    with pytest.raises(ConfigError, match=r"epsilon_high 0\.99 would cap the ratio"):
        Config(loss_type="cispo", epsilon_high=0.99)
    Config(sigma_start=1e-2, sigma_end=5e-4, num_stages=3)
    Config(sigma_start=1e-2, sigma_end=5e-4, num_stages=2, noise_formula="paper")
    assert Config(seed=2**31 - 1).seed == 2**31 - 1
    with pytest.raises(ConfigError, match="seed must be at most 2147483647, got 2147483648"):
        Config(seed=2**31)
    Config(overlong_buffer=64, max_completion_length=64)
    with pytest.raises(ConfigError, match="overlong_buffer 65 exceeds max_completion_length 64"):
        Config(overlong_buffer=65, max_completion_length=64)
    Config(rollout_backend="vllm", temperature=0.01, eval_temperature=0.01, min_p=0.1, top_p=1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-320, 2**63, True, [1], None])
def test_a_value_of_python_that_is_no_such_number(value):
    with pytest.raises(ConfigError, match=r"^seed must be"):
        Config(seed=value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1", ["unknown field 'lerning_rate'; did you mean 'learning_rate'?"]),
        ("seed: 1\nlora-rank: 2\nlora_rank: 2", ["'lora_rank' is given twice, in lines 2 and 3"]),
        ("lora_dropout: 0.1", ["lora_dropout is a name of TRL, Unsloth, no field here: there is no dropout"]),
        ("loss_type: ppo", ["loss_type", "'ppo'", "dapo"]),
        ("max_steps: many", ["max_steps", "'many'"]),
        ("max_steps: 0", ["max_steps", "0", "num_train_epochs"]),
        ("train_norms: 1", ["train_norms", "1"]),
        ("temperature: 0", ["temperature", "0"]),
        ("batch_size: 12", ["num_generations 8", "batch_size 12"]),
        ("tokens_per_micro_batch: 0", ["tokens_per_micro_batch must be above 0"]),
        (
            "{reward_funcs: [answer], reward_weights: [2, 0.2]}",
            ["1 reward_funcs", "2 reward_weights: give each one, or reward_weights None"],
        ),
        ("dataset: []", ["dataset", "empty"]),
        ("dataset: {a: 3}", ["dataset must be of type str"]),
        ("dataset: [math, gsm8k, math]", ["dataset names 'math' twice: weigh it by dataset_weights"]),
        ("{reward_funcs: [answer, code, answer]}", ["reward_funcs names 'answer' twice"]),
        ("{rollout_backend: vllm, dtype: float32}", ["dtype 'float32' contradicts rollout_backend 'vllm'"]),
        ("{rollout_backend: vllm, temperature: 0.001}", ["temperature 0.001 contradicts rollout_backend 'vllm'"]),
        (
            "{rollout_backend: vllm, min_p: 0.1, top_p: 0.5}",
            ["min_p 0.1 with top_p 0.5 contradicts rollout_backend 'vllm'"],
        ),
        ("{rollout_backend: vllm, vllm_gpu_memory_utilization: 0.95}", ["must lie in (0, 0.9], got 0.95"]),
        ("vllm_gpu_memory_utilization: 0.5", ["0.5 has no meaning for rollout_backend 'jax'"]),
        ("warmup_ratio: 1", ["warmup_ratio must lie in [0, 1), got 1.0"]),
        ("overlong_buffer: 5000", ["overlong_buffer 5000 exceeds max_completion_length 1024"]),
        ("{dataset: [math, gsm8k], dataset_weights: [1]}", ["2 dataset", "1 dataset_weights"]),
        ("{dataset: [math, gsm8k], dataset_weights: [1, 0]}", ["dataset_weights", "0", "'gsm8k'"]),
        ("overlong_prompts: cut", ["overlong_prompts", "'cut'", "truncate_left"]),
        ("{lora_rank: 0, train_norms: true}", ["lora_rank must be at least 1, got 0"]),
        ("weight_format: full", ["weight_format 'full' is not one of"]),
        ("lora_target_modules: [q_proj, x_proj]", ["x_proj", "down_proj"]),
        ("{prompt_format: boxed, system_prompt: Be brief.}", ["'boxed'", "'Be brief.'"]),
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


def test_another_programs_argument_of_python_is_answered():
    for name, value in {"lora_r": 8, "lora-r": 8}.items():
        with pytest.raises(ConfigError, match=r"^lora_r is a name of TRL: use lora_rank$"):
            Config(**{name: value})
    with pytest.raises(ConfigError, match=r"^unknown field 'lerning_rate'; did you mean 'learning_rate'"):
        dataclasses.replace(Config(), lerning_rate=1)
    assert Config(lora_dropout=0.0, fp16=False, report_to="none", trust_remote_code=None) == Config()
    assert Config(bf16=True, logging_steps=10, log_completions=True, gradient_checkpointing=True) == Config()
    assert str(inspect.signature(Config)).startswith("(model: 'str' = '',")


def test_epochs_make_the_steps_of_trl():
    """Optimizer updates that TRL's sampler and transformers' Trainer come to, by `tools/make_trl_goldens.py`."""
    recorded = json.loads((Path(__file__).parent / "golden" / "trl_epochs.json").read_text())
    assert len(recorded["runs"]) > 5
    for run in recorded["runs"]:
        config = Config(**run["config"]).with_max_steps(run["problems"])
        assert config.max_steps == run["updates"], run
        assert config.num_rollouts == -(-run["updates"] // run["config"]["num_iterations"])


@pytest.mark.parametrize(
    ("given", "positions", "found"), [(None, 4096, 512), (None, 1400, 376), (None, 1024, 1), (600, 1400, 600)]
)
def test_the_default_length_of_prompts_fits_the_model(given, positions, found):
    config = Config(max_prompt_length=given, max_completion_length=1024).with_max_prompt_length(positions)
    assert config == Config(max_prompt_length=found, max_completion_length=1024)


def test_given_steps_count_and_epochs_need_a_rollout_of_problems():
    given = Config(max_steps=7, num_train_epochs=3, num_iterations=4)
    assert given.with_max_steps(10**6) is given and given.num_rollouts == 2
    whole = Config(batch_size=16, num_generations=8, num_iterations=2).with_max_steps(7)
    assert (whole.max_steps, whole.num_rollouts) == (6, 3)  # whole rollouts of two, the seventh is left over
    with pytest.raises(ConfigError, match="31 problems are fewer than the 32 of one rollout"):
        Config().with_max_steps(31)
    with pytest.raises(ConfigError, match=r"num_train_epochs 1\.0 needs the number of problems"):
        _ = Config().num_rollouts


@pytest.mark.parametrize(("save_steps", "num_iterations"), [(1, 4), (3, 1), (4, 4), (6, 4), (50, 3)])
def test_checkpoints_are_due_after_the_rollout_whose_update_trl_saves_at(save_steps, num_iterations):
    """TRL saves at each update that is a multiple of save_steps, and at the last one."""
    config = Config(max_steps=60, save_steps=save_steps, num_iterations=num_iterations)
    saved = {update for update in range(1, 61) if update % save_steps == 0 or update == 60}
    expected = {-(-update // num_iterations) for update in saved}
    assert {step for step in range(1, config.num_rollouts + 1) if checkpoint_is_due(step, config)} == expected


def test_rewards_come_from_the_dataset_unless_named():
    def rewards(**fields):
        config = with_rewards(Config(**fields))
        return dict(zip(config.reward_funcs, config.reward_weights, strict=True))

    assert rewards() == {"answer": 1.0}
    assert rewards(dataset=("bigmath", "math")) == {"math_verify": 1.0}
    assert rewards(dataset="dapomath", reward_funcs=("answer", "strict_format")) == {"answer": 1, "strict_format": 1}
    assert rewards(reward_funcs="answer", reward_weights=[3]) == {"answer": 3}
    with pytest.raises(ConfigError, match=r"reward_weights \[1.0\] without reward_funcs"):
        rewards(reward_weights=[1])
    with pytest.raises(DataError, match="name reward_funcs"):
        rewards(dataset=("gsm8k", "dapomath"))
    with pytest.raises(DataError, match="did you mean 'gsm8k'"):
        rewards(dataset="gsm9k")


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load("nowhere.yaml")


def test_command_line_over_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: m\nlearning_rate: 1e-4\nmax_steps: 7\nreport_to: wandb\n")
    sets = [
        "--dataset", "math", "gsm8k:/a/b", "--dataset-weights", "1", "2.5", "--system-prompt=--x", "--delta", "None",
    ]  # fmt: skip
    config = parse(["--config", str(path), "--max-steps", "9", "--lora_rank=4", "--report_to", "none", *sets])
    expected = {"model": "m", "learning_rate": 1e-4, "max_steps": 9, "lora_rank": 4, "system_prompt": "--x"}
    assert config == Config(dataset=("math", "gsm8k:/a/b"), dataset_weights=(1.0, 2.5), **expected)


@pytest.mark.parametrize(
    ("file", "argv", "fields"),
    [
        ("reward_funcs: [answer, dapo]\nreward_weights: [2, 1]", "--reward-funcs code", {"reward_weights": None}),
        (
            "reward_funcs: [answer, dapo]\nreward_weights: [2, 1]",
            "--reward-weights 3 1 --reward-funcs code dapo",
            {"reward_weights": (3, 1)},
        ),
        ("dataset: [math, gsm8k]\ndataset_weights: [2, 1]", "--dataset amc23 math", {"dataset_weights": None}),
        ("prompt_format: boxed", "--system-prompt=Think.", {"prompt_format": None, "system_prompt": "Think."}),
        ("system_prompt: Think.", "--prompt-format boxed", {"prompt_format": "boxed", "system_prompt": None}),
        ("max_steps: 7", "--num-train-epochs 2", {"max_steps": -1}),
    ],
)
def test_a_flag_replaces_what_depends_on_the_files_own_setting(tmp_path, file, argv, fields):
    path = tmp_path / "config.yaml"
    path.write_text(file)
    config = parse(["--config", str(path), *argv.split()])
    assert {name: getattr(config, name) for name in fields} == fields


def test_recipes_by_name_and_by_path(tmp_path, monkeypatch):
    """A file first, then a bundled recipe; with neither, the nearest names, where there are any."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a run's, for one
    assert parse(["--config", "tiny"]) == load(assets.config_directory() / "tiny.yaml")
    (tmp_path / "tiny").rmdir()
    (tmp_path / "tiny").write_text("model: mine\n")
    assert parse(["--config=tiny"]).model == "mine"
    for name, hint in {
        "tinny": "did you mean tiny?",
        "gsm8k-7b": "did you mean gsm8k-7b-nf4 or gsm8k-7b-bf16 or gsm8k-7b-nvfp4?",
        "mine.yaml": "python -m qerl_jax.train --help names all",
    }.items():
        with pytest.raises(
            ConfigError, match=re.escape(f"{name} does not exist, nor a bundled recipe of that name; {hint}")
        ):
            parse(["--config", name])


def test_command_line_defaults():
    assert parse([]) == load(assets.find_config("tiny"))
    assert parse(["--seed", "3"]) == dataclasses.replace(load(assets.find_config("tiny")), seed=3)
    assert parse(["--model", "m"]) == Config(model="m")


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "The defaults shown are those of the recipe tiny;" in " ".join(text.split())
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


def test_a_checkpoint_of_another_version_is_not_resumed():
    theirs = to_mapping(Config(model="m")) | {"sharpness": 3}
    del theirs["adam_beta2"]
    assert differences(Config(model="m"), theirs) == ["adam_beta2: None -> 0.99", "sharpness: 3 -> None"]
