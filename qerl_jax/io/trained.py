"""The adapter in a run's newest checkpoint, for runs that were interrupted before they exported one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qerl_jax.config import Config
from qerl_jax.io import names
from qerl_jax.io.adapter import write_adapter
from qerl_jax.io.adapter_reader import lora_key
from qerl_jax.io.checkpoint import Checkpointer

# Paths of a `TrainState`'s arrays in a checkpoint.
_LORA = re.compile(r"lora/layers/(\d+)/\w+/\w+/lora/(\w+)/([ab])")
_NORM = re.compile(r"norms/layers/(\d+)/(\w+)/weight")


def adapter_from_checkpoint(run: Path, config: Config, directory: Path, base_model: str) -> int | None:
    """Write the adapter of the newest complete checkpoint into an empty directory, as the run itself would export it.
    Only adapters and norms are read. Returns its step; None without a complete checkpoint.

    Raises CheckpointError for a checkpoint that is damaged.
    """
    checkpoints = Checkpointer(run, keep=None)
    step = checkpoints.latest_step()
    if step is None:
        return None
    arrays = checkpoints.read(step, ("lora/", "norms/", "reference_norms/"))
    lora, norms = _lora(arrays), _norms(arrays)
    moved = config.train_norms or any(name.startswith("reference_norms/") for name in arrays)
    write_adapter(directory, config.lora, lora, norms if moved else {}, base_model)
    return step


def _lora(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {match: array for name, array in arrays.items() if (match := _LORA.fullmatch(name))}
    return {
        lora_key(int(match[1]), match[2], match[3].upper()): np.ascontiguousarray(array.T)
        for match, array in found.items()
    }


def _norms(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {match: array for name, array in arrays.items() if (match := _NORM.fullmatch(name))}
    return {names.layer_norm(int(match[1]), match[2]): array for match, array in found.items()}
