"""`adapter_config.json` of PEFT: read into a `LoraConfig`, and written."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from qerl_jax.checkpoint import names
from qerl_jax.checkpoint.hf_config import MAX_LAYERS, read_json
from qerl_jax.checkpoint.run_files import ADAPTER_DIR, is_run
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.config.values import LARGEST_INT
from qerl_jax.messages import shown
from qerl_jax.models.config import LAYER_NORMS
from qerl_jax.models.lora import PROJECTIONS, LoraConfig

CONFIG_FILE = "adapter_config.json"
_KNOWN = frozenset(  # keys of PEFT's LoraConfig that are read here, or say nothing about a trained LoRA's values
    {
        *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "target_modules", "modules_to_save"),
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
    }
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that subtract from the base's weights


def adapter_config(directory: Path) -> LoraConfig:
    """Shape of a PEFT adapter.

    Raises CheckpointError for what a plain LoRA of the seven projections cannot express (DoRA, rank patterns, other
    modules, biases).
    """
    path = directory / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {_instead(directory)}")
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {shown(config.get('peft_type'))}, supported is 'LORA'")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias is {shown(config['bias'])}, supported is 'none'")
    for key in sorted(config.keys() - _KNOWN):  # DoRA, rank patterns, and what later versions of PEFT bring
        if not _unset(config[key]):
            raise CheckpointError(f"{path}: {key} is {shown(config[key])}, which is not supported")
    if str(config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights is {shown(config['init_lora_weights'])}, which changes the base: convert the "
            "adapter to a plain LoRA"
        )
    saved = config.get("modules_to_save") or []
    if not _are_names(saved):
        raise CheckpointError(f"{path}: modules_to_save is {shown(saved)}, it must be a list of names")
    targets = _targets(path, config.get("target_modules") or [])
    extra = set(saved) - set(LAYER_NORMS)
    if extra:
        raise CheckpointError(
            f"{path}: modules_to_save {sorted(extra)}, supported are the layer norms {list(LAYER_NORMS)}"
        )
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if type(rank) is not int or not 0 < rank <= LARGEST_INT:
        raise CheckpointError(f"{path}: r is {shown(rank)}, it must be a whole number above 0")
    if type(alpha) not in (int, float) or not 0 < alpha <= sys.float_info.max:
        raise CheckpointError(f"{path}: lora_alpha is {shown(alpha)}, it must be a number above 0")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise CheckpointError(f"{path}: lora_dropout is {shown(dropout)}, it must lie in [0, 1)")
    if not isinstance(config.get("use_rslora", False), bool):
        raise CheckpointError(f"{path}: use_rslora is {shown(config['use_rslora'])}, it must be true or false")
    return LoraConfig(
        rank=rank,
        alpha=float(alpha),
        use_rslora=config.get("use_rslora", False),
        target_modules=targets,
        dropout=float(dropout),
    )


def _instead(directory: Path) -> str:
    """What to name in the place of a directory that holds no adapter."""
    if (directory / ADAPTER_DIR / CONFIG_FILE).exists():
        return f"name {directory / ADAPTER_DIR}"
    run = next(filter(is_run, (directory, directory.parent)), None)
    if run is None:
        return "an adapter is a PEFT directory"
    write = f"python -m qerl_jax.export {shlex.quote(str(run))} OUT --as peft"
    return f"a run writes its adapter at its end; `{write}` writes that of the newest checkpoint"


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _targets(path: Path, modules: Any) -> tuple[str, ...]:
    """Projections with an adapter, by PEFT's `target_modules`: "all-linear", a regular expression of a module's whole
    name, or a list of names or their ends behind a dot. In layers that it leaves out the reader misses tensors.
    """
    if modules == "all-linear":
        return PROJECTIONS
    paths = {names.projection(layer, part): part for layer in range(MAX_LAYERS) for part in PROJECTIONS}
    if isinstance(modules, str):
        try:
            matches = re.compile(modules).fullmatch
        except re.error as error:
            raise CheckpointError(
                f"{path}: target_modules {shown(modules)} is no regular expression: {error}"
            ) from error
        found = {part for module, part in paths.items() if matches(module)}
        wrong = [module for module in ("lm_head", "model.embed_tokens") if matches(module)] or [modules] * (not found)
    elif _are_names(modules):
        words = {module: module.split(".") for module in paths}
        ends = {".".join(words[module][i:]): part for module, part in paths.items() for i in range(len(words[module]))}
        found = {ends.get(name) for name in modules}
        wrong = [name for name in modules if name not in ends]
    else:
        raise CheckpointError(
            f"{path}: target_modules is {shown(modules)}, it must be a list of names or a regular expression"
        )
    if wrong:
        raise CheckpointError(
            f"{path}: target_modules {shown(modules)} go beyond the projections {list(PROJECTIONS)}: {shown(wrong[0])}"
        )
    return tuple(part for part in PROJECTIONS if part in found)


def _unset(value: Any) -> bool:
    """Whether an option asks for nothing. 0 does ask: `layers_to_transform: 0` is the first layer."""
    return value is None or value is False or value in ([], {}, "")


def peft_config(config: LoraConfig, base_model: str) -> dict[str, Any]:
    """`adapter_config.json` of a LoRA without norms."""
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config.effective_alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": list(config.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }
