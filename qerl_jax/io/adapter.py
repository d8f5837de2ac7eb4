"""PEFT adapters in and out: LoRA of the seven projections, and trained layer norms as `modules_to_save`.

vLLM refuses an adapter with norms in it, so an export with norms also holds `vllm/`: the LoRA alone, and the norms as
an overlay for the base.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.io import names, safetensors
from qerl_jax.io.files import atomic_directory, write_json
from qerl_jax.io.hf_config import read_json
from qerl_jax.io.safetensors import CheckpointError
from qerl_jax.models.config import LAYER_NORMS
from qerl_jax.models.lora import PROJECTIONS, Lora, LoraConfig
from qerl_jax.types import Policy

_PREFIX = "base_model.model."
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OVERLAY_FILE = "norms.safetensors"
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
        raise FileNotFoundError(f"{path} does not exist: an adapter is a PEFT directory")
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')!r}, supported is 'LORA'")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias is {config['bias']!r}, supported is 'none'")
    for key in sorted(config.keys() - _KNOWN):  # DoRA, rank patterns, and what later versions of PEFT bring
        if not _unset(config[key]):
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, which is not supported")
    if str(config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights is {config['init_lora_weights']!r}, which changes the base: convert the "
            "adapter to a plain LoRA"
        )
    modules, saved = config.get("target_modules") or [], config.get("modules_to_save") or []
    for key, value in (("target_modules", modules), ("modules_to_save", saved)):
        if value != "all-linear" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise CheckpointError(f"{path}: {key} is {value!r}, it must be a list of names")
    targets = PROJECTIONS if modules == "all-linear" else tuple(p for p in PROJECTIONS if p in modules)
    if modules != "all-linear" and len(targets) != len(modules):
        raise CheckpointError(f"{path}: target_modules {sorted(modules)} go beyond the projections {list(PROJECTIONS)}")
    extra = set(saved) - set(LAYER_NORMS)
    if extra:
        raise CheckpointError(
            f"{path}: modules_to_save {sorted(extra)}, supported are the layer norms {list(LAYER_NORMS)}"
        )
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if type(rank) is not int or rank <= 0:
        raise CheckpointError(f"{path}: r is {rank!r}, it must be a whole number above 0")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise CheckpointError(f"{path}: lora_alpha is {alpha!r}, it must be a number above 0")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise CheckpointError(f"{path}: lora_dropout is {dropout!r}, it must lie in [0, 1)")
    if not isinstance(config.get("use_rslora", False), bool):
        raise CheckpointError(f"{path}: use_rslora is {config['use_rslora']!r}, it must be true or false")
    return LoraConfig(
        rank=rank,
        alpha=float(alpha),
        use_rslora=config.get("use_rslora", False),
        target_modules=targets,
        dropout=float(dropout),
    )


def _unset(value: Any) -> bool:
    """Whether an option asks for nothing. 0 does ask: `layers_to_transform: 0` is the first layer."""
    return value is None or value is False or value in ([], {}, "")


def import_adapter(policy: Policy, directory: Path) -> Policy:
    """The policy with the adapter's values, and its norms where it carries them (the others become `base_norms`).

    Raises:
      ValueError: its rank, scale or target modules differ from the policy's `lora_config`.
      CheckpointError: a tensor (also one of `modules_to_save`) is missing, unknown, misshapen or not finite.
    """
    config = adapter_config(directory)
    ours = dataclasses.replace(policy.lora_config, dropout=config.dropout)
    if (ours.rank, ours.scale, set(ours.target_modules)) != (config.rank, config.scale, set(config.target_modules)):
        raise ValueError(f"{directory / CONFIG_FILE} describes {config}, the policy was asked for {ours}")
    source = _Reader(directory / WEIGHTS_FILE)
    named = read_json(directory / CONFIG_FILE).get("modules_to_save") or []

    def lora(path: tuple[str | int, ...], layer: int, part: str, old: Lora) -> Lora:
        module = f"{_PREFIX}{names.projection(layer, part)}"
        a = source.read(f"{module}.lora_A.weight", old.a.shape[::-1])
        b = source.read(f"{module}.lora_B.weight", old.b.shape[::-1])
        return dataclasses.replace(old, a=a.T, b=b.T)

    def norm(layer: int, name: str, old: jax.Array) -> jax.Array:
        key = f"{_PREFIX}{names.layer_norm(layer, name)}"
        return source.read(key, old.shape) if key in source.tensors or name in named else old

    adapters, norms = map_adapters(lora, policy.lora), map_norms(norm, policy.norms)
    source.refuse_unknown()
    base = policy.base_norms
    if base is None and any(name in key for key in source.tensors for name in LAYER_NORMS):
        base = policy.norms
    return policy.replace(lora=adapters, norms=norms, base_norms=base, lora_config=ours)


def export_adapter(policy: Policy, dst: str | Path, norms: bool = True, base_model: str = "") -> None:
    """Write the policy's adapters as a PEFT directory, atomically.

    Args:
      policy: any policy with adapters.
      dst: directory; an adapter in it is replaced, other files in it stay.
      norms: include the layer norms, as `modules_to_save` that `peft` loads; `dst/vllm` then holds the LoRA alone and
        `norms.safetensors`, whose names are those of the base checkpoint.
      base_model: path or hub id written as `base_model_name_or_path`.

    Raises ValueError if the policy has no adapters, or one that is not finite; FileExistsError if `dst` holds files but
    no adapter.
    """
    if not jax.tree.leaves(policy.lora):
        raise ValueError("the policy has no adapters (lora_rank 0): nothing to export")
    lora, layer_norms = adapter_tensors(policy), norm_tensors(policy)
    for name, value in (lora | layer_norms).items():
        if not np.isfinite(value).all():
            raise ValueError(f"{dst} is not written: {name!r} holds a value that is not finite")
    others = _other_files(Path(dst))
    config = peft_config(policy.lora_config, base_model)
    with atomic_directory(Path(dst)) as directory:
        if norms:
            whole = {**lora, **{_PREFIX + name: value for name, value in layer_norms.items()}}
            _write(directory, {**config, "modules_to_save": list(LAYER_NORMS)}, whole)
            (directory / "vllm").mkdir()
            _write(directory / "vllm", config, lora)
            safetensors.save(directory / "vllm" / OVERLAY_FILE, layer_norms)
        else:
            _write(directory, config, lora)
        for entry in others:
            copy = shutil.copytree if entry.is_dir() else shutil.copy2
            copy(entry, directory / entry.name)


def _other_files(directory: Path) -> list[Path]:
    """Entries of an adapter directory that no export writes."""
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    if entries and not (directory / CONFIG_FILE).exists():
        raise FileExistsError(
            f"{directory} holds {entries[0].name!r} but no {CONFIG_FILE}: it is no adapter to replace"
        )
    return [entry for entry in entries if entry.name not in (CONFIG_FILE, WEIGHTS_FILE, "vllm")]


def _write(directory: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    write_json(directory / CONFIG_FILE, config)
    safetensors.save(directory / WEIGHTS_FILE, tensors)


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


def adapter_tensors(policy: Policy) -> dict[str, np.ndarray]:
    """PEFT name -> fp32 array of every adapter."""
    tensors = {}

    def collect(path: tuple[str | int, ...], layer: int, part: str, lora: Lora) -> Lora:
        module = f"{_PREFIX}{names.projection(layer, part)}"
        tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(np.asarray(lora.a, np.float32).T)
        tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(np.asarray(lora.b, np.float32).T)
        return lora

    map_adapters(collect, policy.lora)
    return tensors


def norm_tensors(policy: Policy) -> dict[str, np.ndarray]:
    """Base checkpoint name -> fp32 array of every layer norm."""
    tensors = {}

    def collect(layer: int, name: str, weight: jax.Array) -> jax.Array:
        tensors[names.layer_norm(layer, name)] = np.asarray(weight, np.float32)
        return weight

    map_norms(collect, policy.norms)
    return tensors


def map_adapters(function: Callable[[tuple, int, str, Lora], Lora], lora: Any) -> Any:
    """Apply `function(tree path, layer, part, Lora)` to every adapter of a policy's lora tree."""

    def visit(path, leaf: Lora) -> Lora:
        keys = tuple(entry.key for entry in path)
        return function(keys, keys[1], keys[-1], leaf)

    return jax.tree_util.tree_map_with_path(visit, lora, is_leaf=lambda node: isinstance(node, Lora))


def map_norms(function: Callable[[int, str, jax.Array], jax.Array], norms: Any) -> Any:
    """Apply `function(layer, name, weight)` to every layer norm of a policy's norms tree."""

    def visit(path, leaf: jax.Array) -> jax.Array:
        keys = tuple(entry.key for entry in path)
        return function(keys[1], keys[2], leaf)

    return jax.tree_util.tree_map_with_path(visit, norms)


class _Reader:
    """Adapter tensors by name, shape and finiteness checked."""

    def __init__(self, path: Path):
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist: an adapter directory holds {CONFIG_FILE} and {WEIGHTS_FILE}"
            )
        self.path, self.tensors, self.used = path, safetensors.Tensors([path]), set()

    def read(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        array = self.tensors[name].astype(np.float32)
        if array.shape != tuple(shape):
            raise CheckpointError(
                f"{self.path}: {name!r} has shape {list(array.shape)}, the model asks for {list(shape)}"
            )
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.path}: {name!r} holds a value that is not finite")
        self.used.add(name)
        return jnp.asarray(array)

    def refuse_unknown(self) -> None:
        unknown = sorted(set(self.tensors) - self.used)
        if unknown:
            raise CheckpointError(
                f"{self.path}: {len(unknown)} tensors have no place in the policy, first {unknown[0]!r}"
            )
