"""What a run trained: where it is, and the tensors of its newest checkpoint by Hugging Face's names. A run that was
stopped, as one that goes on after its end, has its newest adapter there only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qerl_jax.checkpoint import assets, hf_config, names
from qerl_jax.checkpoint.adapter import write_adapter
from qerl_jax.checkpoint.adapter_reader import lora_key, trained_base, trained_format
from qerl_jax.checkpoint.hub import is_hub_id
from qerl_jax.checkpoint.orbax import Checkpointer, latest_step, model_input, saved_inputs
from qerl_jax.checkpoint.peft_config import CONFIG_FILE as ADAPTER_CONFIG
from qerl_jax.checkpoint.run_files import ADAPTER_DIR, CONFIG_FILE
from qerl_jax.checkpoint.safetensors import model_fingerprint
from qerl_jax.config import Config, ConfigError
from qerl_jax.config import load as load_config
from qerl_jax.messages import shown
from qerl_jax.models.config import ModelConfig

# Paths of a `TrainState`'s arrays in a checkpoint.
_LORA = re.compile(r"lora/layers/(\d+)/\w+/\w+/lora/(\w+)/([ab])")
_NORM = re.compile(r"norms/layers/(\d+)/(\w+)/weight")


@dataclasses.dataclass(frozen=True)
class Source:
    """A trained policy on the disk.

    Attributes:
      directory: the run or adapter.
      base: model directory.
      base_model: the base's name: hub id, or absolute path.
      weight_format: format into which an unquantized base was quantized while loading; None: as stored.
      adapter: PEFT directory; None where the newest checkpoint holds what was trained.
      config: the run's; None for an adapter.
      step: step of that checkpoint; None with an adapter.
    """

    directory: Path
    base: Path
    base_model: str
    weight_format: str | None
    adapter: Path | None
    config: Config | None = None
    step: int | None = None

    @property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return hf_config.model_config(self.base)

    @property
    def quantizes(self) -> bool:
        """Whether the base was quantized while loading."""
        return self.weight_format not in (None, "bf16") and hf_config.stored_quantization(self.base) is None


def find_source(directory: Path, base: str | None = None, weight_format: str | None = None) -> Source:
    """The policy of a run's directory, or of an adapter and its base.

    Raises ConfigError where neither is there, where an adapter's base is not named, or for a `weight_format` that is
    not the run's.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory: name a run or an adapter")
    if (directory / ADAPTER_CONFIG).exists():
        if base is None:
            named = hf_config.read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise ConfigError(
                f"{directory} is an adapter: name its base with --base (its {ADAPTER_CONFIG} has {shown(named)})"
            )
        path = assets.model_path(base)
        return Source(directory, path, _name(base), format_for(directory, path, weight_format), directory)
    config_file, adapter = directory / CONFIG_FILE, directory / ADAPTER_DIR
    if not config_file.exists():
        raise ConfigError(f"{directory} is neither a run with {CONFIG_FILE} nor an adapter with {ADAPTER_CONFIG}")
    config = load_config(config_file)
    if weight_format not in (None, config.weight_format):
        raise ConfigError(
            f"--weight-format {weight_format!r} is not what the run was trained with: {config_file} has weight_format "
            f"{config.weight_format!r}"
        )
    step = None
    if not (adapter / ADAPTER_CONFIG).exists():  # a run that was finished and goes on has none, either
        adapter, step = None, latest_step(directory)
        if step is None:
            raise ConfigError(
                f"{directory} holds neither {ADAPTER_DIR}/ nor a complete checkpoint: nothing to export yet"
            )
    base = base or config.model
    return Source(directory, assets.model_path(base), _name(base), config.weight_format, adapter, config, step)


def format_for(adapter: Path, base: Path, weight_format: str | None) -> str | None:
    """`weight_format` to load an adapter's base with: the given one; None, and the base is not quantized: the one that
    the adapter was trained on, where it says so.
    """
    if weight_format is None and hf_config.stored_quantization(base) is None:
        return trained_format(adapter)
    return weight_format


def base_note(adapter: Path, base: Path, weight_format: str | None) -> str:
    """A line on the model that an adapter was trained on, and on its base here; "" where formats and files are equal,
    or the adapter does not name these.
    """
    trained, own, said = trained_format(adapter), loaded_format(base, weight_format), []
    if trained != own:
        unsaid = "does not say on weights of which format it was trained"
        on = f"was trained on weights in {trained.upper()}" if trained else unsaid
        said.append(f"the adapter {on}, its base has them in {own.upper()} here")
    if (files := trained_base(adapter)) and files != model_fingerprint(base):
        twice = "where it is merged into them, it counts twice"
        said.append(f"the files of {base} are not those that the adapter was trained on: {twice}")
    return "; ".join(said)


def loaded_format(base: Path, weight_format: str | None) -> str:
    """Format of a model's projections on the device, one of `WEIGHT_FORMATS`: what is stored, or what an unquantized
    checkpoint is brought into.
    """
    stored = hf_config.stored_quantization(base)
    return stored.layout.weight_format if stored else weight_format or "bf16"


def _name(base: str) -> str:
    return base if is_hub_id(base) else str(assets.model_path(base).absolute())


def write_trained_adapter(source: Source, directory: Path) -> None:
    """Write the adapter of a run's checkpoint into an empty directory, as the run itself would export it; no other
    array is read. Raises CheckpointError for a checkpoint that is damaged.
    """
    arrays = Checkpointer(source.directory, keep=None).read(source.step, ("lora/", "norms/", "reference_norms/"))
    found = ((_LORA.fullmatch(name), array) for name, array in arrays.items())
    lora = {
        lora_key(int(match[1]), match[2], match[3].upper()): np.ascontiguousarray(array.T)
        for match, array in found
        if match
    }
    moved = source.config.train_norms or any(name.startswith("reference_norms/") for name in arrays)
    tensors = lora, _norms(arrays) if moved else {}
    trained_on = loaded_format(source.base, source.weight_format)
    fingerprint = saved_inputs(source.directory).get(model_input(source.config))
    write_adapter(directory, source.config.lora, *tensors, source.base_model, trained_on, fingerprint)


def _norms(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {match: array for name, array in arrays.items() if (match := _NORM.fullmatch(name))}
    return {names.layer_norm(int(match[1]), match[2]): array for match, array in found.items()}
