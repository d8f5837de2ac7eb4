"""PEFT adapters in and out: LoRA of the seven projections, and trained layer norms as `modules_to_save`; without LoRA,
the norms alone as PEFT's LN_TUNING.

vLLM refuses an adapter with norms in it, so an export with norms also holds `vllm/`: the LoRA alone, and the norms as
an overlay, which `python -m qerl_jax.apply_norms` lays over the base.
"""

from __future__ import annotations

import dataclasses
import functools
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
from qerl_jax.io.peft_config import CONFIG_FILE, adapter_config, norms_config, peft_config
from qerl_jax.io.safetensors import CheckpointError
from qerl_jax.models.config import LAYER_NORMS
from qerl_jax.models.lora import Lora, LoraConfig
from qerl_jax.types import Policy

_PREFIX = "base_model.model."
WEIGHTS_FILE = "adapter_model.safetensors"
OVERLAY_FILE = "norms.safetensors"


def import_adapter(policy: Policy, directory: Path) -> Policy:
    """The policy with the adapter's values, and its norms where it carries them (the others become `base_norms`).

    Raises:
      ValueError: its rank, scale or target modules differ from the policy's `lora_config`.
      CheckpointError: a tensor (also one of `modules_to_save`) is missing, unknown, misshapen or not finite.
    """
    config = adapter_config(directory)
    ours = dataclasses.replace(policy.lora_config, dropout=config.dropout)
    if _shape(ours) != _shape(config):
        raise ValueError(f"{directory / CONFIG_FILE} describes {config}, the policy was asked for {ours}")
    source = _Reader(directory / WEIGHTS_FILE)
    named = read_json(directory / CONFIG_FILE).get("modules_to_save" if config.rank else "target_modules") or []

    def lora(path: tuple[str | int, ...], layer: int, part: str, old: Lora) -> Lora:
        module = f"{_PREFIX}{names.projection(layer, part)}"
        a = source.read(f"{module}.lora_A.weight", old.a.shape[::-1])
        b = source.read(f"{module}.lora_B.weight", old.b.shape[::-1])
        return dataclasses.replace(old, a=a.T, b=b.T)

    def norm(layer: int, name: str, old: jax.Array) -> jax.Array:
        key = _norm_key(layer, name, alone=config.rank == 0)
        return source.read(key, old.shape) if key in source.tensors or name in named else old

    adapters, norms = map_adapters(lora, policy.lora), map_norms(norm, policy.norms)
    source.refuse_unknown()
    base = policy.base_norms
    if base is None and any(name in key for key in source.tensors for name in LAYER_NORMS):
        base = policy.norms
    return policy.replace(lora=adapters, norms=norms, base_norms=base, lora_config=ours)


def _shape(config: LoraConfig) -> tuple:
    return (config.rank, config.scale, set(config.target_modules)) if config.rank else (0,)


def _norm_key(layer: int, name: str, alone: bool) -> str:
    """PEFT's name of a layer norm's weight: beside a LoRA, or alone (LN_TUNING)."""
    key = _PREFIX + names.layer_norm(layer, name)
    return f"{key.removesuffix('weight')}ln_tuning_layers.weight" if alone else key


def export_adapter(policy: Policy, dst: str | Path, norms: bool = True, base_model: str | None = None) -> None:
    """Write the policy's adapters as a PEFT directory, atomically. Norms without adapters (`lora_rank` 0) are written
    as PEFT's LN_TUNING.

    Args:
      policy: any policy.
      dst: directory; an adapter in it is replaced, other files in it stay.
      norms: include the layer norms, as `modules_to_save` that `peft` loads; `dst/vllm` then holds the LoRA alone and
        `norms.safetensors`, whose names are those of the base checkpoint (`apply_norms` lays it over the base).
      base_model: path or hub id written as `base_model_name_or_path`; None: the one that the policy was loaded from.

    Raises ValueError if there is nothing to export, no base model to name, or a value that is not finite;
    FileExistsError if `dst` holds files but no adapter.
    """
    has_lora = bool(jax.tree.leaves(policy.lora))
    if not (has_lora or norms):
        raise ValueError("the policy has no adapters (lora_rank 0), and norms is False: nothing to export")
    base_model = base_model or policy.source
    if not base_model:
        raise ValueError("the policy was not loaded from a directory: name the base model in base_model")
    lora, layer_norms = adapter_tensors(policy), norm_tensors(policy)
    for name, value in (lora | layer_norms).items():
        if not np.isfinite(value).all():
            raise ValueError(f"{dst} is not written: {name!r} holds a value that is not finite")
    others = _other_files(Path(dst))
    config = peft_config(policy.lora_config, base_model) if has_lora else norms_config(base_model)
    with atomic_directory(Path(dst)) as directory:
        if norms:
            whole = lora | norm_tensors(policy, functools.partial(_norm_key, alone=not has_lora))
            _write(directory, {**config, "modules_to_save": list(LAYER_NORMS) if has_lora else None}, whole)
            (directory / "vllm").mkdir()
            if has_lora:
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


def norm_tensors(policy: Policy, key: Callable[[int, str], str] = names.layer_norm) -> dict[str, np.ndarray]:
    """Name -> fp32 array of every layer norm; `key(layer, norm)` names it, by default as the base checkpoint does."""
    tensors = {}

    def collect(layer: int, name: str, weight: jax.Array) -> jax.Array:
        tensors[key(layer, name)] = np.asarray(weight, np.float32)
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
