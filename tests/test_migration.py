"""Names of TRL, Unsloth and the released QeRL: none of TRL's is missing, each is answered with a field or a reason."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from qerl_jax import train
from qerl_jax.config import Config, ConfigError, load
from qerl_jax.config.foreign import FOREIGN, UNSUPPORTED
from qerl_jax.train import parse

GOLDEN = Path(__file__).parent / "golden"
FIELDS = {field.name for field in dataclasses.fields(Config)}


def test_every_option_of_trl_and_of_the_release_has_a_field_or_a_reason():
    trl = set(json.loads((GOLDEN / "trl_fields.json").read_text())["fields"])
    release = json.loads((GOLDEN / "release_scripts.json").read_text())
    flags = {flag.replace("-", "_") for script in release["scripts"].values() for flag in script}
    defaults = {name for fields in release["fields"].values() for name in fields}
    assert len(trl) > 80 and len(flags) == 40 and len(defaults) > 50  # 38 flags, and two of the 32B scripts alone
    assert trl | flags | defaults <= FIELDS | FOREIGN.keys()


def test_the_table_names_fields_and_reasons():
    assert not FOREIGN.keys() & FIELDS
    for name, entry in FOREIGN.items():
        assert set(entry.fields) <= FIELDS, name
        assert entry.origin and (entry.fields or entry.note), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model_name_or_path", "Qwen/Qwen2.5-3B-Instruct"], "--model-name-or-path is a name of TRL: use --model;"),
        (["--per_device_train_batch_size=8"], "use --batch-size (all completions of a rollout)"),
        (["--model", "m", "--lora-r", "16"], "--lora-r is a name of TRL: use --lora-rank;"),
        (["--dataset_name", "gsm8k"], "use --dataset (a preset"),
        (
            ["--bf16", "--lr", "1", "--lora_r=8"],
            "use --dtype (bfloat16 is the default); --lora-r is a name of TRL: use",
        ),
        (["--ln", "True"], "--ln is a name of QeRL: use --train-norms;"),
        (["--use_vllm", "True"], "use --rollout-backend (vllm;"),
        (
            ["--noise_scheduler", "False"],
            "use --sigma-start and --sigma-end (QeRL: 1e-2 and 5e-4; 0 and 0 (the default): no noise)",
        ),
        (["--max_seq_length", "2500"], "use --max-prompt-length and --max-completion-length"),
        (["--tools", "calculator.py"], "--tools is a name of other programs without a counterpart: no tools;"),
        (["--num-gpus", "8"], "without a counterpart: all GPUs of the machine are used;"),
        (["--rollout-func", "mine.py:roll"], "without a counterpart: no multi-turn rollouts;"),
        (["--sync_ref_model", "True"], "--sync-ref-model is a name of TRL without a counterpart: the reference of"),
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


@pytest.mark.parametrize("key", ["lora_r", "lora-r"])
def test_another_programs_key_in_a_file(key, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(f"model: m\n{key}: 16\nln: true\n")
    words = r"trl\.yaml: lora_r is a name of TRL: use lora_rank; ln is a name of QeRL: use train_norms; docs/migration"
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_values_that_turn_off_what_is_not_here_are_taken():
    flags = "--lora_dropout 0.0 --use_vllm false --fp16=False --report_to none --optim None --eval_strategy no"
    more = "--seed 3 --repetition_penalty 1.0 --tensor_parallel_size 1"
    assert parse(["--model", "m", *flags.split(), *more.split()]) == Config("m", seed=3)


def test_truth_values_as_other_programs_write_them():
    on = ["--train-norms", "True", "--mask_truncated_completions=true", "--dynamic-sampling"]
    config = parse(["--model", "True", *on])
    assert config.train_norms and config.mask_truncated_completions and config.dynamic_sampling
    assert config.model == "True"
    off = parse(["--config", "release-7b-nvfp4", "--train_norms", "false", "--mask-truncated-completions=False"])
    assert not (off.train_norms or off.mask_truncated_completions)


def test_epochs_on_the_command_line_replace_the_steps_of_the_file():
    assert parse(["--config", "tiny"]).max_steps == 50
    assert parse(["--config", "tiny", "--num_train_epochs", "2"]).max_steps == -1
    assert parse(["--config", "tiny", "--num-train-epochs=2", "--max-steps", "7"]).max_steps == 7
