"""Names of TRL, Unsloth and the released QeRL: none of TRL's is missing, each is answered with a field or a reason."""

import ast
import dataclasses
import enum
import functools
import inspect
import json
import math
import re
from pathlib import Path

import pytest
import yaml

from qerl_jax import train
from qerl_jax.config import Config, ConfigError, from_trl, load
from qerl_jax.config.foreign import FOREIGN, UNSUPPORTED
from qerl_jax.models.config import PROJECTIONS
from qerl_jax.train import parse

GOLDEN = Path(__file__).parent / "golden"
FIELDS = {field.name for field in dataclasses.fields(Config)}


def test_every_option_of_trl_peft_and_of_the_release_has_a_field_or_a_reason():
    """transformers' among them, the arguments of GRPOTrainer and those of `train` here."""
    recorded = json.loads((GOLDEN / "trl_fields.json").read_text())
    theirs = {name for group in ("fields", "inherited", "command", "trainer", "lora") for name in recorded[group]}
    release = json.loads((GOLDEN / "release_scripts.json").read_text())
    flags = {flag.replace("-", "_") for script in release["scripts"].values() for flag in script}
    defaults = {name for fields in release["fields"].values() for name in fields}
    assert len(theirs) > 250 and len(flags) == 40 and len(defaults) > 50  # 38 flags, and two of the 32B scripts alone
    assert theirs | flags | defaults <= FIELDS | FOREIGN.keys()
    assert inspect.signature(train.train).parameters.keys() - FIELDS <= FOREIGN.keys() | {"config"}


def test_the_table_names_fields_and_reasons():
    assert not FOREIGN.keys() & FIELDS
    for name, entry in FOREIGN.items():
        assert set(entry.fields) <= FIELDS, name
        assert entry.origin and (entry.fields or entry.note or entry.held == "*"), name


HELD = """
    {save_strategy: steps, optim: adamw_torch, disable_dropout: true, shuffle_dataset: true, use_peft: true,
    generation_kwargs: {}, callbacks: [], gradient_checkpointing_kwargs: {use_reentrant: false}, task_type: CAUSAL_LM,
    bias: none, peft_type: LORA, dataset_train_split: train, vllm_mode: colocate, bf16: true,
    dataloader_pin_memory: false, logging_steps: 7, activation_offloading: false, vllm_tensor_parallel_size: 1,
    multi_objective_aggregation: sum_then_normalize, inference_mode: false, model_revision: main,
    warmup_ratio: 0.1, do_train: true, rank_pattern: {}}
"""
ASKING = """
    {save_strategy: epoch, optim: adamw_8bit, shuffle_dataset: false, use_peft: false, generation_kwargs: {top_k: 3},
    task_type: SEQ_CLS, bias: all, peft_type: IA3, dataset_train_split: half, vllm_mode: server, bf16: false,
    init_lora_weights: gaussian, use_dora: true, warmup_steps: 0, load_in_4bit: true, callbacks: [x], log_level: info}
"""


def test_values_that_ask_for_what_holds_are_taken_and_no_others(tmp_path):
    """In a file, as flags and as arguments, of which peft and transformers have some as members of an enumeration."""
    (tmp_path / "held.yaml").write_text(HELD)
    assert load(tmp_path / "held.yaml") == Config()
    flags = [f"--{name}={value}" for name, value in yaml.safe_load(HELD).items()]
    assert parse(["--model", "m", "--bf16", *(flag for flag in flags if "bf16" not in flag)]) == Config("m")
    members = enum.Enum("Member", {"ADAMW_TORCH": "adamw_torch_fused", "CAUSAL": "CAUSAL_LM"})
    assert Config(optim=members.ADAMW_TORCH, task_type=members.CAUSAL) == Config()
    for name, value in {**yaml.safe_load(ASKING), "train_dataset": [{"question": "1"}]}.items():
        with pytest.raises(ConfigError, match=f"^{name} is a name of "):
            Config(**{name: value})


def test_what_a_script_of_trl_gives_to_train_is_answered():
    for given, words in {
        "args": "args is a name of TRL, no field here: its settings are fields of Config (docs/migration.md has a",
        "peft_config": "peft_config is a name of TRL: use lora_rank and lora_alpha and lora_target_modules (LoRA is "
        "always on, also without one",
        "callbacks": "callbacks is a name of TRL, no field here: train(config, on_step=…) calls a function",
    }.items():
        for called in (Config, functools.partial(train.train, Config("tiny"))):
            for value in (object(), *([None] if given == "peft_config" else [])):  # which trains all weights in TRL
                with pytest.raises(ConfigError, match=f"^{re.escape(words)}"):
                    called(**{given: value})
    with pytest.raises(ConfigError, match=r"^reward_weights and top_p: fields of Config, the first argument: train"):
        train.train(Config("tiny"), reward_weights=[1], top_p=0.5)
    with pytest.raises(ConfigError, match=r"^unknown argument 'reward_func'; did you mean 'reward_funcs'"):
        train.train(Config("tiny"), reward_func=len)
    theirs = dataclasses.make_dataclass("GRPOConfig", [])()
    with pytest.raises(ConfigError, match=r"^config is a GRPOConfig, not a qerl_jax\.Config: docs/migration"):
        train.train(theirs)
    with pytest.raises(ConfigError, match=r"^model must be of type str, got an object of type GRPOConfig$"):
        Config(theirs)
    with pytest.raises(
        ConfigError, match=r"^dataset must be of type str, got \{'question': '1'\}: give records to train"
    ):
        Config(dataset=[{"question": "1"}])


def test_flags_that_make_no_config_are_refused_in_python():
    for words, said in {
        "--from-trl trl.yaml": "--from-trl goes to the command: python -m qerl_jax.train --from-trl FILE > mine.yaml",
        "--dry-run": r"--dry-run goes to the command: here it is train\(config, dry_run=True\)",
        "--devices 2": "--devices goes to the command: it is no setting of a config",
    }.items():
        with pytest.raises(ConfigError, match=f"^{said}"):
            parse(["--model", "m", *words.split()])
    assert parse(["--model", "m", "--devices", "all", "--dry-run", "False"]) == Config("m")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model_name_or_path", "Qwen/Qwen2.5-3B-Instruct"], "--model-name-or-path is a name of TRL: use --model\n"),
        (
            ["--per_device_train_batch_size=8"],
            "use --batch-size (all completions of a rollout: those per device × accumulated",
        ),
        (
            ["--bf16", "0", "--lr", "1", "--lora_r=8"],
            "use --dtype (bfloat16 is the default; for False float32); --lr is a name of other programs: use",
        ),
        (["--ln", "True"], "--ln is a name of QeRL: use --train-norms\n"),
        (["--use_vllm", "True"], "use --rollout-backend (vllm;"),
        (
            ["--noise_scheduler", "False"],
            "use --sigma-start and --sigma-end (QeRL: 1e-2 and 5e-4; 0 and 0 (the default): no noise)",
        ),
        (["--max_seq_length", "2500"], "use --max-prompt-length and --max-completion-length"),
        (["--tools", "calculator.py"], "--tools is a name of other programs, no field here: no tools\n"),
        (["--num-gpus", "8"], "no field here: all GPUs of the machine are used;"),
        (["--optim", "adafactor"], "optimizer or schedule train(config, optimizer=…) (docs/research.md)\n"),
        (["--rollout-func", "mine.py:roll"], "no field here: no multi-turn rollouts\n"),
    ],
)
def test_another_programs_flag_is_answered_with_the_name_here(flags, words, capfd):
    assert train.main(flags) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: --") and words in said and said.count("\n") == 1


def test_readmes_list_of_what_is_not_supported():
    readme = (GOLDEN.parents[1] / "README.md").read_text()
    (listed,) = re.findall(r"## What is not supported\n\n(.*?)\.\n", readme, re.DOTALL)
    assert listed.replace("\n", " ").lower() == ", ".join(UNSUPPORTED).lower()


@pytest.mark.parametrize(
    ("keys", "is_trls"),
    [
        ("model_name_or_path lora-r dataloader_num_workers", True),
        ("lora_r dataloader_num_workers", True),
        ("lora_r", False),
        ("lora_r bias random_state r", False),
    ],
)
def test_a_file_of_trl_as_the_config(keys, is_trls, tmp_path):
    """The answer names the command that translates it, where most unknown names are TRL's."""
    path = tmp_path / "trl.yaml"
    path.write_text("seed: 1\nln: true\n" + "".join(f"{key}: 7\n" for key in keys.split()))
    words = r"trl\.yaml: ln is a name of QeRL: use train_norms;.* lora_r is a name of TRL: use lora_rank"
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert (f"python -m qerl_jax.train --from-trl {path}" in str(caught.value)) == is_trls


def test_values_that_turn_off_what_is_not_here_are_taken():
    flags = "--lora_dropout 0.0 --use_vllm false --fp16=False --report_to none --optim None --eval_strategy no"
    flags += " --eval-dataset none --min-p none"
    more = "--seed 3 --repetition_penalty 1.0 --tensor_parallel_size 1"
    assert parse(["--model", "m", *flags.split(), *more.split()]) == Config("m", seed=3)


@pytest.mark.parametrize(
    ("field", "theirs", "written", "ours"),
    [
        ("scale_rewards", True, "true", "group"),
        ("scale_rewards", False, "false", "none"),
        ("min_p", None, "null", 0.0),
        ("save_total_limit", None, "null", None),
    ],
)
def test_values_that_trl_writes_otherwise_are_taken(field, theirs, written, ours, tmp_path):
    """As a flag, in a file and as an argument."""
    (tmp_path / "c.yaml").write_text(f"model: m\n{field}: {written}\n")
    flags = ["--model", "m", f"--{field}", str(theirs)]
    for config in parse(flags), load(tmp_path / "c.yaml"), Config("m", **{field: theirs}):
        assert getattr(config, field) == ours


def test_all_linear_is_every_projection(tmp_path, capfd):
    """PEFT's word, as a flag, in a file and as an argument; beside other names it is none."""
    (tmp_path / "c.yaml").write_text("model: m\nlora_target_modules: all-linear\n")
    flags = ["--model", "m", "--lora-target-modules", "all-linear"]
    for config in parse(flags), load(tmp_path / "c.yaml"), Config("m", lora_target_modules="all-linear"):
        assert config.lora_target_modules == PROJECTIONS
    assert train.main([*flags, "q_proj"]) == 2
    assert "lora_target_modules ['all-linear'] are not among the projections" in capfd.readouterr().err


TRL_FILE = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
dataset_name: openai/gsm8k
eval_strategy: steps
reward_funcs: [accuracy_reward, think_format_reward, my_lib.rewards.custom]
reward_weights: [1.0, 0.5, 0.2]
learning_rate: 1.0e-5
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
max_completion_length: 1024
use_peft: true
lora_r: 32
use_vllm: true
vllm_gpu_memory_utilization: 0.4
report_to: [wandb, trackio]
max_steps: 200
warmup_steps: 10
scale_rewards: false
logging_steps: 1
dataloader_num_workers: 4
"""
TRANSLATED = {
    "model": "Qwen/Qwen2.5-7B-Instruct", "dataset": ("gsm8k",), "eval_dataset": "gsm8k", "report_to": ("wandb",),
    "reward_funcs": ("math_verify", "my_lib/rewards.py:custom"), "reward_weights": (1.0, 0.2),
    "learning_rate": 1e-5, "batch_size": 32, "max_completion_length": 1024, "lora_rank": 32, "lora_alpha": 32.0,
    "lora_target_modules": ("q_proj", "v_proj"), "max_steps": 200, "warmup_ratio": 0.05, "scale_rewards": "none",
    "epsilon_high": 0.2, "importance_sampling_cap": 3.0, "importance_sampling_mode": "sequence_mask",
    # TRL's defaults
    "seed": 42, "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta2": 0.999,
    "max_grad_norm": 1.0, "save_steps": 500, "save_total_limit": None,
}  # fmt: skip


def test_a_file_of_trl_as_a_config(tmp_path, capsys):
    """Every value by hand; what is left out is said, and the result loads."""
    (tmp_path / "trl.yaml").write_text(TRL_FILE)
    assert train.main(["--from-trl", str(tmp_path / "trl.yaml")]) == 0
    text = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(text)
    assert load(tmp_path / "mine.yaml") == Config(**TRANSLATED)
    told = [line.removeprefix("# - ") for line in text.splitlines() if line.startswith("# - ")]
    assert told == [
        "reward_funcs 'think_format_reward', of weight 0.5: no built-in reward is the same; the nearest is "
        "strict_format, which asks for an answer block, too",
        "columns that my_lib/rewards.py:custom asks for: there is no my_lib/rewards.py here; run this where trl was "
        "run, or name its file",
        "report_to trackio: tensorboard or wandb",
        "no limit of prompts: those of more than max_prompt_length tokens are dropped, by default 512 or what "
        "max_completion_length leaves of the model's max_position_embeddings",
        "vllm_gpu_memory_utilization 0.4: needs rollout_backend vllm",
        "warmup_steps 10: warmup_ratio is its share of 200 updates, of no other length",
        "use_vllm True: see rollout_backend (vllm; left out, the trainer's own engine samples)",
        "dataloader_num_workers 4: all problems are read before the first step",
        "lora_dropout 0.05 (by default): there is no dropout, whose mask the ratio would measure",
    ]


@pytest.mark.parametrize(("beta", "is_told"), [(0, False), (0.0, False), ("0.0", False), (0.04, True)])
def test_a_penalty_of_zero_has_no_estimator_to_speak_of(beta, is_told):
    _, left_out = from_trl.translate({"beta": beta})
    assert any(line.startswith("use_bias_correction_kl") for line in left_out) == is_told


@pytest.mark.parametrize(
    ("text", "fields", "told"),
    [
        (
            "lora_r: 8",
            {"weight_format": None, "prompt_column": "prompt", "answer_column": "", "system_prompt": ""},
            ("trains all weights", "a system message of this program: a prompt"),
        ),
        (  # which a run refuses
            "dataset_name: a/b\nreward_funcs: accuracy_reward",
            {"answer_column": "solution", "dataset": ("a/b",)},
            "dataset_name 'a/b': no preset, so that a run refuses it: name a file",
        ),
        (
            "use_peft: true\nload_in_4bit: true\nlora_target_modules: [all-linear]",
            {"weight_format": "nf4", "lora_target_modules": PROJECTIONS},
            "",
        ),
        (
            "use_vllm: true\nvllm_importance_sampling_clip_min: 0.5\nvllm_importance_sampling_clip_max: 2",
            {"importance_sampling_floor": 0.5, "importance_sampling_cap": 2.0},
            "",
        ),
        (
            "num_generations_eval: 4\nper_device_eval_batch_size: 16\nnum_generations: 8\nepsilon: 0.1\nbeta: 0.04",
            {"eval_num_generations": 4, "eval_batch_size": 16, "num_generations": 8}
            | {"epsilon": 0.1, "epsilon_high": 0.1, "beta": 0.04},
            "use_bias_correction_kl True (by default): see beta (the k3 estimator, without an importance weight)",
        ),
        (
            "max_prompt_length: 128\ngeneration_kwargs: {top_k: 5}\nscale_rewards: batch\nshuffle_dataset: false",
            {"max_prompt_length": 128, "overlong_prompts": "truncate_left", "top_k": 5}
            | {"scale_rewards": "batch", "data_order": "sequential", "importance_sampling_cap": None},
            "Left out:\n# - use_peft False",
        ),
        (  # it has no split for tests
            "dataset_name: open-r1/Big-Math-RL-Verified-Processed\neval_strategy: steps",
            {"dataset": ("bigmath",), "eval_dataset": None},
            "eval_strategy 'steps': name eval_dataset",
        ),
        ("warmup_steps: 10", {"warmup_ratio": 0.1}, "; until it is given the default 0.1"),
        ("warmup_steps: 7\nmax_steps: 25", {"warmup_ratio": math.nextafter(0.28, 0)}, ""),  # 0.28 · 25 is above 7
        ("warmup_steps: 3\nmax_steps: 3", {"max_steps": 3, "warmup_ratio": 0.1}, "warmup_steps 3: warmup_ratio is 3 /"),
        ("warmup_steps: 1\nmax_steps: 3\nnum_iterations: 2", {"warmup_ratio": 0.25}, "is its share of 4 updates"),
        ("warmup_steps: 0.25", {"warmup_ratio": 0.25}, ""),
        ("lr_scheduler_type: constant\nwarmup_steps: 0.5", {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}, ""),
        ("lr_scheduler_type: constant_with_warmup", {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}, ""),
        ("loss_type: cispo", {"loss_type": "cispo", "epsilon_high": None}, ""),
        ("system_prompt: s", {"system_prompt": "s"}, "**kwargs\n# - no limit of prompts"),
        ("dtype: float32\nbf16: false", {"dtype": "float32"}, ""),
        ("dtype: float32", {"dtype": "bfloat16"}, ""),
        (
            "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 0.5",
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.5},
            "",
        ),
        (
            "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2}",
            {"lr_scheduler_type": "cosine"},
            "is not one of ['cosine', 'linear', 'constant']: name one; here it is the default cosine, which ends at 0",
        ),
        (
            "min_p: 0.2\ngeneration_kwargs: {min_p: 0.1, stop: [x]}",
            {"min_p": 0.1},
            "# - generation_kwargs {'stop': ['x']}: see temperature and top_k and top_p and min_p (each setting is a",
        ),
        (
            "generation_batch_size: 64",
            {"batch_size": 8},
            "generation_batch_size 64: TRL makes updates of 8 completions from rollouts of 64; here an update has a",
        ),
        (
            "per_device_train_batch_size: 2\nsteps_per_generation: 8\nnum_processes: 2",
            {"batch_size": 32},
            "steps_per_generation 8: TRL makes updates of 4 completions from rollouts of 32; here an update has a",
        ),
        ("generation_batch_size: 32\ngradient_accumulation_steps: 4", {"batch_size": 32}, ""),
        (
            "use_peft: no\nbf16: Off\nshuffle_dataset: NO",
            {"dtype": "float32", "data_order": "sequential"},
            "use_peft False",
        ),
        ("use_peft: yes\nload_in_4bit: on\nbf16: on", {"dtype": "bfloat16", "weight_format": "nf4"}, ""),
        *(
            (f"dataset_name: openai/gsm8k\neval_strategy: {strategy}", {"eval_dataset": evaluated}, "")
            for strategy, evaluated in (("no", None), ("off", None), ("false", None), ("steps", "gsm8k"))
        ),
        ("num_processes: 4", {"batch_size": 32}, "its batch for 4 processes. Left out:"),
        ("use_vllm: true\nvllm_importance_sampling_correction: false", {"importance_sampling_cap": None}, ""),
        ("reward_funcs: trl.rewards.accuracy_reward", {"reward_funcs": ("math_verify",)}, ""),
        ("reward_funcs: [rewards.py:mine, null]", {"reward_funcs": ("rewards.py:mine",)}, "reward_funcs 'None', of"),
        (
            "reward_funcs: trl.rewards.get_soft_overlong_punishment",
            {"reward_funcs": None, "dataset": ("gsm8k",)},
            "same; the nearest is overlong, with overlong_buffer",
        ),
        (
            "reward_funcs: [accuracy_reward, accuracy_reward]\nreward_weights: [1, 0.5]",
            {"reward_funcs": ("math_verify",), "reward_weights": (1.5,)},
            "",
        ),
        ("reward_weights: [2]", {"reward_weights": (2.0,)}, "those of the functions that train(reward_funcs=…)"),
        ("seed: null\nlearning_rate:\nper_device_train_batch_size: null", {"seed": 42, "learning_rate": 1e-6}, ""),
        ("seed: 1", {}, "\n# dataset:  # to be set; left out, it is gsm8k\n# reward_funcs:  # to be set; left out"),
        ("datasets:\n- path: openai/gsm8k", {"dataset": ("gsm8k",)}, ""),
        ("dataset_name: a/b\ndatasets:\n- path: openai/gsm8k", {"dataset": ("gsm8k",)}, "'a/b': TRL reads datasets in"),
        (
            "datasets:\n- {path: openai/gsm8k, name: main, split: test}\n- {path: a/b, fraction: 2}",
            {"dataset": ("gsm8k", "a/b")},
            "# - name 'main' of datasets: a preset has its own\n"
            "# - split 'test' of datasets: no field has its meaning\n"
            "# - datasets 'a/b': no preset, so that a run refuses it: name a file as dataset, which "
            "datasets.load_dataset(…).to_json(FILE) writes, or give records to train(train_dataset=…)\n"
            "# - fraction 2 of datasets: see dataset_weights\n",
        ),
        (
            "datasets:\n- {path: json, data_files: {train: a.jsonl, test: b}, split: test, name: null}",
            {"dataset": ("b",)},
            "# - split 'test' of datasets: no field has its meaning\n",
        ),
    ],
)
def test_settings_of_trl(text, fields, told, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(text)
    (tmp_path / "mine.yaml").write_text(from_trl.from_trl(path))
    config = load(tmp_path / "mine.yaml")
    assert {name: getattr(config, name) for name in fields} == fields
    assert all(words in from_trl.from_trl(path) for words in ([told] if isinstance(told, str) else told))


_OTHER = {  # a value that a field is not set to, where no text or number will do
    "loss_type": "grpo", "importance_sampling_level": "sequence", "vllm_importance_sampling_mode": "token_mask",
    "scale_rewards": "batch", "report_to": "wandb", "lr_scheduler_type": "cosine",
    "datasets": [{"path": "openai/gsm8k"}], "lora_target_modules": ["k_proj"], "bnb_4bit_quant_type": "nvfp4",
    "reward_funcs": "a.b", "num_generations": "2", "num_generations_eval": "2", "top_p": "0.5", "min_p": "0.5",
    "adam_beta1": "0.5", "adam_beta2": "0.5", "warmup_steps": "0.5", "vllm_importance_sampling_clip_min": "0.5",
    "max_steps": "16", "bf16": False, "remove_unused_columns": True, "eval_strategy": "steps",
    "lora_modules_to_save": ["embed_tokens"],
}  # fmt: skip


@pytest.mark.parametrize("others", [{}, {"use_peft": True, "use_vllm": True, "load_in_4bit": True}])
def test_no_setting_of_trl_is_lost_in_silence(others):
    """Every name that its command takes changes the config or is told, but for values that ask for what is."""
    recorded = json.loads((GOLDEN / "trl_fields.json").read_text())
    defaults = {name: ast.literal_eval(text) for name, text in (recorded["inherited"] | recorded["fields"]).items()}
    of_earlier = ["torch_dtype", "num_processes", "max_prompt_length", "warmup_ratio"]
    defaults |= {name: None for name in (*recorded["command"], "reward_weights", *of_earlier) if name not in defaults}
    switches = {"use_peft", "use_rslora", "use_dora", "load_in_4bit", "load_in_8bit"}
    fields, told = from_trl.translate(others)
    silent = []
    for name, default in defaults.items():
        value = _OTHER.get(name, not default if isinstance(default, bool) else True if name in switches else "7")
        if name not in others:
            after, said = from_trl.translate(others | {name: value})
            if after == fields and not any(line.startswith(name) for line in set(said) - set(told)):
                silent.append(name)
    assert len(defaults) > 180
    what_holds = """
        average_tokens_across_devices activation_checkpointing activation_checkpointing_kwargs
        gradient_checkpointing_kwargs auto_find_batch_size logging_strategy logging_first_step log_on_each_node
        logging_nan_inf_filter eval_do_concat_batches dataloader_pin_memory dataloader_in_order skip_memory_metrics
        do_train gradient_checkpointing logging_steps disable_dropout ds3_gather_for_generation use_bias_correction_kl
        log_completions log_multimodal
    """
    assert silent == what_holds.split()


@pytest.mark.parametrize(("folder", "up"), [(".", ""), ("elsewhere", "../"), ("own", "")])
@pytest.mark.parametrize(
    "key",
    [
        "dataset_name: {}",
        "datasets:\n- path: json\n  data_files: {}",
        "dataset_name: a/b\ndatasets:\n- {{path: json, data_files: {{train: [{}]}}, split: train, columns: [prompt]}}",
    ],
)
def test_a_file_that_trl_reads_is_the_dataset(key, folder, up, tmp_path, monkeypatch):
    """With the columns that its reward asks for; in the working directory, or else beside the settings."""
    (tmp_path / folder).mkdir(exist_ok=True)
    for place in tmp_path, tmp_path / folder / up:
        (place / "rows.jsonl").write_text('{"prompt": "What is 2 + 3?", "answer": "5"}\n')
        (place / "rewards.py").write_text(
            "raise SystemExit\n"
            "async def mine(completions, answer, level, /, trainer_state, scale=1, *, source, log_extra=None, **_): ..."
        )
    monkeypatch.chdir(tmp_path / folder)
    (tmp_path / "trl.yaml").write_text(f"{key.format('rows.jsonl')}\nreward_funcs: rewards.mine\n")
    text = from_trl.from_trl(tmp_path / "trl.yaml" if folder == "." else Path("../trl.yaml"))
    (tmp_path / "mine.yaml").write_text(text)
    config = load(tmp_path / "mine.yaml")
    assert config.dataset == (f"{up}rows.jsonl",) and config.answer_column == "answer"
    assert config.reward_columns == ("answer", "level", "source") and config.reward_funcs == (f"{up}rewards.py:mine",)
    assert (
        "# - columns of rewards: reward_columns has" in text and "name a file" not in text and "to be set" not in text
    )


def test_defaults_of_trl_that_are_others_here():
    """As TRL has them; the rest says where to write and what to keep, or means the same."""
    recorded = json.loads((GOLDEN / "trl_fields.json").read_text())
    theirs = {name: ast.literal_eval(text) for name, text in (recorded["inherited"] | recorded["fields"]).items()}
    here = {field.name: field.default for field in dataclasses.fields(Config)}
    differ = {name: theirs[name] for name in here.keys() & theirs.keys() if theirs[name] != here[name]}
    rest = {"output_dir", "report_to", "min_p", "vllm_gpu_memory_utilization"}
    assert {name: value for name, value in differ.items() if name not in rest} == from_trl.DEFAULTS
    assert Config("m", lr_scheduler_type="constant_with_warmup").lr_scheduler_type == "constant"
    for table in from_trl._BATCH, from_trl._VLLM:
        assert {name: theirs[name] for name in table} == table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss_type: sapo", "trl.yaml: loss_type 'sapo' is not one of"),
        ("num_processes: many", "trl.yaml: num_processes must be a number, got 'many'"),
        ("a: [", "line 1 is not YAML"),
        ("reward_funcs: [a.b, c.d]\nreward_weights: [1]", "trl.yaml: 2 reward_funcs but 1 reward_weights: give each"),
        ("- a", "trl.yaml: it holds a list"),
        ("dataset_name: a.csv", "trl.yaml: dataset_name 'a.csv': there is no such file or directory, looked for in {}"),
        ("dataset_name: ./a/b", "trl.yaml: dataset_name './a/b': there is no such file or directory, looked"),
        ("datasets:\n- {path: json, data_files: here/b.json}", "datasets 'here/b.json': there is no such file or"),
        ("dataset_name: here/b", "trl.yaml: dataset_name 'here/b': there is no such file or directory, looked for in"),
    ],
)
def test_files_of_trl_that_make_no_config(text, words, tmp_path, capfd):
    path = tmp_path / "trl.yaml"
    (tmp_path / "here").mkdir()
    path.write_text(text)
    words = words.format(f"{Path.cwd()} and {tmp_path}")
    for more, said in ([], words), (["--seed", "3"], "--from-trl FILE stands alone"):
        assert train.main(["--from-trl", str(path), *more]) == 2
        error = capfd.readouterr().err
        assert said in error and error.count("\n") == 1


def test_epochs_on_the_command_line_replace_the_steps_of_the_file():
    assert parse(["--model=tiny"]) == parse(["--model", "tiny"]) != parse([])  # the bundled run is for neither
    for steps in (["--max-steps", "7"], ["--max-steps=7"], ["--max_steps", "7"], ["--max_steps=7"]):
        assert parse(["--config", "tiny", "--num-train-epochs=2", *steps]).max_steps == 7
