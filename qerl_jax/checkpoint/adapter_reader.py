"""A PEFT adapter's tensors by layer and module, checked against the model they are for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from qerl_jax.checkpoint import names, safetensors
from qerl_jax.checkpoint.check import check_tensors
from qerl_jax.checkpoint.layouts import Expected
from qerl_jax.checkpoint.peft_config import CONFIG_FILE, adapter_config
from qerl_jax.checkpoint.safetensors import FLOATS, CheckpointError, read_json
from qerl_jax.models.config import LAYER_NORMS, ModelConfig
from qerl_jax.models.formats import WEIGHT_FORMATS

_PREFIX = "base_model.model."
WEIGHTS_FILE = "adapter_model.safetensors"
CARD_FILE = "README.md"  # names the weights' format: peft warns of keys of others in adapter_config.json


def lora_key(layer: int, part: str, matrix: str) -> str:
    """PEFT's name of the "A" or "B" of a projection."""
    return f"{_PREFIX}{names.projection(layer, part)}.lora_{matrix}.weight"


def norm_key(name: str) -> str:
    """PEFT's name of a norm that is `name` in the base checkpoint."""
    return _PREFIX + name


def trained_format(directory: Path) -> str | None:
    """Format of the weights that an adapter was trained on, one of `WEIGHT_FORMATS`; None where its card does not say
    so, as that of peft.
    """
    found = _of_card(directory, "weight_format")
    return found if found in WEIGHT_FORMATS else None


def trained_base(directory: Path) -> str | None:
    """`model_fingerprint` of the model that an adapter was trained on; None where its card does not say so."""
    return _of_card(directory, "base_fingerprint")


def _of_card(directory: Path, key: str) -> str | None:
    path = directory / CARD_FILE
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    found = re.match(rf"---\n(?:(?!---).*\n)*?{key}: (\w+)\n", text)
    return found[1] if found else None


class AdapterReader:
    """The adapter of a directory for a model of the shape `model`; tensors are memory-mapped until they are asked for.

    Raises:
      FileNotFoundError: no adapter there.
      CheckpointError: an adapter of another kind (`adapter_config`), or a tensor that is missing, unknown, or of a
        shape that this model does not have. Later: a value that is not finite.
    """

    def __init__(self, directory: Path, model: ModelConfig):
        self.directory, self.path = directory, directory / WEIGHTS_FILE
        self.config = adapter_config(directory)
        self._model = model
        if not self.path.exists():
            raise FileNotFoundError(
                f"{self.path} does not exist: an adapter directory holds {CONFIG_FILE} and {WEIGHTS_FILE}"
            )
        self._tensors = safetensors.open_files([self.path])
        named = read_json(directory / CONFIG_FILE).get("modules_to_save") or []
        self._norms = {
            (layer, name): key
            for layer in range(model.num_layers)
            for name in LAYER_NORMS
            if (key := norm_key(names.layer_norm(layer, name))) in self._tensors or name in named
        }
        check_tensors(self._tensors, self._expected())

    @property
    def has_norms(self) -> bool:
        """Whether it carries layer norms."""
        return bool(self._norms)

    def lora(self, layer: int, part: str) -> tuple[np.ndarray, np.ndarray] | None:
        """A f32[R, K] and B f32[N, R] of a projection, as PEFT stores them; None where it has no adapter."""
        if part not in self.config.target_modules:
            return None
        a, b = (self._read(lora_key(layer, part, matrix)) for matrix in "AB")
        return a, b

    def norm(self, layer: int, name: str) -> np.ndarray | None:
        """f32[D]: a layer norm; None where the adapter leaves it alone."""
        key = self._norms.get((layer, name))
        return None if key is None else self._read(key)

    def lora_tensors(self) -> dict[str, np.ndarray]:
        """PEFT name -> f32 array of every A and B."""
        tensors = {}
        for layer in range(self._model.num_layers):
            for part in self._model.projection_shapes():
                if (lora := self.lora(layer, part)) is not None:
                    tensors |= {lora_key(layer, part, matrix): value for matrix, value in zip("AB", lora, strict=True)}
        return tensors

    def norm_tensors(self) -> dict[str, np.ndarray]:
        """Name in the base checkpoint -> f32[D] of every layer norm that it carries."""
        return {names.layer_norm(*place): self._read(key) for place, key in self._norms.items()}

    def _expected(self) -> Expected:
        dtypes = (*FLOATS, "float64")
        found: Expected = dict.fromkeys(self._norms.values(), ((self._model.hidden_size,), dtypes))
        for layer in range(self._model.num_layers):
            for part, (n, k) in self._model.projection_shapes().items():
                if part in self.config.target_modules:
                    found[lora_key(layer, part, "A")] = (self.config.rank, k), dtypes
                    found[lora_key(layer, part, "B")] = (n, self.config.rank), dtypes
        return found

    def _read(self, name: str) -> np.ndarray:
        with np.errstate(over="ignore"):  # of float64; the error below says so
            array = self._tensors[name].astype(np.float32)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.path}: {name!r} holds a value that is not finite")
        return array
