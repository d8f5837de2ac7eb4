"""A YAML file of TRL's command `trl grpo` (1.16: GRPOConfig, ModelConfig, the script's arguments) as a config here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl_jax.config.fields import Config, descriptions
from qerl_jax.config.files import read_yaml, to_mapping
from qerl_jax.config.foreign import FOREIGN, is_off
from qerl_jax.config.values import ConfigError, coerce
from qerl_jax.data.presets import PRESETS
from qerl_jax.messages import shown

DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "num_train_epochs": 3.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "max_completion_length": 512,
    "save_steps": 500,
    "save_total_limit": None,
}
"""TRL's values of fields that have its names and other defaults here."""
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
_LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
_VLLM = {"vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_mode": "sequence_mask"}
_RENAMED = {
    "model_name_or_path": "model",
    "lora_r": "lora_rank",
    "generation_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_generations_eval": "eval_num_generations",
    "overwrite_output_dir": "overwrite",
    "vllm_importance_sampling_cap": "importance_sampling_cap",
    "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    "vllm_importance_sampling_clip_min": "importance_sampling_floor",
    "vllm_importance_sampling_mode": "importance_sampling_mode",
}
"""Names whose value means the same here."""


def from_trl(path: Path) -> str:
    """The config as YAML, with a comment for each setting that it leaves out. Raises ConfigError for a file that cannot
    be read, or makes no config.
    """
    fields, left_out = translate(read_yaml(path))
    try:
        config = to_mapping(Config(**fields))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    lines = [f"# {path.name} of TRL, for one GPU. Left out:", *(f"# - {line}" for line in left_out or ["nothing"])]
    return "\n".join(lines) + "\n" + yaml.safe_dump({name: config[name] for name in fields}, sort_keys=False)


def translate(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a config, and a line for each setting that is not among them."""
    values = DEFAULTS | _BATCH | {name: value for name, value in given.items() if value is not None}
    left_out: list[str] = []
    fields = _model(values, left_out) | _data(values, left_out) | _optimization(values)
    for name, value in values.items():
        field = _RENAMED.get(name, name)
        if field in descriptions():
            fields[field] = value
        elif name not in FOREIGN:
            left_out.append(f"{name} {shown(value)}: no field has its meaning")
        elif not is_off(name, value):
            here, note = " and ".join(FOREIGN[name].fields), FOREIGN[name].note
            left_out.append(f"{name} {shown(value)}: " + (f"{here} ({note})" if here and note else here or note))
    return fields, left_out


def _model(values: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Weights, dtype and adapters."""
    fields: dict[str, Any] = {"model": values.pop("model_name_or_path", "")}
    dtype, is_bf16 = values.pop("torch_dtype", values.pop("dtype", "float32")), values.pop("bf16", True)
    if not is_bf16:
        fields["dtype"] = dtype
    if values.pop("use_peft", False):
        values |= {name: value for name, value in _LORA.items() if name not in values}
        if values.pop("load_in_4bit", False):
            fields["weight_format"] = values.pop("bnb_4bit_quant_type", "nf4")
    else:
        fields["weight_format"] = "full"
        left_out.append("use_peft False: without it TRL trains all weights; for LoRA remove weight_format")
        for name in (*_LORA, "use_rslora", "lora_modules_to_save", "load_in_4bit", "bnb_4bit_quant_type"):
            values.pop(name, None)
    return fields


def _data(values: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Dataset and rewards. A reward by its import path is taken to lie below the working directory."""
    fields: dict[str, Any] = {}
    names = values.pop("reward_funcs", [])
    names = [names] if isinstance(names, str) else names
    presets = {preset.hub_id.lower(): name for name, preset in reversed(PRESETS.items())}
    dataset, is_evaluated = values.pop("dataset_name", None), values.pop("eval_strategy", "no") != "no"
    if preset := presets.get(str(dataset).lower()):
        fields["dataset"] = preset
        if is_evaluated and "test" in PRESETS[preset].splits:
            fields["eval_dataset"] = preset
    else:
        if dataset is not None and Path(str(dataset)).exists():
            fields["dataset"] = str(dataset)
        else:
            left_out.append(
                f"dataset_name {shown(dataset)}: name a file as dataset, or give records to train(train_dataset=…)"
            )
        left_out += [
            "columns of the records: rewards get the prompts, those of reward_columns, and that of answer_column as "
            "`answer`: name it there if they take one",
            "a system message: the prompts go through the chat template as they are; name one as system_prompt",
        ]
        answer_column = "solution" if "accuracy_reward" in names else ""
        fields |= {"prompt_column": "prompt", "answer_column": answer_column, "system_prompt": ""}
    weights = values.pop("reward_weights", ["1"] * len(names))
    rewards: dict[str, Any] = {}
    for name, weight in zip(names, weights, strict=False):
        module, dot, function = name.rpartition(".")
        if name == "accuracy_reward":
            rewards["math_verify"] = weight
        elif dot:
            rewards[f"{module.replace('.', '/')}.py:{function}"] = weight
        else:
            left_out.append(f"reward_funcs {shown(name)}, of weight {weight}: no built-in reward is the same")
    if rewards:
        fields |= {"reward_funcs": list(rewards), "reward_weights": list(rewards.values())}
    services = values.pop("report_to", "none")
    services = [services] if isinstance(services, str) else services
    fields["report_to"] = [service for service in services if service in ("tensorboard", "wandb")]
    left_out += [
        f"report_to {service}: tensorboard or wandb"
        for service in services
        if service not in (*fields["report_to"], "none")
    ]
    return fields


def _optimization(values: dict[str, Any]) -> dict[str, Any]:
    """Batch, schedule, and what follows from other settings there."""
    per_device, accumulated = (coerce(name, values.pop(name), int) for name in _BATCH)
    values.setdefault("generation_batch_size", per_device * accumulated)
    if values.get("loss_type") != "cispo":
        values.setdefault("epsilon_high", values.get("epsilon", 0.2))
    values.pop("vllm_gpu_memory_utilization", None)  # like `use_vllm`, which is told
    if values.get("use_vllm") and values.pop("vllm_importance_sampling_correction", True):
        values |= {name: value for name, value in _VLLM.items() if name not in values}
    elif not values.get("use_vllm"):
        values["importance_sampling_cap"] = None  # TRL takes the sampler for the trainer's policy then
    kind = values["lr_scheduler_type"]
    values["lr_scheduler_type"] = kind.removesuffix("_with_warmup")
    warmup, steps = (
        coerce(name, values.get(name, silent), float) for name, silent in (("warmup_steps", 0), ("max_steps", -1))
    )
    if warmup >= 1 and steps < 0:
        return {}  # of how many is not known: `warmup_steps` is left out
    values.pop("warmup_steps", None)
    ratio = values.pop("warmup_ratio", warmup if warmup < 1 else warmup / steps)
    return {"warmup_ratio": 0.0 if kind == "constant" else ratio}  # TRL's "constant" has no warm-up
