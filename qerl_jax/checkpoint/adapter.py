"""PEFT adapters in and out: LoRA of the seven projections, and trained layer norms as `modules_to_save`.

vLLM refuses an adapter with norms in it: `python -m qerl_jax.export RUN OUT --as vllm` writes what it serves.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.atomic import atomic_directory, write_json
from qerl_jax.checkpoint import names, safetensors
from qerl_jax.checkpoint.adapter_reader import (
    CARD_FILE,
    WEIGHTS_FILE,
    AdapterReader,
    lora_key,
    norm_key,
    trained_format,
)
from qerl_jax.checkpoint.peft_config import CONFIG_FILE, peft_config
from qerl_jax.models.config import LAYER_NORMS, ModelConfig
from qerl_jax.models.formats import Weight, format_name
from qerl_jax.models.lora import PROJECTIONS, Lora, LoraConfig
from qerl_jax.types import Policy

_CARD = """---
base_model: {base}
library_name: peft
weight_format: {format}
{fingerprint}---
QeRL-JAX trained this adapter on {name}. Its base has projections in `weight_format`: on those in another format, as of
an unquantized checkpoint for an adapter of 4-bit ones, it gives other logits and another accuracy.
"""


def import_adapter(policy: Policy, directory: str | Path) -> Policy:
    """The policy with the adapter's values, and its norms where it carries them (the others become `base_norms`).

    Raises:
      ValueError: its rank, scale or target modules differ from the policy's `lora_config`.
      CheckpointError: a tensor (also one of `modules_to_save`) is missing, unknown, misshapen or not finite.
    """
    source = open_adapter(Path(directory), policy.config, policy.lora_config)

    def lora(layer: int, part: str, old: Lora) -> Lora:
        a, b = source.lora(layer, part)
        return dataclasses.replace(old, a=jax.device_put(a.T.copy()), b=jax.device_put(b.T.copy()))

    def norm(layer: int, name: str, old: jax.Array) -> jax.Array:
        value = source.norm(layer, name)
        return old if value is None else jax.device_put(np.array(value))

    adapters, norms = map_layers(lora, policy.lora), map_layers(norm, policy.norms)
    base = policy.norms if policy.base_norms is None and source.has_norms else policy.base_norms
    ours = dataclasses.replace(policy.lora_config, dropout=source.config.dropout)
    return policy.replace(lora=adapters, norms=norms, base_norms=base, lora_config=ours)


def open_adapter(directory: Path, model: ModelConfig, lora: LoraConfig) -> AdapterReader:
    """The adapter of a directory for a policy of these shapes, no value read. Raises as `import_adapter`."""
    source = AdapterReader(directory, model)
    if _shape(lora) != _shape(source.config):
        theirs, ours = _settings(source.config), _settings(lora)
        different = (f"{name} {value}, not {ours[name]}" for name, value in theirs.items() if value != ours[name])
        raise ValueError(f"{directory / CONFIG_FILE} has {'; '.join(different)}: set it as the adapter has it")
    return source


def _shape(config: LoraConfig) -> tuple:
    return (config.rank, config.scale, set(config.target_modules)) if config.rank else (0,)


def _settings(config: LoraConfig) -> dict[str, str]:
    """The shape of adapters as settings of a run."""
    names = ("lora_rank", "lora_alpha", "use_rslora", "lora_target_modules")
    targets = " ".join(sorted(config.target_modules, key=PROJECTIONS.index))
    values = str(config.rank), f"{config.effective_alpha:g}", str(config.use_rslora), targets
    return dict(zip(names, values, strict=True))


def export_adapter(
    policy: Policy,
    dst: str | Path,
    norms: bool = True,
    base_model: str | None = None,
    *,
    beside_others: bool = False,
    fingerprint: str | None = None,
) -> None:
    """Write the policy's adapters as a PEFT directory, atomically.

    Args:
      policy: one with adapters.
      dst: directory; an adapter in it is replaced, other files in it stay.
      norms: include the layer norms, as `modules_to_save` that `peft` loads.
      base_model: path or hub id written as `base_model_name_or_path`; None: the one that the policy was loaded from.
      beside_others: also where `dst` holds files but no adapter, as that of a run may.
      fingerprint: of the model that it was trained on; None: that of a directory that the policy was loaded from.

    Raises ValueError if there is nothing to export, no base model to name, or a value that is not finite;
    FileExistsError if `dst` holds files but no adapter, without `beside_others`.
    """
    if not jax.tree.leaves(policy.lora):
        raise ValueError("the policy has no adapters (lora_rank 0): nothing to export")
    base_model = base_model or policy.source
    if not base_model:
        raise ValueError("the policy was not loaded from a directory: name the base model in base_model")
    lora, layer_norms = adapter_tensors(policy), norm_tensors(policy) if norms else {}
    for name, value in (lora | layer_norms).items():
        if not np.isfinite(value).all():
            raise ValueError(f"{dst} is not written: {name!r} holds a value that is not finite")
    if fingerprint is None and policy.source and Path(policy.source).is_dir():
        fingerprint = safetensors.model_fingerprint(Path(policy.source))
    others = _other_files(Path(dst), beside_others)
    with atomic_directory(Path(dst)) as directory:
        tensors = lora, layer_norms
        write_adapter(directory, policy.lora_config, *tensors, base_model, policy_format(policy), fingerprint)
        for entry in others:
            copy = shutil.copytree if entry.is_dir() else shutil.copy2
            copy(entry, directory / entry.name)


def policy_format(policy: Policy) -> str:
    """Format of a policy's projections, one of `WEIGHT_FORMATS`: of those quantized, where some are not."""
    leaves = jax.tree.leaves(policy.frozen["layers"], is_leaf=lambda node: isinstance(node, Weight))
    found = {format_name(leaf) for leaf in leaves if isinstance(leaf, Weight)}
    return next(iter(sorted(found - {"bf16"})), "bf16")


def write_adapter(
    directory: Path,
    config: LoraConfig,
    lora: Mapping[str, np.ndarray],
    norms: Mapping[str, np.ndarray],
    base_model: str,
    weight_format: str | None,
    fingerprint: str | None = None,
    trained_on: str | None = None,
) -> None:
    """Write a PEFT adapter into an empty directory.

    Args:
      directory: where to write.
      config: its shape.
      lora: PEFT name -> f32 array (`adapter_tensors`).
      norms: name in the base checkpoint -> f32[D] (`norm_tensors`); empty: none.
      base_model: written as `base_model_name_or_path`.
      weight_format: of the base that it was trained on, for the card that `trained_format` reads; None: no card.
      fingerprint: of that base, for `trained_base`; None: unknown.
      trained_on: the model that the card names as the one it was trained on; None: `base_model`.
    """
    saved = {norm_key(name): value for name, value in norms.items()}
    values = peft_config(config, base_model)
    if norms:
        values["modules_to_save"] = [norm for norm in LAYER_NORMS if any(f".{norm}." in name for name in saved)]
    write_json(directory / CONFIG_FILE, values)
    safetensors.save(directory / WEIGHTS_FILE, {**lora, **saved})
    if weight_format is not None:
        said = f"base_fingerprint: {fingerprint}\n" if fingerprint else ""
        names = {"base": json.dumps(base_model), "name": trained_on or base_model}
        card = _CARD.format(**names, format=weight_format, fingerprint=said)
        (directory / CARD_FILE).write_text(card, encoding="utf-8")


def _other_files(directory: Path, beside_others: bool) -> list[Path]:
    """Entries of an adapter directory that no export writes."""
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    if entries and not beside_others and not (directory / CONFIG_FILE).exists():
        raise FileExistsError(
            f"{directory} holds {entries[0].name!r} but no {CONFIG_FILE}: it is no adapter to replace"
        )
    own = (CONFIG_FILE, WEIGHTS_FILE, *([CARD_FILE] if trained_format(directory) else []))
    return [entry for entry in entries if entry.name not in own]


def adapter_tensors(policy: Policy) -> dict[str, np.ndarray]:
    """PEFT name -> fp32 array of every adapter."""
    tensors = {}

    def collect(layer: int, part: str, lora: Lora) -> None:
        for matrix, value in (("A", lora.a), ("B", lora.b)):
            tensors[lora_key(layer, part, matrix)] = np.ascontiguousarray(np.asarray(value, np.float32).T)

    map_layers(collect, policy.lora)
    return tensors


def norm_tensors(policy: Policy) -> dict[str, np.ndarray]:
    """Name in the base checkpoint -> fp32 array of every layer norm."""
    tensors = {}

    def collect(layer: int, name: str, weight: jax.Array) -> None:
        tensors[names.layer_norm(layer, name)] = np.asarray(weight, np.float32)

    map_layers(collect, policy.norms)
    return tensors


def map_layers(function: Callable[[int, str, Any], Any], tree: Any) -> Any:
    """Apply `function(layer, name, leaf)` to every `Lora` of a policy's adapters, or to every weight of its norms."""

    def visit(path: tuple, leaf: Any) -> Any:
        keys = [entry.key for entry in path]
        return function(keys[1], keys[-1] if isinstance(leaf, Lora) else keys[-2], leaf)

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=lambda node: isinstance(node, Lora))
