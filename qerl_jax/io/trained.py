"""What a run trained, from its newest checkpoint: the adapter, for runs that were interrupted before they exported one,
or all weights, which a run leaves there only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from qerl_jax.config import Config
from qerl_jax.io import hf_config, names
from qerl_jax.io.adapter import write_adapter
from qerl_jax.io.adapter_reader import lora_key
from qerl_jax.io.checkpoint import Checkpointer
from qerl_jax.io.safetensors import CheckpointError, Spec, TensorSource, open_checkpoint
from qerl_jax.io.tensor_names import is_frequencies
from qerl_jax.models.config import FUSED_PROJECTIONS, HEAD_NORMS, ModelConfig

# Paths of a `TrainState`'s arrays in a checkpoint.
_LORA = re.compile(r"lora/layers/(\d+)/\w+/\w+/lora/(\w+)/([ab])")
_NORM = re.compile(r"norms/layers/(\d+)/(\w+)/weight")
_WEIGHT = re.compile(r"weights/layers/(\d+)/(?:self_attn|mlp)/(\w+)/(weight|bias)(?:/values)?")
_OUTSIDE = {
    "weights/embed_tokens": names.EMBED,
    "weights/norm/weight": names.FINAL_NORM,
    "weights/lm_head": names.LM_HEAD,
}


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


class TrainedWeights(TensorSource):
    """The policy of full fine-tuning as an unquantized checkpoint: norms in fp32, all else in the dtype that the run
    computed with. Memory holds the fp32 masters.

    Args:
      base: model directory that the run started from.
      masters: the trained weights, fp32, by Hugging Face's names.
      dtype: compute dtype of the run.
      norm_dtype: dtype of the norms.

    Raises CheckpointError, naming both values, where the masters are not those of a model like the base.
    """

    def __init__(
        self, base: Path, masters: Mapping[str, np.ndarray], dtype: DTypeLike, norm_dtype: DTypeLike = np.float32
    ):
        self._base, self._stored, self._masters = base, open_checkpoint(base), dict(masters)
        self._dtype, self._norm_dtype = np.dtype(dtype), np.dtype(norm_dtype)
        is_tied = hf_config.model_config(base).tie_word_embeddings  # such a base may store its head once more
        self._names = [
            name for name in self._stored if not is_frequencies(name) and not (is_tied and name == names.LM_HEAD)
        ]
        for name in sorted({*self._names, *self._masters}):
            wanted = self._stored.spec(name)[1] if name in self._names else None
            found = self._masters[name].shape if name in self._masters else None
            if wanted != found:
                raise CheckpointError(f"{name!r} has shape {wanted} in {base}, {found} in the run's checkpoint")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._masters[name].astype(self.spec(name)[0])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def where(self) -> str:
        """The files of the base."""
        return self._stored.where()

    def file_of(self, name: str) -> Path:
        """The base's file with the tensor of this name."""
        return self._stored.file_of(name)

    def spec(self, name: str) -> Spec:
        """dtype and shape."""
        is_norm = name.removesuffix(".weight").endswith("norm")
        return self._norm_dtype if is_norm else self._dtype, self._masters[name].shape

    def in_bf16(self) -> TrainedWeights:
        """The same with every tensor rounded to bf16."""
        return TrainedWeights(self._base, self._masters, ml_dtypes.bfloat16, ml_dtypes.bfloat16)


def weights_from_checkpoint(run: Path, config: Config, base: Path) -> tuple[TrainedWeights, int]:
    """The policy in the newest complete checkpoint of a full fine-tuning run, and its step.

    Raises CheckpointError for a checkpoint that is damaged, or not of a model like `base`.
    """
    checkpoints, model = Checkpointer(run, keep=None), hf_config.model_config(base)
    step = checkpoints.latest_step()
    if step is None:
        raise CheckpointError(f"{run} holds no complete checkpoint")
    arrays = checkpoints.read(step, ("weights/", "norms/"))
    masters = {_OUTSIDE[name]: array for name, array in arrays.items() if name in _OUTSIDE} | _norms(arrays)
    for name, array in arrays.items():
        if match := _WEIGHT.fullmatch(name):
            masters |= _parts(model, int(match[1]), match[2], match[3], array)
    return TrainedWeights(base, masters, config.dtype), step


def _parts(model: ModelConfig, layer: int, module: str, kind: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A layer's weight or bias by name; that of a fused projection in its parts."""
    if module in HEAD_NORMS:
        return {names.head_norm(layer, module): array}
    parts, shapes = FUSED_PROJECTIONS.get(module, (module,)), model.projection_shapes()
    ends = np.cumsum([shapes[part][0] for part in parts])
    rows = np.split(array, ends[:-1])
    return {f"{names.projection(layer, part)}.{kind}": own for part, own in zip(parts, rows, strict=True)}
