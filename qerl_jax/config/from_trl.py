"""A YAML file of TRL's command `trl grpo` (1.16: GRPOConfig, ModelConfig, the script's arguments) as a config here."""

from __future__ import annotations

import ast
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl_jax.config.fields import PROMPT_LENGTH, Config, descriptions
from qerl_jax.config.files import read_yaml, to_mapping
from qerl_jax.config.foreign import FOREIGN, is_off
from qerl_jax.config.values import ConfigError, coerce
from qerl_jax.data.files import FILE_KINDS
from qerl_jax.data.presets import PRESETS
from qerl_jax.messages import shown
from qerl_jax.rewards.outcomes import GIVEN_COLUMNS, NOT_PASSED

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
_PROCESSES = {"num_processes": 1}  # accelerate's
_ROLLOUT = ("generation_batch_size", "steps_per_generation")
_LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
_VLLM = {"vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_mode": "sequence_mask"}
_REWARDS = {"accuracy_reward": "math_verify"}
_NEAREST = {
    "reasoning_accuracy_reward": "math_verify, which reads the whole completion",
    "think_format_reward": "strict_format, which asks for an answer block, too",
    "get_soft_overlong_punishment": "overlong, with overlong_buffer",
}
"""TRL's own rewards: the same here, and similar."""
_RENAMED = {
    name: entry.fields[0]
    for name, entry in FOREIGN.items()
    if "TRL" in entry.origin and len(entry.fields) == 1 and not entry.note
}
_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}  # of YAML 1.1, which TRL reads
_OF_DATASETS = {"name": "a preset has its own", "fraction": "see dataset_weights"}
_UNSET = {"dataset": "left out, it is gsm8k", "reward_funcs": "left out, they are those of the dataset"}


def from_trl(path: Path) -> str:
    """The config as YAML, with a comment for each setting that it leaves out, and for dataset and rewards where it has
    none. Raises ConfigError for a file that cannot be read, or makes no config.
    """
    given = read_yaml(path)
    try:
        fields, left_out = translate(given, path.parent)
        config = to_mapping(Config(**fields))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    count = str(given.get("num_processes") or 1)
    lines = [
        f"# {path.name} of TRL, its batch for {count} process{'es' * (count != '1')}. Left out:",
        *(f"# - {line}" for line in left_out or ["nothing"]),
        yaml.safe_dump({name: config[name] for name in fields}, sort_keys=False).rstrip(),
        *(f"# {name}:  # to be set; {default}" for name, default in _UNSET.items() if name not in fields),
    ]
    return "\n".join(lines) + "\n"


def translate(given: Mapping[str, Any], beside: Path = Path()) -> tuple[dict[str, Any], list[str]]:
    """Fields of a config, and a line for each setting that is not among them. Relative files are looked for in the
    working directory, as TRL does, and in `beside`.
    """
    own = {name: _as_read(name, value) for name, value in given.items() if value is not None}
    values = DEFAULTS | _BATCH | _PROCESSES | own
    left_out: list[str] = []
    if isinstance(sampling := values.get("generation_kwargs"), Mapping):  # they come last in TRL, too
        values |= {name: value for name, value in sampling.items() if name in FOREIGN["generation_kwargs"].fields}
        values["generation_kwargs"] = {name: value for name, value in sampling.items() if name not in values}
    fields = _model(values, left_out) | _data(values, left_out, beside) | _optimization(values, left_out)
    for name, value in values.items():
        field, said = _RENAMED.get(name, name), f"{name} {_written(value)}{'' if name in given else ' (by default)'}"
        if field in descriptions():
            fields[field] = value
        elif name not in FOREIGN:
            left_out.append(f"{said}: no field has its meaning")
        elif not is_off(name, value):
            here, note = " and ".join(FOREIGN[name].fields), FOREIGN[name].note
            field = f"see {here}" + (f" ({note})" if note else "")
            left_out.append(f"{said}: {field if here else note}")
    return fields, left_out


def _as_read(name: str, value: Any) -> Any:
    """A value as TRL's reader of YAML takes it. The strategy "no" is a text."""
    read = _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value
    return "no" if read is False and name.endswith("_strategy") else read


def _model(values: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Weights, dtype and adapters."""
    fields: dict[str, Any] = {"model": values.pop("model_name_or_path", "")}
    named = "torch_dtype" if "torch_dtype" in values else "dtype"
    dtype, is_bf16 = values.pop(named, "float32"), values.pop("bf16", True)
    if not is_bf16:
        fields["dtype"] = dtype
    elif dtype not in ("float32", "bfloat16", "auto"):
        left_out.append(f"{named} {_written(dtype)}: bf16 is on, which is dtype bfloat16")
    if values.pop("use_peft", False):
        values |= {name: value for name, value in _LORA.items() if name not in values}
        if values.pop("load_in_4bit", False):
            fields["weight_format"] = values.pop("bnb_4bit_quant_type", "nf4")
    else:
        left_out.append("use_peft False: TRL then trains all weights; here adapters, with a larger learning_rate")
        for name in (*_LORA, "use_rslora", "lora_modules_to_save", "load_in_4bit", "bnb_4bit_quant_type"):
            if name in values:
                left_out.append(f"{name} {_written(values.pop(name))}: needs use_peft")
    return fields


def _data(values: dict[str, Any], left_out: list[str], beside: Path) -> dict[str, Any]:
    """Dataset and rewards."""
    fields: dict[str, Any] = {}
    names = values.pop("reward_funcs", [])
    names = [name.rpartition(".")[2] if name.startswith("trl.") else name for name in map(str, _listed(names))]
    files = {name: _file_of(name, beside) for name in names if "." in name}
    datasets, evaluated = _datasets(values, left_out, beside), values.pop("eval_strategy", "no")
    if datasets:
        fields["dataset"] = datasets
    if not datasets or not set(datasets) <= PRESETS.keys():
        asked = [column for file in files.values() for column in columns_of(file)]
        gold = "solution" if "accuracy_reward" in names else "answer" if "answer" in asked else ""
        fields |= {"prompt_column": "prompt", "answer_column": gold, "system_prompt": ""}
        if asked:
            fields["reward_columns"] = list(dict.fromkeys(asked))
        left_out.append(
            "columns of rewards: reward_columns has the parameters of functions whose files were found; add by hand "
            "what others need, or take from **kwargs"
        )
        if "system_prompt" not in values:
            left_out.append("a system message of this program: a prompt keeps its own")
    if evaluated != "no" and len(datasets) == 1 and "test" in getattr(PRESETS.get(datasets[0]), "splits", ()):
        fields["eval_dataset"] = datasets[0]
    elif evaluated != "no":
        left_out.append(f"eval_strategy {_written(evaluated)}: name eval_dataset, evaluated before and after training")
    weights = values.pop("reward_weights", None)
    shares = ["1"] * len(names) if weights is None else _listed(weights)
    if weights is not None and not names:
        fields["reward_weights"], shares = shares, []
        left_out.append("reward_funcs: reward_weights are those of the functions that train(reward_funcs=…) is given")
    rewards: dict[str, Any] = {}
    if len(shares) != len(names):
        raise ConfigError(f"{len(names)} reward_funcs but {len(shares)} reward_weights: give each function one")
    for name, weight in zip(names, shares, strict=True):
        if here := _REWARDS.get(name) or files.get(name):
            rewards[here] = weight if here not in rewards else float(rewards[here]) + float(weight)
            if name in files and not Path(file := here.rpartition(":")[0]).exists():
                advice = "run this where trl was run, or name its file"
                left_out.append(f"columns that {here} asks for: there is no {file} here; {advice}")
        else:
            nearest = f"; the nearest is {_NEAREST[name]}" if name in _NEAREST else ""
            left_out.append(
                f"reward_funcs {_written(name)}, of weight {weight}: no built-in reward is the same{nearest}"
            )
    if rewards:
        fields |= {"reward_funcs": list(rewards), "reward_weights": list(rewards.values())}
    services = _listed(values.pop("report_to", "none"))
    fields["report_to"] = [service for service in services if service in ("tensorboard", "wandb")]
    left_out += [
        f"report_to {service}: tensorboard or wandb"
        for service in services
        if service not in (*fields["report_to"], "none")
    ]
    return fields


def _written(value: Any) -> str:
    """As in a message, but numbers, which a file gives as texts, as they are written."""
    try:
        float(value)
        return str(value)
    except (TypeError, ValueError):
        return shown(value)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _existing(path: str, beside: Path) -> Path | None:
    """A file or directory of the working directory, or else of `beside`."""
    return next((found for found in (Path(path), beside / path) if path and found.exists()), None)


def _is_path(dataset: str, beside: Path) -> bool:
    """Whether the name of a dataset looks like that of a file or directory, not like one on the hub."""
    parent, slash, _ = dataset.rpartition("/")
    is_below = bool(slash) and (parent[:1] in ("", ".", "~") or _existing(parent, beside) is not None)
    return is_below or Path(dataset).suffix in (*FILE_KINDS, ".csv")


def _file_of(reward: str, beside: Path) -> str:
    """A reward by its import path as "file.py:function"; without such a file that of the working directory."""
    if ".py:" in reward:
        return reward
    module, _, function = reward.rpartition(".")
    file = module.replace(".", "/") + ".py"
    return f"{_existing(file, beside) or file}:{function}"


def _datasets(values: dict[str, Any], left_out: list[str], beside: Path) -> list[str]:
    """Presets, files and directories in `datasets`, or else `dataset_name`; other names, which a run refuses, as they
    are. Raises ConfigError for a file that is not there.
    """
    entries, name, found = values.pop("datasets", None), values.pop("dataset_name", None), []
    presets = {preset.hub_id.lower(): name for name, preset in reversed(PRESETS.items())}
    if entries and name is not None:
        left_out.append(f"dataset_name {_written(name)}: TRL reads datasets in its place")
    key, entries = ("datasets", _listed(entries)) if entries else ("dataset_name", [name] if name is not None else [])
    for entry in entries:
        entry = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        path, files, split = entry.pop("path", None), entry.pop("data_files", None), entry.pop("split", "train")
        files = files.get(split) if isinstance(files, Mapping) else files
        for one in map(str, _listed(files or path)):
            if here := presets.get(one.lower()) or _existing(one, beside):
                found.append(str(here))
                continue
            if _is_path(one, beside):
                folders = " and ".join(dict.fromkeys((str(Path.cwd()), str(beside.absolute()))))
                raise ConfigError(f"{key} {_written(one)}: there is no such file or directory, looked for in {folders}")
            found.append(one)
            left_out.append(
                f"{key} {_written(one)}: no preset, so that a run refuses it: name a file as dataset, which "
                "datasets.load_dataset(…).to_json(FILE) writes, or give records to train(train_dataset=…)"
            )
        others = entry | ({} if split in ("train", None) else {"split": split})
        left_out += [
            f"{field} {_written(value)} of datasets: {_OF_DATASETS.get(field, 'no field has its meaning')}"
            for field, value in others.items()
            if field != "columns" and value is not None
        ]
    return found


def columns_of(reward: str) -> list[str]:
    """Parameters without a default of "file.py:function" that are columns of a dataset, `answer` among them, read
    without running the file; none where it has no such function.
    """
    file, _, function = reward.rpartition(":")
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return []
    given = {"prompts", "completions", *GIVEN_COLUMNS, *NOT_PASSED}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            places, keywords = [*node.args.posonlyargs, *node.args.args], node.args
            required = places[: len(places) - len(keywords.defaults)]
            required += [a for a, value in zip(keywords.kwonlyargs, keywords.kw_defaults, strict=True) if value is None]
            return [argument.arg for argument in required if argument.arg not in given]
    return []


def _batch(values: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Completions of an update, which has a rollout of its own here."""
    per_device, accumulated, processes = (coerce(name, values.pop(name), int) for name in (*_BATCH, *_PROCESSES))
    update = per_device * accumulated * processes
    group = coerce("num_generations", values.get("num_generations", 8), int)
    given = {name: coerce(name, values.pop(name), int) for name in _ROLLOUT if name in values}
    rollout = given.get(_ROLLOUT[0], per_device * processes * given.get(_ROLLOUT[1], accumulated))
    if rollout != update:
        name, value = next(iter(given.items()))
        theirs = f"{name} {value}: TRL makes updates of {update} completions from rollouts of {rollout}"
        if update % group:
            left_out.append(f"{theirs}; here an update has a whole rollout: fewer updates, each of {rollout}")
            return {"batch_size": rollout}
        left_out.append(f"{theirs}; here an update has a rollout of its own, of {update}")
    return {"batch_size": update}


def _optimization(values: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Batch, schedule, and what follows from other settings there."""
    fields = _batch(values, left_out)
    if values.get("loss_type") != "cispo":
        values.setdefault("epsilon_high", values.get("epsilon", 0.2))
    if str(values.get("beta", 0)) not in ("0", "0.0"):
        values.setdefault("use_bias_correction_kl", True)  # TRL's default, which weighs the estimator
    if "shuffle_dataset" in values:
        fields["data_order"] = "shuffled" if values.pop("shuffle_dataset") else "sequential"
    if "max_prompt_length" in values:
        fields["overlong_prompts"] = "truncate_left"  # as versions of TRL that have the field
    else:
        left_out.append(
            f"no limit of prompts: those of more than max_prompt_length tokens are dropped, by default {PROMPT_LENGTH} "
            "or what max_completion_length leaves of the model's max_position_embeddings"
        )
    if (share := values.pop("vllm_gpu_memory_utilization", None)) is not None:
        left_out.append(f"vllm_gpu_memory_utilization {_written(share)}: needs rollout_backend vllm")
    if values.get("use_vllm") and values.pop("vllm_importance_sampling_correction", True):
        if "vllm_importance_sampling_cap" in values:  # the earlier name
            values.setdefault("vllm_importance_sampling_clip_max", values.pop("vllm_importance_sampling_cap"))
        values |= {name: value for name, value in _VLLM.items() if name not in values}
    else:
        for name in [name for name, field in _RENAMED.items() if field.startswith("importance_sampling_")]:
            if name in values:
                left_out.append(f"{name} {_written(values.pop(name))}: TRL corrects for vLLM alone, if at all")
        fields["importance_sampling_cap"] = None  # TRL takes the sampler for the trainer's policy then
    return fields | _schedule(values, left_out)


def _schedule(values: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Decay and warm-up of the learning rate."""
    kind, fields = values.pop("lr_scheduler_type"), {}
    try:
        fields["lr_scheduler_type"] = coerce(
            "lr_scheduler_type", kind, typing.get_type_hints(Config)["lr_scheduler_type"]
        )
    except ConfigError as error:
        left_out.append(f"{error}: name one; here it is the default {Config.lr_scheduler_type}, which ends at 0")
    warmup, steps = (
        coerce(name, values.get(name, silent), float) for name, silent in (("warmup_steps", 0), ("max_steps", -1))
    )
    if warmup >= 1 and steps <= warmup and kind != "constant":
        value = values.pop("warmup_steps")
        left_out.append(
            f"warmup_steps {value}: warmup_ratio is {value} / number of updates, which --dry-run shows; until it is "
            f"given the default {Config.warmup_ratio}"
        )
        return fields
    values.pop("warmup_steps", None)
    if warmup < 1:
        ratio = warmup
    else:
        a_rollout = coerce("num_iterations", values.get("num_iterations", 1), int)
        updates = math.ceil(steps / a_rollout) * a_rollout  # the last rollout gets all of its updates
        ratio = warmup / updates
        if math.ceil(ratio * updates) > warmup:  # 7 / 25 * 25 is more than 7
            ratio = math.nextafter(ratio, 0.0)
        left_out.append(f"warmup_steps {warmup:g}: warmup_ratio is its share of {updates} updates, of no other length")
    ratio = values.pop("warmup_ratio", ratio)
    return fields | {"warmup_ratio": 0.0 if kind == "constant" else ratio}  # TRL's "constant" has no warm-up
