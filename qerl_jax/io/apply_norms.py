"""The trained layer norms of an exported adapter, written into its base checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qerl_jax.io import hf_config
from qerl_jax.io.adapter import OVERLAY_FILE
from qerl_jax.io.rewrite import check_output, rewrite_checkpoint
from qerl_jax.io.safetensors import CheckpointError, Spec, Tensors, open_checkpoint


def apply_norms(base: str | Path, adapter: str | Path, dst: str | Path, overwrite: bool = False) -> None:
    """Write the base checkpoint with the adapter's layer norms in place of its own; all else is copied bit for bit.

    The norms stay fp32, as they were trained. With `adapter/vllm` as its LoRA, the checkpoint is the trained policy in
    vLLM, which refuses norms in an adapter; a run that trained norms alone needs no adapter at all.

    Args:
      base: Hugging Face directory of any format, single or sharded.
      adapter: directory that `export_adapter` wrote with norms.
      dst: directory to write, in one atomic step.
      overwrite: replace an existing `dst`.

    Raises:
      FileNotFoundError: the adapter has no norms.
      FileExistsError: `dst` exists, without `overwrite`; or it is or holds the source, or is no model directory.
      OSError: `dst` cannot be written.
      CheckpointError: the base has no norm of that name and shape.
    """
    base, dst = Path(base), Path(dst)
    path = Path(adapter) / "vllm" / OVERLAY_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: only an adapter exported with its norms has it")
    check_output(base, dst, overwrite)
    hf_config.model_config(base)
    overlay, tensors = Tensors([path]), open_checkpoint(base)
    for name in overlay:
        tensors.require(name)
        ours, theirs = overlay.spec(name)[1], tensors.spec(name)[1]
        if ours != theirs:
            raise CheckpointError(
                f"{path}: {name!r} has shape {list(ours)}, in {tensors.file_of(name)} it has {list(theirs)}"
            )
    config = hf_config.read_json(base / "config.json")
    rewrite_checkpoint(base, dst, tensors, lambda members: _Overlaid(tensors, members, overlay), config)


class _Overlaid:
    """A shard of the base with the tensors of an overlay in place of its own."""

    def __init__(self, tensors: Tensors, members: list[str], overlay: Tensors):
        self._sources = {name: overlay if name in overlay else tensors for name in members}
        self.specs: Mapping[str, Spec] = {name: source.spec(name) for name, source in self._sources.items()}

    def tensor(self, name: str) -> np.ndarray:
        return self._sources[name][name]
